// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The attention of a block at one token of each row, which sees all that is kept (`attention_titans.py`).
#pragma once

#include "native_block.h"

namespace titans {

template <class T>
class BlockAttention {
 public:
  // cos and sin (rows, head_dim) turn the rows' new queries and keys.
  BlockAttention(Member<T>& member, const Block<T>& block, const T* cos, const T* sin)
      : member_(member), s(member.s), w(block.weights), state(block.state), own(member.own), shared(member.shared),
        cos_(cos), sin_(sin) {}

  // own.tokens: the rows' tokens, what was retrieved for them if ``retrieves``, and persistent tokens
  // -> shared.attention.
  void attend(bool retrieves) {
    const long number = s.rows * (1 + retrieves) + s.persistent, width = s.key_width();
    member_.project(w.q, own.tokens, shared.queries);
    member_.project(w.k, own.tokens, number, {shared.keys, width});
    member_.project(w.v, own.tokens, number, {shared.values, width});
    member_.wait();
    member_.each_head(s.key_value_heads, [&](long row, long head) { attend_group(row, head, retrieves); });
    member_.wait();
    member_.project(w.output, shared.attended, shared.attention);
    member_.wait();
  }

 private:
  Member<T>& member_;
  const BlockSizes& s;
  const BlockWeights<T>& w;
  const BlockState<T>& state;
  const OwnBuffers<T>& own;
  const SharedBuffers<T>& shared;
  const T *cos_, *sin_;

  // Of a row and head: those that were kept and, behind them, the new one.
  Rows<T> kept_of(T* room, long unit) const {
    return {room + (unit * s.kept_places + s.first_kept) * s.head_dim, s.head_dim};
  }

  void attend_group(long row, long head, bool retrieves) const {
    const long unit = row * s.key_value_heads + head, at = head * s.head_dim, width = s.key_width();
    const int groups = 1 + retrieves;
    Rows<T> keys[2], values[2];
    for (int i = 0; i < groups; ++i) {
      keys[i] = kept_of(i ? state.retrieved_keys : state.keys, unit);
      values[i] = kept_of(i ? state.retrieved_values : state.values, unit);
      const long newest = (i * s.rows + row) * width + at;
      rotate(shared.keys + newest, row, keys[i][s.kept]);
      std::copy_n(shared.values + newest, s.head_dim, values[i][s.kept]);
    }
    const long persistent = s.rows * groups * width + at, copies = s.attention_heads / s.key_value_heads;
    for (long h = head * copies; h < (head + 1) * copies; ++h) {
      const T* query = shared.queries + row * s.attention_width() + h * s.head_dim;
      T* y = shared.attended + row * s.attention_width() + h * s.head_dim;
      const long number = score(query, row, {shared.keys + persistent, width}, keys, groups);
      softmax(own.weights, number);
      combine({shared.values + persistent, width}, values, groups, y);
    }
  }

  void rotate(const T* x, long row, T* y) const {
    const T *cos = cos_ + row * s.head_dim, *sin = sin_ + row * s.head_dim;
    const long half = s.head_dim / 2;
    for (long i = 0; i < half; ++i) {
      const T first = x[i], second = x[half + i];
      y[i] = first * cos[i] - second * sin[i];
      y[half + i] = second * cos[half + i] + first * sin[half + i];
    }
  }

  // Scores of persistent tokens, for which the query is not turned, and of each group's kept and new keys, in
  // own.weights; returns their number.
  long score(const T* plain, long row, Rows<const T> persistent, const Rows<T>* keys, int groups) const {
    T* scores = own.weights;
    const auto add = [&](Rows<const T> rows, long number, const T* query) {
      multiply_rows<T>(rows, 0, number, {query, 0}, 1, s.head_dim, {scores, 0});
      scores += number;
    };
    add(persistent, s.persistent, plain);
    rotate(plain, row, own.query);
    for (int i = 0; i < groups; ++i) add({keys[i].first, keys[i].stride}, s.kept + 1, own.query);
    const long number = scores - own.weights;
    map(number, own.weights, [this](Vec<T> x) { return x * T(s.scaling); }, own.weights);
    return number;
  }

  void combine(Rows<const T> persistent, const Rows<T>* values, int groups, T* y) const {
    std::fill_n(y, s.head_dim, T(0));
    const T* weights = own.weights;
    const auto add = [&](Rows<const T> rows, long number) {
      add_combination<T>(weights, rows, number, s.head_dim, y);
      weights += number;
    };
    add(persistent, s.persistent);
    for (int i = 0; i < groups; ++i) add({values[i].first, values[i].stride}, s.kept + 1);
  }
};

}  // namespace titans
