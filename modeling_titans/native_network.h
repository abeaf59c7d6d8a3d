// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// A call's sizes and tensors, the layout of its state, and what a memory network does between its matrix products.
//
// Everything about tokens lies with features in rows and tokens in columns, padded with columns of 0 to whole vectors:
// a token's sums then go through the lanes, and a layer's weights are read along their rows in every product.
#pragma once

#include <vector>

#include "native_products.h"

namespace titans {

// Weights (in, out) and momentum of one layer, each (rows, columns) with the wider side in rows and rows padded.
struct Layer {
  long in, out;
  bool flipped;  // Rows are outputs.
  long rows, columns, stride, size;
  long weights, momentum;  // Where they begin in a state.
};

// The tensors of `ScanInputs.flatten()`, or their gradients.
template <class T>
struct Tensors {
  T *q, *k, *v, *theta, *alpha, *eta;
  const uint8_t *full, *restart;
  T *norm_weight, *norm_bias;
  T *const *weights, *const *momentum, *const *forget_to, *const *start_weights, *const *start_momentum;

  Tensors(void* const* flat, long depth) {
    T* const* all = reinterpret_cast<T* const*>(flat);
    q = all[0], k = all[1], v = all[2], theta = all[3], alpha = all[4], eta = all[5];
    full = static_cast<const uint8_t*>(flat[6]), restart = static_cast<const uint8_t*>(flat[7]);
    norm_weight = all[8], norm_bias = all[9];
    weights = all + 10, momentum = weights + depth, forget_to = momentum + depth;
    start_weights = forget_to + depth, start_momentum = start_weights + depth;
  }
};

// Where a chunk's tokens lie; their features are neighbours.
struct Places {
  long chunk, group, token;

  long at(long n, long g) const { return n * chunk + g * group; }
};

struct Sizes {
  long depth, chunks, groups, length, queries;
  bool residual, write, rounded, dot, sliding;
  double eps;
  Places q, k, v, theta, alpha, eta, output_bar;
  const int64_t* widths;

  Sizes(const int64_t* s, double eps)
      : depth(s[0]), chunks(s[1]), groups(s[2]), length(s[3]), queries(s[4]), residual(s[5]), write(s[6]),
        rounded(s[7]), dot(s[8]), sliding(s[9]), eps(eps), widths(s + 31) {
    const int64_t* strides = s + 10;
    for (Places* places : {&q, &k, &v, &theta, &alpha, &eta, &output_bar}) {
      *places = {strides[0], strides[1], strides[2]};
      strides += 3;
    }
  }

  // What is given back lies token by token: (chunks, count, groups, features).
  Places by_token(long count, long features) const {
    return {count * groups * features, features, groups * features};
  }
};

template <class T>
struct Problem : Sizes {
  Tensors<T> in;
  std::vector<Layer> layers;
  long dim, state_size = 0, widest = 0, narrow_stride = 0;
  long token_stride, query_stride;

  Problem(const Sizes& sizes, void* const* inputs) : Sizes(sizes), in(inputs, sizes.depth), dim(sizes.widths[0]) {
    for (long l = 0; l < depth; ++l) {
      const long from = widths[l], to = widths[l + 1];
      Layer layer{from, to, from <= to, std::max(from, to), std::min(from, to), 0, 0, 0, 0};
      layer.stride = padded<T>(layer.columns), layer.size = layer.rows * layer.stride;
      layer.weights = state_size, layer.momentum = state_size + layer.size;
      state_size += 2 * layer.size;
      widest = std::max(widest, layer.rows);
      narrow_stride = std::max(narrow_stride, layer.stride);
      layers.push_back(layer);
    }
    token_stride = padded<T>(length), query_stride = padded<T>(queries);
  }

  bool has_norm() const { return in.norm_weight; }
  bool is_full(long chunk, long group) const { return !in.full || in.full[chunk * groups + group]; }
  bool restarts(long chunk, long group) const { return in.restart && in.restart[chunk * groups + group]; }
};

// A row and head's (in, out) matrix -> its place in a state.
template <class T>
void take_in(const Layer& layer, const T* from, T* to) {
  if (layer.flipped) {
    transpose(from, layer.out, layer.in, layer.out, to, layer.stride, layer.stride);
  } else {
    copy_rows(from, layer.out, layer.in, layer.out, to, layer.stride, layer.stride);
  }
}

template <class T>
void give_out(const Layer& layer, const T* from, T* to) {
  if (layer.flipped) {
    transpose(from, layer.stride, layer.out, layer.in, to, layer.out, layer.out);
  } else {
    copy_rows(from, layer.stride, layer.in, layer.out, to, layer.out, layer.out);
  }
}

// Calls f(i) at the start of each vector of n numbers, which are whole vectors.
template <class T, class F>
inline void each(long n, F f) {
  for (long i = 0; i < n; i += kLanes<T>) f(i);
}

// The sum of term(r) over rows, in eight parts: shorter chains are faster, and lose less to rounding.
template <class T, class F>
inline Vec<T> sum_rows(long rows, F term) {
  Vec<T> part[8] = {};
  long r = 0;
  for (; r + 8 <= rows; r += 8) {
    for (int i = 0; i < 8; ++i) part[i] += term(r + i);
  }
  for (; r < rows; ++r) part[0] += term(r);
  for (int half = 4; half; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

// out = by * x, columnwise.
template <class T>
void scale_columns(const T* x, const T* by, long rows, long stride, T* out) {
  for (long r = 0; r < rows; ++r, x += stride, out += stride) {
    each<T>(stride, [&](long i) { store(out + i, load(x + i) * load(by + i)); });
  }
}

// out += sign * by * x, columnwise.
template <class T>
void add_scaled_columns(const T* x, const T* by, T sign, long rows, long stride, T* out) {
  for (long r = 0; r < rows; ++r, x += stride, out += stride) {
    each<T>(stride, [&](long i) { store(out + i, load(out + i) + sign * load(by + i) * load(x + i)); });
  }
}

// sums += sign * sum of x * y over rows.
template <class T>
void add_column_dots(const T* x, const T* y, T sign, long rows, long stride, T* sums) {
  each<T>(stride, [&](long i) {
    const Vec<T> sum = sum_rows<T>(rows, [&](long r) { return load(x + r * stride + i) * load(y + r * stride + i); });
    store(sums + i, load(sums + i) + sign * sum);
  });
}

template <class T>
inline Vec<T> inverse_root(Vec<T> x) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = std::sqrt(x[i]);
  return T(1) / x;
}

// Layer normalisation without scale and shift of columns (rows, stride): f becomes x_hat.
template <class T>
void normalize(T* f, T eps, long rows, long stride, T* rstd) {
  each<T>(stride, [&](long i) {
    const Vec<T> mean = sum_rows<T>(rows, [&](long r) { return load(f + r * stride + i); }) / T(rows);
    const Vec<T> square = sum_rows<T>(rows, [&](long r) {
      const Vec<T> apart = load(f + r * stride + i) - mean;
      return apart * apart;
    });
    const Vec<T> inverse = inverse_root<T>(square / T(rows) + eps);
    for (long r = 0; r < rows; ++r) store(f + r * stride + i, (load(f + r * stride + i) - mean) * inverse);
    store(rstd + i, inverse);
  });
}

// out = d x_hat / d f applied to y, a symmetric matrix.
template <class T>
void norm_jacobian(const T* y, const T* x_hat, const T* rstd, long rows, long stride, T* out) {
  each<T>(stride, [&](long i) {
    const Vec<T> mean = sum_rows<T>(rows, [&](long r) { return load(y + r * stride + i); }) / T(rows);
    const Vec<T> along =
        sum_rows<T>(rows, [&](long r) { return load(y + r * stride + i) * load(x_hat + r * stride + i); }) / T(rows);
    const Vec<T> inverse = load(rstd + i);
    for (long r = 0; r < rows; ++r) {
      const long at = r * stride + i;
      store(out + at, (load(y + at) - mean - load(x_hat + at) * along) * inverse);
    }
  });
}

// sums (rows, lanes) += x * y; y null: x alone.
template <class T>
void add_row_sums(const T* x, const T* y, long rows, long stride, T* sums) {
  for (long r = 0; r < rows; ++r, x += stride, sums += kLanes<T>) {
    Vec<T> sum = load(sums);
    each<T>(stride, [&](long i) { sum += y ? load(x + i) * load(y + r * stride + i) : load(x + i); });
    store(sums, sum);
  }
}

}  // namespace titans
