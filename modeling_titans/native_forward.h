// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// One row and head of a memory, a chunk at a time: inner gradient, read and update (`chunk_forward.py`).
#pragma once

#include "native_coefficients.h"
#include "native_rounded.h"

namespace titans {

template <class T>
class Chunk {
 public:
  explicit Chunk(const Problem<T>& problem) : p(problem), L(problem.depth), D(problem.dim) {}

  void cut(Cutter& cutter, bool backward) {
    const long b = p.length, tokens = p.token_stride, queries = p.query_stride, narrow = p.narrow_stride;
    coefficients.cut(cutter, b, p.queries);
    product.cut(cutter, p);
    for (T** x : {&k, &v, &x_hat, &error}) *x = cutter.take<T>(D * tokens);
    for (T** x : {&q, &read_x_hat}) *x = cutter.take<T>(D * queries);
    k_rows = cutter.take<T>(b * padded<T>(D));
    rstd = cutter.take<T>(tokens), read_rstd = cutter.take<T>(queries);
    for (T** x : {&rows, &rows_A, &rows_E}) *x = cutter.take<T>(std::max(b, p.queries) * narrow);
    for (T** x : {&scaled_c, &scaled_d, &scaled_start}) *x = cutter.take<T>(narrow * queries);
    for (std::vector<T*>* list : {&a, &g, &slope, &bend, &x, &scores, &P, &read_slope, &Wx, &Sx, &start_x, &forget_to}) {
      list->assign(L, nullptr);
    }
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      a[l] = l ? cutter.take<T>(layer.in * tokens) : k;
      g[l] = cutter.take<T>(layer.out * tokens);
      x[l] = l ? cutter.take<T>(layer.in * queries) : q;
      // The backward wants each layer's; the forward one after another.
      for (auto* list : {&scores, &P}) (*list)[l] = l && !backward ? (*list)[0] : cutter.take<T>(b * queries);
      if (!layer.flipped) {
        for (auto* list : {&Wx, &Sx, &start_x}) (*list)[l] = cutter.take<T>(layer.out * queries);
      }
      if (p.in.forget_to[0]) forget_to[l] = cutter.take<T>(layer.size);
      if (l + 1 < L) {
        slope[l] = cutter.take<T>(layer.out * tokens);
        if (backward) bend[l] = cutter.take<T>(layer.out * tokens), read_slope[l] = cutter.take<T>(layer.out * queries);
      }
    }
  }

  void begin_row(long group) {
    this->group = group;
    for (long l = 0; l < L && p.in.forget_to[0]; ++l) {
      take_in(p.layers[l], p.in.forget_to[l] + group * matrix(l), forget_to[l]);
    }
    scale = p.has_norm() ? p.in.norm_weight + group * D : nullptr;
    shift = p.has_norm() ? p.in.norm_bias + group * D : nullptr;
  }

  // Takes in a chunk's tokens.
  void begin_chunk(long n) {
    const long b = p.length;
    coefficients.compute(p.in.theta + p.theta.at(n, group), p.theta.token, p.in.alpha + p.alpha.at(n, group),
                         p.alpha.token, p.in.eta + p.eta.at(n, group), p.eta.token, p.sliding);
    const T* keys = p.in.k + p.k.at(n, group);
    transpose(keys, p.k.token, b, D, k, p.token_stride, p.token_stride);
    copy_rows(keys, p.k.token, b, D, k_rows, padded<T>(D), padded<T>(D));
    transpose(p.in.v + p.v.at(n, group), p.v.token, b, D, v, p.token_stride, p.token_stride);
    transpose(p.in.q + p.q.at(n, group), p.q.token, p.queries, D, q, p.query_stride, p.query_stride);
  }

  // The state in which a row begins, or begins anew.
  void load_state(T* const* weights, T* const* momentum, T* state) const {
    for (long l = 0; l < L; ++l) {
      take_in(p.layers[l], weights[l] + group * matrix(l), state + p.layers[l].weights);
      take_in(p.layers[l], momentum[l] + group * matrix(l), state + p.layers[l].momentum);
    }
  }

  void store_state(const T* state, T* const* weights, T* const* momentum) const {
    for (long l = 0; l < L; ++l) {
      give_out(p.layers[l], state + p.layers[l].weights, weights[l] + group * matrix(l));
      give_out(p.layers[l], state + p.layers[l].momentum, momentum[l] + group * matrix(l));
    }
  }

  // a and g at the weights of ``state``; for the backward also what g's own derivative needs.
  void inner_gradient(const T* state, bool backward) {
    const long tokens = p.token_stride;
    for (long l = 0; l < L; ++l) {
      T* z = l + 1 < L ? a[l + 1] : x_hat;
      forth(l, state + p.layers[l].weights, a[l], tokens, {z, tokens});
      if (l + 1 < L) activate(z, p.layers[l].out * tokens, z, slope[l], backward ? bend[l] : nullptr);
    }
    if (p.has_norm()) normalize(x_hat, T(p.eps), D, tokens, rstd);
    compute_error();
    T* top = g[L - 1];
    if (p.has_norm()) {
      scale_rows(error, tokens, top);
      norm_jacobian(top, x_hat, rstd, D, tokens, top);
    } else {
      std::copy(error, error + D * tokens, top);
    }
    for (long l = L - 1; l > 0; --l) {
      T *below = g[l - 1], *curved = backward ? bend[l - 1] : nullptr;
      back(l, state + p.layers[l].weights, g[l], tokens, {below, tokens});
      each<T>(p.layers[l].in * tokens, [&](long i) {
        const Vec<T> error_above = load(below + i);
        store(below + i, error_above * load(slope[l - 1] + i));
        if (curved) store(curved + i, error_above * load(curved + i));
      });
    }
  }

  // Each token's inner loss, given `inner_gradient`.
  void inner_loss(T* loss) {
    each<T>(p.token_stride, [&](long i) {
      const Vec<T> sum = sum_rows<T>(D, [&](long r) {
        const long at = r * p.token_stride + i;
        return p.dot ? output_vector(k, x_hat, at, r) * load(v + at) : load(error + at) * load(error + at);
      });
      for (long t = i; t < std::min(i + kLanes<T>, p.length); ++t) loss[t] = sum[t - i] * (p.dot ? T(-1) : T(0.25));
    });
  }

  // M_{W_t}(q_t), given `inner_gradient`; read_x_hat is what M's last layer gives, normalised if it is.
  void read(const T* state, bool backward) {
    const long queries = p.query_stride, b = p.length;
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      const T *W = state + layer.weights, *S = state + layer.momentum;
      product({{a[l], p.token_stride, true, x[l], queries, layer.in}}, b, queries, {scores[l], queries});
      each<T>(b * queries, [&](long i) { store(P[l] + i, -load(coefficients.read_A + i) * load(scores[l] + i)); });
      T* z = l + 1 < L ? x[l + 1] : read_x_hat;
      const Term<T> attention{g[l], p.token_stride, false, P[l], queries, b};
      if (layer.flipped) {
        scale_columns(x[l], coefficients.read_c, layer.in, queries, scaled_c);
        scale_columns(x[l], coefficients.read_d, layer.in, queries, scaled_d);
        if (forget_to[l]) scale_columns(x[l], coefficients.forgotten, layer.in, queries, scaled_start);
        product({{W, layer.stride, false, scaled_c, queries, layer.in},
                     {S, layer.stride, false, scaled_d, queries, layer.in},
                     {forget_to[l], layer.stride, false, scaled_start, queries, forget_to[l] ? layer.in : 0},
                     attention},
                    layer.out, queries, {z, queries});
      } else {
        forth(l, W, x[l], queries, {Wx[l], queries});
        forth(l, S, x[l], queries, {Sx[l], queries});
        scale_columns(Wx[l], coefficients.read_c, layer.out, queries, z);
        add_scaled_columns(Sx[l], coefficients.read_d, T(1), layer.out, queries, z);
        if (forget_to[l]) {
          forth(l, forget_to[l], x[l], queries, {start_x[l], queries});
          add_scaled_columns(start_x[l], coefficients.forgotten, T(1), layer.out, queries, z);
        }
        product({attention}, layer.out, queries, {z, queries, T(1)});
      }
      if (l + 1 < L) activate(z, layer.out * queries, z, backward ? read_slope[l] : nullptr, nullptr);
    }
    if (p.has_norm()) normalize(read_x_hat, T(p.eps), D, queries, read_rstd);
  }

  // What was read, (b_q, D) in rows of ``stride``; it takes the place of read_x_hat.
  void give_output(T* output, long stride) {
    const long queries = p.query_stride;
    for (long r = 0; r < D; ++r) {
      each<T>(queries, [&](long i) {
        const long at = r * queries + i;
        store(read_x_hat + at, output_vector(q, read_x_hat, at, r));
      });
    }
    transpose(read_x_hat, queries, D, p.queries, output, stride, D);
  }

  // Puts the state behind the chunk into ``after``.
  void update(const T* state, T* after) {
    const EndScalars<T> end = coefficients.end();
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      const T* narrow = token_rows(layer.flipped, l, rows);
      copy_rows(narrow, layer.stride, p.length, layer.columns, rows_A, layer.stride, layer.stride,
                coefficients.end_A(), T(-1));
      copy_rows(narrow, layer.stride, p.length, layer.columns, rows_E, layer.stride, layer.stride,
                coefficients.end_E(), T(-1));
      const T *wide = layer.flipped ? g[l] : a[l], *W = state + layer.weights, *S = state + layer.momentum;
      T* new_W = after + layer.weights;
      product({{wide, p.token_stride, false, rows_A, layer.stride, p.length}}, layer.rows, layer.columns,
                  {new_W, layer.stride, end.c, T(1), nullptr, W, S, end.d});
      product({{wide, p.token_stride, false, rows_E, layer.stride, p.length}}, layer.rows, layer.columns,
                  {after + layer.momentum, layer.stride, end.m, T(1), nullptr, S});
      if (forget_to[l]) {
        each<T>(layer.size, [&](long i) {
          store(new_W + i, load(new_W + i) + (1 - end.c) * load(forget_to[l] + i));
        });
      }
    }
  }

 protected:
  // W^T x of a layer with weights or momentum W.
  void forth(long l, const T* W, const T* x, long stride, const Result<T>& result) {
    const Layer& layer = p.layers[l];
    product({{W, layer.stride, !layer.flipped, x, stride, layer.in}}, layer.out, stride, result);
  }

  // W r.
  void back(long l, const T* W, const T* r, long stride, const Result<T>& result) {
    const Layer& layer = p.layers[l];
    product({{W, layer.stride, layer.flipped, r, stride, layer.out}}, layer.in, stride, result);
  }

  // A layer's inputs or errors with tokens in rows (b, stride); ``room`` is used if they are not there already.
  const T* token_rows(bool inputs, long l, T* room) {
    const Layer& layer = p.layers[l];
    if (inputs && l == 0) return k_rows;
    const long features = inputs ? layer.in : layer.out;
    transpose(inputs ? a[l] : g[l], p.token_stride, features, p.length, room, layer.stride, layer.stride);
    return room;
  }

  // z -> gelu(z), and its slope and curvature where there is room for them.
  static void activate(const T* z, long n, T* value, T* slope, T* curvature) {
    each<T>(n, [&](long i) {
      const Gelu<T> gelu(load(z + i));
      store(value + i, gelu.value());
      if (slope) store(slope + i, gelu.slope());
      if (curvature) store(curvature + i, gelu.curvature());
    });
  }

  // d loss / d M(k): 2 (M - v), or -v for the inner loss -<M, v>; 0 where there is no token.
  void compute_error() {
    const long tokens = p.token_stride;
    for (long r = 0; r < D; ++r) {
      each<T>(tokens, [&](long i) {
        const long at = r * tokens + i;
        store(error + at, p.dot ? -load(v + at) : T(2) * (output_vector(k, x_hat, at, r) - load(v + at)));
      });
      for (long t = p.length; t < tokens; ++t) error[r * tokens + t] = 0;
    }
  }

  // M(x) of a feature, from M's last layer.
  Vec<T> output_vector(const T* x, const T* top, long at, long feature) const {
    Vec<T> y = load(top + at);
    if (scale) y = y * scale[feature] + shift[feature];
    return p.residual ? y + load(x + at) : y;
  }

  // out = x times LN's scale.
  void scale_rows(const T* x, long stride, T* out) const {
    for (long r = 0; r < D; ++r) {
      each<T>(stride, [&](long i) { store(out + r * stride + i, load(x + r * stride + i) * scale[r]); });
    }
  }

  long matrix(long l) const { return p.layers[l].in * p.layers[l].out; }

 public:
  const Problem<T>& p;
  const long L, D;
  long group = 0;
  Coefficients<T> coefficients;

 protected:
  Products<T> product;
  const T *scale = nullptr, *shift = nullptr;
  // Of keys: inputs and errors of layers, the slope of activations, the errors before it times the curvature.
  std::vector<T*> a, g, slope, bend;
  // Of queries: inputs, scores with the keys, minus A times the scores, slopes; W, S and W_0 applied where outputs
  // are the narrow side.
  std::vector<T*> x, scores, P, read_slope, Wx, Sx, start_x, forget_to;
  T *k, *v, *q, *k_rows, *x_hat, *error, *rstd, *read_x_hat, *read_rstd;
  T *rows, *rows_A, *rows_E, *scaled_c, *scaled_d, *scaled_start;
};

}  // namespace titans
