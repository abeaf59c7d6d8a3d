// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// Vectors of the machine's width, what is done to them one by one, and transposes.
//
// Written with the vector extensions that GCC and Clang share, so that one source serves every processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace titans {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes), may_alias));
  typedef int32_t bits __attribute__((vector_size(kVectorBytes), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes), may_alias));
  typedef int64_t bits __attribute__((vector_size(kVectorBytes), may_alias));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
inline long padded(long n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <class T>
inline Vec<T> load(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <class T>
inline void store(T* p, Vec<T> x) {
  *reinterpret_cast<Vec<T>*>(p) = x;
}
template <class T>
inline Vec<T> load_anywhere(const T* p) {
  Vec<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline Vec<T> filled(T x) {
  return x - Vec<T>{};
}
template <class T>
inline T sum_of(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

// e^x by x = n log 2 + r and a polynomial in r, to the last bit or two; 0 and infinity beyond the type's range.
inline Vec<float> exponential(Vec<float> x) {
  using V = Vec<float>;
  using Bits = VectorOf<float>::bits;
  const V low = filled(-87.0f), high = filled(88.0f);
  V y = x < low ? low : x;
  y = y > high ? high : y;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold.
  const V shifted = y * 1.44269504f + shift;
  const V n = shifted - shift;
  V r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits scale = reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23);
  V result = reinterpret_cast<V>(scale);
  result = x > high ? filled(std::numeric_limits<float>::infinity()) : result;
  result = x < low ? V{} : result;
  return x == x ? result : x;
}

inline Vec<double> exponential(Vec<double> x) {
  using V = Vec<double>;
  using Bits = VectorOf<double>::bits;
  const V low = filled(-708.0), high = filled(709.0);
  V y = x < low ? low : x;
  y = y > high ? high : y;
  const double shift = 6755399441055744.0;  // 1.5 * 2^52
  const V shifted = y * 1.4426950408889634074 + shift;
  const V n = shifted - shift;
  V r = y - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  V p = filled(1.0 / 6227020800.0);
  const double inverse_factorials[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                       1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                       0.5,             1.0,            1.0};
  for (double factor : inverse_factorials) p = p * r + factor;
  const Bits scale = reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 52);
  V result = reinterpret_cast<V>(scale);
  result = x > high ? filled(std::numeric_limits<double>::infinity()) : result;
  result = x < low ? V{} : result;
  return x == x ? result : x;
}

// gelu(z) = z s with s = sigmoid(w), w = z (kLinear + kCubic z^2): the tanh form.
template <class T>
struct Gelu {
  static constexpr T kLinear = T(1.5957691216057308), kCubic = T(0.044715 * 1.5957691216057308);
  Vec<T> z, square, s, rest;

  explicit Gelu(Vec<T> z) : z(z), square(z * z) {
    const Vec<T> e = exponential(-z * (square * kCubic + kLinear));
    s = T(1) / (T(1) + e);
    // 1 - s to its last bit, as a difference would not give it; e may be infinite, where s is 0.
    rest = s > T(0) ? e * s : filled(T(1));
  }
  Vec<T> value() const { return z * s; }
  Vec<T> gate_slope() const { return square * (3 * kCubic) + kLinear; }
  Vec<T> slope() const { return s + z * (s * rest * gate_slope()); }
  // gelu'' = 2 s' + z s'',  s' = s (1 - s) w',  s'' = s' (1 - 2 s) w' + s (1 - s) w''.
  Vec<T> curvature() const {
    const Vec<T> spread = s * rest, first = spread * gate_slope();
    return first * T(2) + z * (first * (rest - s) * gate_slope() + spread * (z * (6 * kCubic)));
  }
};

template <class T, size_t... I>
inline Vec<T> interleaved(Vec<T> x, Vec<T> y, int from, std::index_sequence<I...>) {
#ifdef __clang__
  constexpr int n = kLanes<T>;
  return from == 0 ? __builtin_shufflevector(x, y, (I % 2 ? n + I / 2 : I / 2)...)
                   : __builtin_shufflevector(x, y, (I % 2 ? n + n / 2 + I / 2 : n / 2 + I / 2)...);
#else
  typedef typename VectorOf<T>::bits Bits;
  constexpr int n = kLanes<T>;
  return from == 0 ? __builtin_shuffle(x, y, Bits{(I % 2 ? n + I / 2 : I / 2)...})
                   : __builtin_shuffle(x, y, Bits{(I % 2 ? n + n / 2 + I / 2 : n / 2 + I / 2)...});
#endif
}

// A square of as many rows as a vector has lanes: each round is a perfect shuffle of all its elements.
template <class T>
inline void transpose_square(const T* from, long from_stride, T* to, long to_stride) {
  constexpr int n = kLanes<T>;
  constexpr auto lanes = std::make_index_sequence<n>{};
  Vec<T> x[n], y[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) x[i] = load_anywhere(from + i * from_stride);
#pragma GCC unroll 4
  for (int done = 1; done < n; done *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = interleaved<T>(x[i], x[i + n / 2], 0, lanes);
      y[2 * i + 1] = interleaved<T>(x[i], x[i + n / 2], 1, lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) std::memcpy(to + i * to_stride, &x[i], sizeof x[i]);
}

// to[c][r] = from[r][c]; columns of ``to`` from ``rows`` up to ``width`` become 0.
template <class T>
void transpose(const T* from, long from_stride, long rows, long columns, T* to, long to_stride, long width) {
  constexpr long n = kLanes<T>;
  const long whole_rows = rows / n * n, whole_columns = columns / n * n;
  for (long r = 0; r < whole_rows; r += n) {
    for (long c = 0; c < whole_columns; c += n) {
      transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    }
    for (long c = whole_columns; c < columns; ++c) {
      for (long i = r; i < r + n; ++i) to[c * to_stride + i] = from[i * from_stride + c];
    }
  }
  for (long c = 0; c < columns; ++c) {
    for (long r = whole_rows; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
    for (long r = rows; r < width; ++r) to[c * to_stride + r] = 0;
  }
}

// to[r][c] = from[r][c] * (by ? by[r] * sign : 1); columns from ``columns`` up to ``width`` become 0.
template <class T>
void copy_rows(const T* from, long from_stride, long rows, long columns, T* to, long to_stride, long width,
               const T* by = nullptr, T sign = 1) {
  for (long r = 0; r < rows; ++r) {
    const T* source = from + r * from_stride;
    T* target = to + r * to_stride;
    if (by) {
      const T factor = by[r] * sign;
      for (long c = 0; c < columns; ++c) target[c] = source[c] * factor;
    } else {
      std::memcpy(target, source, columns * sizeof(T));
    }
    for (long c = columns; c < width; ++c) target[c] = 0;
  }
}

}  // namespace titans
