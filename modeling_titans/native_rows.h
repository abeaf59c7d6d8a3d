// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// What single tokens need: their features lie beside each other, at any address and of any number.
#pragma once

#include <array>

#include "native_vectors.h"

namespace titans {

// Rows of features, ``stride`` apart.
template <class T>
struct Rows {
  T* first;
  long stride;

  T* operator[](long i) const { return first + i * stride; }
};

template <class T>
inline void store_anywhere(T* p, Vec<T> x) {
  std::memcpy(p, &x, sizeof x);
}

// Calls f(i, count) for each vector of n numbers: ``count`` of them from the i-th on, fewer than a vector at the end.
template <class T, class F>
inline void each_vector(long n, F f) {
  long i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) f(i, std::integral_constant<long, kLanes<T>>());
  if (i < n) f(i, n - i);
}
template <class T>
inline Vec<T> load_some(const T* p, long count) {
  Vec<T> x = {};
  std::memcpy(&x, p, count * sizeof(T));
  return x;
}
template <class T, long Count>
inline Vec<T> load_some(const T* p, std::integral_constant<long, Count>) {
  return load_anywhere(p);
}
template <class T, class Count>
inline void store_some(T* p, Vec<T> x, Count count) {
  std::memcpy(p, &x, count * sizeof(T));
}

// y = f(x...) number by number, where f takes vectors.
template <class T, class F, class... X>
inline void map(long n, T* y, F f, const X*... x) {
  each_vector<T>(n, [&](long i, auto count) { store_some(y + i, f(load_some(x + i, count)...), count); });
}

// The sum of f(x...).
template <class T, class F, class... X>
inline T sum_of_map(long n, F f, const T* x, const X*... others) {
  Vec<T> sum = {};
  // Numbers behind the last one are 0 in each vector: f must be 0 there.
  each_vector<T>(n, [&](long i, auto count) { sum += f(load_some(x + i, count), load_some(others + i, count)...); });
  return sum_of<T>(sum);
}

template <class T>
inline T dot(const T* x, const T* y, long n) {
  return sum_of_map<T>(n, [](Vec<T> a, Vec<T> b) { return a * b; }, x, y);
}

// What the vectors of x come to, one number each: x[i] in lane i. Each round adds the halves of vectors in pairs.
template <class T>
inline Vec<T> totals_of(Vec<T> (&x)[kLanes<T>]) {
  constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
#pragma GCC unroll 4
  for (int half = kLanes<T> / 2; half; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      x[i] = interleaved<T>(x[i], x[i + half], 0, lanes) + interleaved<T>(x[i], x[i + half], 1, lanes);
    }
  }
  return x[0];
}

// N rows of a times M rows of x, n numbers each, not added up yet. For a single x one row at a time: the order that a
// processor foresees best, and sums in several parts keep it from waiting for the last one.
template <class T, int N, int M>
inline void dot_tile(Rows<const T> a, Rows<const T> x, long n, Vec<T> (*sums)[M]) {
  constexpr int parts = M == 1 ? 4 : 1, step = kLanes<T>;
  Vec<T> sum[parts][N][M] = {};
  const auto add = [&](int part, long i, auto count) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      const Vec<T> left = load_some(a[j] + i, count);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[part][j][m] += left * load_some(x[m] + i, count);
    }
  };
  constexpr std::integral_constant<long, step> whole;
  long i = 0;
  for (; i + parts * step <= n; i += parts * step) {
#pragma GCC unroll 4
    for (int part = 0; part < parts; ++part) add(part, i + part * step, whole);
  }
  for (; i + step <= n; i += step) add(0, i, whole);
  if (i < n) add(0, i, n - i);
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      sums[j][m] = sum[0][j][m];
      for (int part = 1; part < parts; ++part) sums[j][m] += sum[part][j][m];
    }
  }
}

// As many rows of a as a vector has lanes, or, at the end, ``number`` of them.
template <class T, int M>
inline void dot_lanes(Rows<const T> a, long number, Rows<const T> x, long n, Rows<T> y) {
  Vec<T> sums[kLanes<T>][M] = {};
  long j = 0;
  if constexpr (M > 1) {
    for (; j + 2 <= number; j += 2) dot_tile<T, 2, M>({a[j], a.stride}, x, n, sums + j);
  }
  for (; j < number; ++j) dot_tile<T, 1, M>({a[j], a.stride}, x, n, sums + j);
  for (int m = 0; m < M; ++m) {
    Vec<T> column[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) column[i] = sums[i][m];
    const Vec<T> totals = totals_of<T>(column);
    number == kLanes<T> ? store_anywhere(y[m], totals) : store_some(y[m], totals, number);
  }
}

// y[m][j] = a[j] . x[m] for j from begin to end, of ``number`` rows of x with n numbers each. Rows of a are read from
// memory once: that is what takes the time.
template <class T>
void multiply_rows(Rows<const T> a, long begin, long end, Rows<const T> x, long number, long n, Rows<T> y) {
  // Sums of two rows of a with so many of x fit 16 registers.
  constexpr std::array tiles{&dot_lanes<T, 1>, &dot_lanes<T, 2>, &dot_lanes<T, 3>,
                             &dot_lanes<T, 4>, &dot_lanes<T, 5>, &dot_lanes<T, 6>};
  for (long j = begin; j < end; j += kLanes<T>) {
    const long lanes = std::min<long>(end - j, kLanes<T>);
    for (long m = 0, some; m < number; m += some) {
      some = std::min<long>(number - m, tiles.size());
      tiles[some - 1]({a[j], a.stride}, lanes, {x[m], x.stride}, n, {y[m] + j, y.stride});
    }
  }
}

// y += x[0] a[0] + ... of ``rows`` rows of a with n numbers each.
template <class T>
void add_combination(const T* x, Rows<const T> a, long rows, long n, T* y) {
  long i = 0;
  for (; i + 4 <= rows; i += 4, a.first += 4 * a.stride) {
    const T x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
    each_vector<T>(n, [&](long j, auto count) {
      // The next rows often begin a page, which no processor foresees.
#pragma GCC unroll 4
      for (int row = 4; row < 8; ++row) __builtin_prefetch(a[row] + j);
      const Vec<T> first = x0 * load_some(a[0] + j, count) + x1 * load_some(a[1] + j, count);
      const Vec<T> second = x2 * load_some(a[2] + j, count) + x3 * load_some(a[3] + j, count);
      store_some(y + j, load_some(y + j, count) + first + second, count);
    });
  }
  for (; i < rows; ++i, a.first += a.stride) {
    const T factor = x[i];
    map(n, y, [=](Vec<T> sum, Vec<T> row) { return sum + factor * row; }, y, a[0]);
  }
}

template <class T>
inline Vec<T> sigmoid(Vec<T> x) {
  return T(1) / (T(1) + exponential(-x));
}
template <class T>
inline Vec<T> silu(Vec<T> x) {
  return x * sigmoid<T>(x);
}
template <class T>
inline T sigmoid_of(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <class T>
inline T sum_of_squares(const T* x, long n) {
  return dot(x, x, n);
}

// Root-mean-square normalisation of x with scale w.
template <class T>
void rms_norm(const T* x, const T* w, T eps, long n, T* y) {
  const T factor = 1 / std::sqrt(sum_of_squares(x, n) / n + eps);
  map(n, y, [=](Vec<T> a, Vec<T> b) { return a * factor * b; }, x, w);
}

// Layer normalisation without scale and shift, in place; returns 1 / sigma.
template <class T>
T layer_norm(T* x, T eps, long n) {
  const T mean = sum_of_map<T>(n, [](Vec<T> a) { return a; }, x) / n;
  map(n, x, [=](Vec<T> a) { return a - mean; }, x);
  const T rstd = 1 / std::sqrt(sum_of_squares(x, n) / n + eps);
  map(n, x, [=](Vec<T> a) { return a * rstd; }, x);
  return rstd;
}

// y = d x_hat / d f applied to y, in place.
template <class T>
void layer_norm_jacobian(T* y, const T* x_hat, T rstd, long n) {
  const T mean = sum_of_map<T>(n, [](Vec<T> a) { return a; }, y) / n, along = dot(y, x_hat, n) / n;
  map(n, y, [=](Vec<T> a, Vec<T> b) { return (a - mean - b * along) * rstd; }, y, x_hat);
}

// x with length 1, in place, unless it is shorter than eps.
template <class T>
void make_unit(T* x, T eps, long n) {
  const T factor = 1 / std::max(std::sqrt(sum_of_squares(x, n)), eps);
  map(n, x, [=](Vec<T> a) { return a * factor; }, x);
}

// Weights that sum to 1 in place of scores.
template <class T>
void softmax(T* x, long n) {
  const T most = *std::max_element(x, x + n);
  map(n, x, [=](Vec<T> a) { return exponential(a - most); }, x);
  const T factor = 1 / sum_of_map<T>(n, [](Vec<T> a) { return a; }, x);
  map(n, x, [=](Vec<T> a) { return a * factor; }, x);
}

}  // namespace titans
