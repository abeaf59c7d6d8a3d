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
      : member_(member), s(member.s), w(block.weights), before(block.before), after(block.after), own(member.own),
        shared(member.shared), cos_(cos), sin_(sin) {}

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
  // Keys or values of a row and head: those that were kept, and the new one.
  struct Kept {
    Rows<const T> old;
    const T* newest;
  };

  Member<T>& member_;
  const BlockSizes& s;
  const BlockWeights<T>& w;
  const BlockState<T>&before, &after;
  const OwnBuffers<T>& own;
  const SharedBuffers<T>& shared;
  const T *cos_, *sin_;

  void attend_group(long row, long head, bool retrieves) const {
    const long unit = row * s.key_value_heads + head, at = head * s.head_dim, width = s.key_width();
    const auto keep = [&](const T* old, T* next, T* newest) {
      const Rows<const T> kept{old + unit * s.kept * s.head_dim, s.head_dim};
      move_on(kept, newest, next + unit * s.kept_later * s.head_dim);
      return Kept{kept, newest};
    };
    Kept keys[2], values[2];
    for (int i = 0; i < 1 + retrieves; ++i) {
      T *key = shared.keys + (i * s.rows + row) * width + at, *value = shared.values + (i * s.rows + row) * width + at;
      std::copy_n(key, s.head_dim, own.query);
      rotate(own.query, row, key);
      keys[i] = keep(i ? before.retrieved_keys : before.keys, i ? after.retrieved_keys : after.keys, key);
      values[i] = keep(i ? before.retrieved_values : before.values, i ? after.retrieved_values : after.values, value);
    }
    const long persistent = s.rows * (1 + retrieves) * width + at, copies = s.attention_heads / s.key_value_heads;
    for (long h = head * copies; h < (head + 1) * copies; ++h) {
      const T* query = shared.queries + row * s.attention_width() + h * s.head_dim;
      T* y = shared.attended + row * s.attention_width() + h * s.head_dim;
      const long number = score(query, row, {shared.keys + persistent, width}, keys, 1 + retrieves);
      softmax(own.weights, number);
      combine({shared.values + persistent, width}, values, 1 + retrieves, y);
    }
  }

  // The last kept_later of the kept ones and the newest -> next.
  void move_on(Rows<const T> kept, const T* newest, T* next) const {
    if (!s.kept_later) return;
    const long stay = s.kept_later - 1;
    std::copy_n(kept[s.kept - stay], stay * s.head_dim, next);
    std::copy_n(newest, s.head_dim, next + stay * s.head_dim);
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
  long score(const T* plain, long row, Rows<const T> persistent, const Kept* keys, int groups) const {
    T* scores = own.weights;
    const auto add = [&](Rows<const T> rows, long number, const T* query) {
      multiply_rows<T>(rows, 0, number, {query, 0}, 1, s.head_dim, {scores, 0});
      scores += number;
    };
    add(persistent, s.persistent, plain);
    rotate(plain, row, own.query);
    for (int i = 0; i < groups; ++i) {
      add(keys[i].old, s.kept, own.query);
      add({keys[i].newest, 0}, 1, own.query);
    }
    const long number = scores - own.weights;
    map(number, own.weights, [this](Vec<T> x) { return x * T(s.scaling); }, own.weights);
    return number;
  }

  void combine(Rows<const T> persistent, const Kept* values, int groups, T* y) const {
    std::fill_n(y, s.head_dim, T(0));
    const T* weights = own.weights;
    const auto add = [&](Rows<const T> rows, long number) {
      add_combination<T>(weights, rows, number, s.head_dim, y);
      weights += number;
    };
    add(persistent, s.persistent);
    for (int i = 0; i < groups; ++i) {
      add(values[i].old, s.kept);
      add({values[i].newest, 0}, 1);
    }
  }
};

}  // namespace titans
