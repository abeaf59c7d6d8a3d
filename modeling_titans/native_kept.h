// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// What the forward keeps for the backward: states now and then, and of each chunk what its products with a state gave.
#pragma once

#include "native_arena.h"
#include "native_network.h"

namespace titans {

// Of keys: z before each activation, p = g W^T behind it, what M's last layer gives, normalised if it is, and
// 1 / sigma; of queries the same without p.
template <class T>
struct Factors {
  std::vector<T*> z, p, read_z;
  T *x_hat, *rstd, *read_x_hat, *read_rstd;

  void cut(Cutter& cutter, const Problem<T>& problem) {
    const long tokens = problem.token_stride, queries = problem.query_stride, hidden = problem.depth - 1;
    for (auto* list : {&z, &p, &read_z}) list->resize(hidden);
    for (long l = 0; l < hidden; ++l) {
      const long width = problem.layers[l].out;
      for (auto* list : {&z, &p}) (*list)[l] = cutter.take<T>(width * tokens);
      read_z[l] = cutter.take<T>(width * queries);
    }
    x_hat = cutter.take<T>(problem.dim * tokens), rstd = cutter.take<T>(tokens);
    read_x_hat = cutter.take<T>(problem.dim * queries), read_rstd = cutter.take<T>(queries);
  }
};

// A row's states at the start of every ``span``-th chunk, and then each chunk's factors.
template <class T>
class Kept {
 public:
  const long span;

  Kept(const Problem<T>& p, T* begin)
      : span(std::max(1L, kTokens / p.length)), begin_(reinterpret_cast<char*>(begin)) {
    Cutter state(nullptr), factors(nullptr);
    state.take<T>(p.state_size);
    Factors<T>().cut(factors, p);
    state_bytes_ = state.used(), factor_bytes_ = factors.used();
    factors_at_ = (p.chunks + span - 1) / span * state_bytes_;
    row_bytes_ = factors_at_ + p.chunks * factor_bytes_;
  }

  explicit operator bool() const { return begin_; }
  long row_size() const { return row_bytes_ / sizeof(T); }

  bool has_state(long n) const { return begin_ && n % span == 0; }
  T* state(long group, long n) const {
    return reinterpret_cast<T*>(begin_ + group * row_bytes_ + n / span * state_bytes_);
  }
  Cutter factors(long group, long n) const {
    return Cutter(begin_ + group * row_bytes_ + factors_at_ + n * factor_bytes_);
  }

 private:
  // Between two states that are kept; those in between follow from factors.
  static constexpr long kTokens = 128;

  char* begin_;
  long state_bytes_, factor_bytes_, factors_at_, row_bytes_;
};

}  // namespace titans
