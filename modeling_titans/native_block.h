// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The tensors of a block that reads one token of each row (`native_blocks.py` lays them out), and what the threads
// that read it have in common.
#pragma once

#include "native_arena.h"
#include "native_rows.h"
#include "native_team.h"

namespace titans {

// `native_blocks.Sizes`. ``to_start``: whether forgetting leads to the start weights.
struct BlockSizes {
  int64_t variant, rows, width, intermediate, persistent;
  int64_t heads, dim, hidden, depth, taps, pending, places, turn;
  int64_t dot, sliding, chunk_gates, to_start, residual, silu_gating, closes;
  int64_t attention_heads, key_value_heads, head_dim, first_kept, kept, kept_places;
  double rms_eps, norm_eps, unit_eps, max_lr, max_forget, scaling;

  long inner() const { return heads * dim; }
  long attention_width() const { return attention_heads * head_dim; }
  long key_width() const { return key_value_heads * head_dim; }
  // Width of the memory network's l-th layer's inputs.
  long layer_width(long l) const { return l == 0 || l == depth ? dim : hidden; }
};

// In the order of `configuration_titans.CHOICES`.
enum Variant { kLmm, kMal, kMag, kMac };

// Tensors in the order in which they are given; absent ones are null.
template <class T>
class Reader {
 public:
  explicit Reader(void* const* at) : at_(at) {}
  T* next() { return static_cast<T*>(*at_++); }
  T* const* next(long n) {
    void* const* first = at_;
    at_ += n;
    return reinterpret_cast<T* const*>(first);
  }

 private:
  void* const* at_;
};

template <class T>
struct Linear {
  const T *weight, *bias;
  long in, out;

  Linear(Reader<T>& reader, long in, long out) : weight(reader.next()), bias(reader.next()), in(in), out(out) {}
};

template <class T>
struct MemoryWeights {
  Linear<T> q, k, v, theta, alpha, eta, gate, output;
  const T *conv, *norm_weight, *norm_bias, *output_norm;
  const T* const* start;

  MemoryWeights(Reader<T>& r, const BlockSizes& s)
      : q(r, s.width, s.inner()), k(r, s.width, s.inner()), v(r, s.width, s.inner()), theta(r, s.width, s.heads),
        alpha(r, s.width, s.heads), eta(r, s.width, s.heads), gate(r, s.width, s.inner()),
        output(r, s.inner(), s.width), conv(r.next()), norm_weight(r.next()), norm_bias(r.next()),
        output_norm(r.next()), start(r.next(s.depth)) {}
};

template <class T>
struct BlockWeights {
  const T *input_norm, *persistent;
  MemoryWeights<T> memory;
  Linear<T> q, k, v, output;
  const T *pre_attention_norm, *attention_norm, *memory_norm, *pre_mlp_norm;
  Linear<T> gate, up, down;

  BlockWeights(Reader<T>& r, const BlockSizes& s)
      : input_norm(r.next()), persistent(r.next()), memory(r, s), q(r, s.width, s.attention_width()),
        k(r, s.width, s.key_width()), v(r, s.width, s.key_width()), output(r, s.attention_width(), s.width),
        pre_attention_norm(r.next()), attention_norm(r.next()), memory_norm(r.next()), pre_mlp_norm(r.next()),
        gate(r, s.width, s.intermediate), up(r, s.width, s.intermediate), down(r, s.intermediate, s.width) {}
};

// Numbers that a token changes as a whole, as they are and as they will be.
template <class T>
struct Turns {
  T *now, *next;

  // Two places of ``size`` numbers take turns.
  Turns(T* room, long size, long turn)
      : now(room ? room + turn * size : nullptr), next(room ? room + (1 - turn) * size : nullptr) {}
};

// The tensors of a `TitansLayerState`, with room for more tokens (`native_rooms.py`): ``places`` in the open chunk,
// ``kept_places`` for keys.
template <class T>
struct BlockState {
  T *const *weights, *const *momentum, *const *segment_weights;
  T *k, *v, *theta, *alpha, *eta;
  T *const *inputs, *const *errors;
  T *keys, *values, *retrieved_keys, *retrieved_values;
  Turns<T> coefficient, mixed, past, tail, segment_tail;

  BlockState(Reader<T>& r, const BlockSizes& s)
      : weights(r.next(s.depth)), momentum(r.next(s.depth)), segment_weights(r.next(s.depth)), k(r.next()),
        v(r.next()), theta(r.next()), alpha(r.next()), eta(r.next()), inputs(r.next(s.depth - 1)),
        errors(r.next(s.depth)), keys(r.next()), values(r.next()), retrieved_keys(r.next()),
        retrieved_values(r.next()), coefficient(r.next(), s.rows * s.heads, s.turn),
        mixed(r.next(), s.rows * s.heads * (s.places + 1), s.turn),
        past(r.next(), s.rows * s.heads * (s.places + 1), s.turn),
        tail(r.next(), s.rows * (s.taps - 1) * 3 * s.inner(), s.turn),
        segment_tail(r.next(), s.rows * (s.taps - 1) * s.inner(), s.turn) {}
};

// The weights and momentum behind a chunk.
template <class T>
struct NextChunk {
  T *const *weights, *const *momentum;

  NextChunk(Reader<T>& r, const BlockSizes& s) : weights(r.next(s.depth)), momentum(r.next(s.depth)) {}
};

template <class T>
struct Block {
  BlockWeights<T> weights;
  BlockState<T> state;
  // Written if this token ends its chunk, else not there.
  NextChunk<T> next;

  Block(Reader<T>& parameters, Reader<T>& states, Reader<T>& nexts, const BlockSizes& s)
      : weights(parameters, s), state(states, s), next(nexts, s) {}
};

// What one thread computes and others read, behind a wait.
template <class T>
struct SharedBuffers {
  T *projected, *gates, *output_gate, *answers, *retrieved, *remembered;
  T *queries, *keys, *values, *attended, *attention;
  T *mlp_gate, *mlp_up, *mlp;

  SharedBuffers(Cutter& cutter, const BlockSizes& s) {
    const auto rows = [&](long width) { return cutter.take<T>(s.rows * width); };
    projected = rows(3 * s.inner()), gates = rows(3 * s.heads), output_gate = rows(s.inner());
    answers = rows(s.inner()), retrieved = rows(s.width), remembered = rows(s.width);
    queries = rows(s.attention_width()), attended = rows(s.attention_width()), attention = rows(s.width);
    const long tokens = 2 * s.rows + s.persistent;
    keys = cutter.take<T>(tokens * s.key_width()), values = cutter.take<T>(tokens * s.key_width());
    mlp_gate = rows(s.intermediate), mlp_up = rows(s.intermediate), mlp = rows(s.width);
  }
};

// What one thread has for itself.
template <class T>
struct OwnBuffers {
  // The rows' stream, what is normalised of it, retrieved tokens and persistent ones behind them.
  T *stream, *tokens, *mixed;
  // Of a head of the memory: vectors, scores of an open chunk's tokens, the layers' activations and their slopes.
  T *q, *k, *v, *answer, *error, *wide, *other_wide, *slopes, *scores;
  // Of a head of attention.
  T *query, *weights;

  OwnBuffers(Cutter& cutter, const BlockSizes& s) {
    stream = cutter.take<T>(s.rows * s.width), mixed = cutter.take<T>(s.rows * s.width);
    tokens = cutter.take<T>((2 * s.rows + s.persistent) * s.width);
    for (T** vector : {&q, &k, &v, &answer, &error}) *vector = cutter.take<T>(s.dim);
    const long widest = std::max(s.dim, s.hidden);
    wide = cutter.take<T>(widest), other_wide = cutter.take<T>(widest), slopes = cutter.take<T>(s.depth * widest);
    scores = cutter.take<T>(std::max(widest, s.pending + 1));
    query = cutter.take<T>(s.head_dim);
    weights = cutter.take<T>(s.persistent + 2 * (s.kept + 1));
  }
};

// One thread's part in the reading of a token.
template <class T>
class Member {
 public:
  Member(const BlockSizes& sizes, Team& team, long index, const SharedBuffers<T>& shared, Cutter& cutter)
      : s(sizes), shared(shared), own(cutter, sizes), team_(team), index_(index) {}

  const BlockSizes& s;
  const SharedBuffers<T>& shared;
  const OwnBuffers<T> own;

  void wait() { team_.wait(); }
  bool is_first() const { return index_ == 0; }

  // f(row, head) for this thread's part of all of them.
  template <class F>
  void each_head(long heads, F f) const {
    const Share part = team_.share(index_, s.rows * heads);
    for (long i = part.begin; i < part.end; ++i) f(i / heads, i % heads);
  }

  // This thread's part of y = x W^T + b for ``number`` rows of x; returns which part.
  Share project(const Linear<T>& linear, const T* x, long number, Rows<T> y) const {
    const Share part = team_.share(index_, linear.out);
    multiply_rows<T>({linear.weight, linear.in}, part.begin, part.end, {x, linear.in}, number, linear.in, y);
    for (long m = 0; m < number && linear.bias; ++m) {
      for (long j = part.begin; j < part.end; ++j) y[m][j] += linear.bias[j];
    }
    return part;
  }
  Share project(const Linear<T>& linear, const T* x, T* y) const {
    return project(linear, x, s.rows, {y, linear.out});
  }

  void norm(const T* x, const T* weight, long number, T* y) const {
    for (long m = 0; m < number; ++m) rms_norm(x + m * s.width, weight, T(s.rms_eps), s.width, y + m * s.width);
  }

 private:
  Team& team_;
  long index_;
};

}  // namespace titans
