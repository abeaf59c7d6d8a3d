// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The memory of a block, read at a segment's start, or written and read (Titans, eq. 11-16 and 21), at one token of
// each row. `chunk_decode.py` says how an open chunk is read.
#pragma once

#include <array>

#include "native_block.h"

namespace titans {

template <class T>
class BlockMemory {
 public:
  BlockMemory(Member<T>& member, const Block<T>& block)
      : member_(member), s(member.s), w(block.weights.memory), state(block.state), next(block.next),
        own(member.own), shared(member.shared) {}

  // x (rows, width) -> shared.retrieved: the memory at the segment's start.
  void retrieve(const T* x) {
    member_.project(w.q, x, s.rows, {shared.projected, 3 * s.inner()});
    member_.project(w.gate, x, shared.output_gate);
    member_.wait();
    member_.each_head(s.heads, [&](long row, long head) {
      convolve(row, head, 0, state.segment_tail, s.inner(), own.q);
      make_unit(own.q, T(s.unit_eps), s.dim);
      answer(row, head, [&](long l, const T* x, T* z) {
        add_combination(x, layer_of(state.segment_weights, l, unit(row, head)), s.layer_width(l),
                        s.layer_width(l + 1), z);
      });
    });
    give(shared.retrieved);
  }

  // x (rows, width) -> shared.remembered: the memory that x is written into.
  void remember(const T* x) {
    for (int part = 0; part < 3; ++part) {
      const Linear<T>& linear = *std::array{&w.q, &w.k, &w.v}[part];
      member_.project(linear, x, s.rows, {shared.projected + part * s.inner(), 3 * s.inner()});
      const Linear<T>& gate = *std::array{&w.theta, &w.alpha, &w.eta}[part];
      if (gate.weight) member_.project(gate, x, s.rows, {shared.gates + part * s.heads, 3 * s.heads});
    }
    member_.project(w.gate, x, shared.output_gate);
    member_.wait();
    member_.each_head(s.heads, [&](long row, long head) {
      T* const vectors[] = {own.q, own.k, own.v};
      for (int part = 0; part < 3; ++part) {
        convolve(row, head, part * s.inner(), state.tail, 3 * s.inner(), vectors[part]);
        if (part < 2) make_unit(vectors[part], T(s.unit_eps), s.dim);
      }
      write(row, head);
      read(row, head);
      if (s.closes) close(row, head);
    });
    give(shared.remembered);
  }

 private:
  Member<T>& member_;
  const BlockSizes& s;
  const MemoryWeights<T>& w;
  const BlockState<T>& state;
  const NextChunk<T>& next;
  const OwnBuffers<T>& own;
  const SharedBuffers<T>& shared;

  long unit(long row, long head) const { return row * s.heads + head; }
  Rows<const T> layer_of(const T* const* layers, long l, long unit) const {
    const long out = s.layer_width(l + 1);
    return {layers[l] + unit * s.layer_width(l) * out, out};
  }
  // What (rows, heads, places, width) holds of a head's tokens.
  Rows<T> tokens_of(T* tensor, long unit, long width) const { return {tensor + unit * s.places * width, width}; }
  // The same of (rows, places, heads, width).
  Rows<T> tokens_of(T* tensor, long row, long head, long width) const {
    return {tensor + (row * s.places * s.heads + head) * width, s.heads * width};
  }
  Rows<T> inputs_of(long l, long row, long head) const {
    return l ? tokens_of(state.inputs[l - 1], unit(row, head), s.layer_width(l)) : tokens_of(state.k, row, head, s.dim);
  }
  Rows<T> errors_of(long l, long row, long head) const {
    return tokens_of(state.errors[l], unit(row, head), s.layer_width(l + 1));
  }

  // silu of the convolution of a head's channels, which begin at ``part`` and the head, and the tail behind it.
  void convolve(long row, long head, long part, const Turns<T>& tail, long channels, T* y) const {
    const long first = part + head * s.dim, reach = s.taps - 1;
    const T* x = shared.projected + row * 3 * s.inner() + first;
    if (!w.conv) {
      map(s.dim, y, silu<T>, x);
      return;
    }
    const Rows<const T> old{tail.now + row * reach * channels + first, channels};
    const Rows<T> later{tail.next + row * reach * channels + first, channels};
    for (long c = 0; c < s.dim; ++c) {
      const T* taps = w.conv + (first + c) * s.taps;
      T sum = x[c] * taps[reach];
      for (long j = 0; j < reach; ++j) sum += old[j][c] * taps[j];
      y[c] = sum;
    }
    for (long j = 0; j < reach; ++j) std::copy_n(j + 1 < reach ? old[j + 1] : x, s.dim, later[j]);
    map(s.dim, y, silu<T>, y);
  }

  // A gate of a row and head, in its range: 0 is theta, 1 alpha, 2 eta.
  T gate(int which, long row, long head) const {
    const Linear<T>& linear = *std::array{&w.theta, &w.alpha, &w.eta}[which];
    if (!linear.weight) return which == 0;
    const double range = which == 0 || s.sliding ? s.max_lr : 1;
    return T(which == 1 ? s.max_forget : range) * sigmoid_of(shared.gates[(row * 3 + which) * s.heads + head]);
  }

  // Puts the token into the open chunk: its key, value and gates, its factors, and the coefficients.
  void write(long row, long head) const {
    std::copy_n(own.k, s.dim, tokens_of(state.k, row, head, s.dim)[s.pending]);
    std::copy_n(own.v, s.dim, tokens_of(state.v, row, head, s.dim)[s.pending]);
    T gates[] = {gate(0, row, head), gate(1, row, head), gate(2, row, head)};
    T* const rooms[] = {state.theta, state.alpha, state.eta};
    for (int i = 0; i < 3; ++i) *tokens_of(rooms[i], row, head, 1)[s.pending] = gates[i];
    // Where a chunk shares its gates, its first token's count.
    for (int i = 0; i < 3 && s.chunk_gates; ++i) gates[i] = *tokens_of(rooms[i], row, head, 1)[0];
    write_factors(row, head);
    write_coefficients(unit(row, head), gates[0], gates[1], gates[2]);
  }

  // The factors of the inner gradient at the chunk's start weights, behind those of the chunk's other tokens.
  void write_factors(long row, long head) const {
    const long g = unit(row, head), P = s.pending, last = s.depth - 1;
    const T* a = own.k;
    for (long l = 0; l < last; ++l) {
      T *z = inputs_of(l + 1, row, head)[P], *slope = own.slopes + l * s.hidden;
      product(a, state.weights, l, g, z);
      map(s.hidden, slope, [](Vec<T> x) { return Gelu<T>(x).slope(); }, z);
      map(s.hidden, z, [](Vec<T> x) { return Gelu<T>(x).value(); }, z);
      a = z;
    }
    T* error = errors_of(last, row, head)[P];
    write_error(a, head, g, error);
    for (long l = last; l > 0; --l) {
      T *below = errors_of(l - 1, row, head)[P], *slope = own.slopes + (l - 1) * s.hidden;
      multiply_rows<T>(layer_of(state.weights, l, g), 0, s.hidden, {error, 0}, 1, s.layer_width(l + 1), {below, 0});
      map(s.hidden, below, [](Vec<T> x, Vec<T> y) { return x * y; }, below, slope);
      error = below;
    }
  }

  // The error at the last layer's output, given that layer's input.
  void write_error(const T* a, long head, long g, T* error) const {
    T* f = own.error;
    T rstd = 1;
    if (!s.dot || w.norm_weight) product(a, state.weights, s.depth - 1, g, f);
    if (w.norm_weight) rstd = layer_norm(f, T(s.norm_eps), s.dim);
    if (s.dot) {
      map(s.dim, error, [](Vec<T> v) { return -v; }, own.v);
    } else {
      finish(own.k, f, head, error);
      map(s.dim, error, [](Vec<T> y, Vec<T> v) { return T(2) * (y - v); }, error, own.v);
    }
    if (w.norm_weight) {
      map(s.dim, error, [](Vec<T> x, Vec<T> y) { return x * y; }, error, w.norm_weight + head * s.dim);
      layer_norm_jacobian(error, f, rstd, s.dim);
    }
  }

  // One step of the recurrences of `chunk_decode.py`.
  void write_coefficients(long g, T theta, T alpha, T eta) const {
    const T c = 1 - alpha, d = eta, m = s.sliding ? 0 : eta, one = s.sliding ? 1 : theta;
    const long at = g * (s.places + 1);
    const T *mixed = state.mixed.now + at, *past = state.past.now + at;
    T *next_mixed = state.mixed.next + at, *next_past = state.past.next + at;
    state.coefficient.next[g] = c * state.coefficient.now[g];
    for (long t = 0; t <= s.pending; ++t) next_mixed[t] = c * mixed[t] + d * past[t], next_past[t] = m * past[t];
    next_mixed[s.pending + 1] = theta, next_past[s.pending + 1] = one;
  }

  // The answer to the query behind the token's write.
  void read(long row, long head) const {
    const long g = unit(row, head), tokens = s.pending + 1;
    const T c = state.coefficient.next[g], *mixed = state.mixed.next + g * (s.places + 1), d = mixed[0];
    answer(row, head, [&](long l, const T* x, T* z) {
      const long in = s.layer_width(l), out = s.layer_width(l + 1);
      const auto add_scaled = [&](T factor, const T* const* layers, long head_of) {
        map(in, own.scores, [=](Vec<T> a) { return factor * a; }, x);
        add_combination(own.scores, layer_of(layers, l, head_of), in, out, z);
      };
      add_scaled(c, state.weights, g);
      add_scaled(d, state.momentum, g);
      if (s.to_start) add_scaled(1 - c, w.start, head);
      const Rows<T> inputs = inputs_of(l, row, head), errors = errors_of(l, row, head);
      multiply_rows<T>({inputs.first, inputs.stride}, 0, tokens, {x, 0}, 1, in, {own.scores, 0});
      map(tokens, own.scores, [](Vec<T> score, Vec<T> A) { return -A * score; }, own.scores, mixed + 1);
      add_combination<T>(own.scores, {errors.first, errors.stride}, tokens, out, z);
    });
  }

  // The weights and momentum behind the chunk's last token.
  void close(long row, long head) const {
    const long g = unit(row, head);
    const T *mixed = state.mixed.next + g * (s.places + 1), *past = state.past.next + g * (s.places + 1);
    const T c = state.coefficient.next[g], rest = 1 - c, d = mixed[0], m = past[0];
    for (long l = 0; l < s.depth; ++l) {
      const long in = s.layer_width(l), out = s.layer_width(l + 1);
      const Rows<const T> weights = layer_of(state.weights, l, g), momentum = layer_of(state.momentum, l, g);
      for (long i = 0; i < in; ++i) {
        T *W = next.weights[l] + (g * in + i) * out, *S = next.momentum[l] + (g * in + i) * out;
        map(out, W, [=](Vec<T> x, Vec<T> y) { return c * x + d * y; }, weights[i], momentum[i]);
        map(out, S, [=](Vec<T> x) { return m * x; }, momentum[i]);
        if (s.to_start) {
          map(out, W, [=](Vec<T> x, Vec<T> y) { return x + rest * y; }, W, layer_of(w.start, l, head)[i]);
        }
        take_away(mixed + 1, l, row, head, i, W);
        take_away(past + 1, l, row, head, i, S);
      }
    }
  }

  // The i-th row of the sum of the open chunk's outer products, times their coefficients, from y.
  void take_away(const T* coefficients, long l, long row, long head, long i, T* y) const {
    const Rows<T> inputs = inputs_of(l, row, head), errors = errors_of(l, row, head);
    for (long t = 0; t <= s.pending; ++t) own.scores[t] = -coefficients[t] * inputs[t][i];
    add_combination<T>(own.scores, {errors.first, errors.stride}, s.pending + 1, s.layer_width(l + 1), y);
  }

  void product(const T* x, const T* const* layers, long l, long g, T* z) const {
    std::fill_n(z, s.layer_width(l + 1), T(0));
    add_combination(x, layer_of(layers, l, g), s.layer_width(l), s.layer_width(l + 1), z);
  }

  // y = M(x) from the last layer's result, or from what layer normalisation has made of it.
  void finish(const T* x, const T* f, long head, T* y) const {
    const T *weight = w.norm_weight + head * s.dim, *bias = w.norm_bias + head * s.dim;
    if (w.norm_weight) {
      map(s.dim, y, [](Vec<T> a, Vec<T> b, Vec<T> c) { return a * b + c; }, f, weight, bias);
    } else {
      std::copy_n(f, s.dim, y);
    }
    if (s.residual) map(s.dim, y, [](Vec<T> a, Vec<T> b) { return a + b; }, y, x);
  }

  // M's answer to own.q, whose layers are products(l, x, z): z += x W_l; normalised and gated, into shared.answers.
  template <class Products>
  void answer(long row, long head, Products products) const {
    const T* x = own.q;
    T *z = own.wide, *other = own.other_wide;
    for (long l = 0; l < s.depth; ++l) {
      std::fill_n(z, s.layer_width(l + 1), T(0));
      products(l, x, z);
      if (l + 1 < s.depth) map(s.hidden, z, [](Vec<T> a) { return Gelu<T>(a).value(); }, z);
      x = z;
      std::swap(z, other);
    }
    T* f = other;
    if (w.norm_weight) layer_norm(f, T(s.norm_eps), s.dim);
    finish(own.q, f, head, own.answer);
    const long at = row * s.inner() + head * s.dim;
    T* y = shared.answers + at;
    rms_norm(own.answer, w.output_norm, T(s.rms_eps), s.dim, y);
    map(s.dim, y, [](Vec<T> a, Vec<T> b) { return a * silu<T>(b); }, y, shared.output_gate + at);
  }

  // shared.answers -> the layer's output.
  void give(T* output) {
    member_.wait();
    member_.project(w.output, shared.answers, output);
    member_.wait();
  }
};

}  // namespace titans
