// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// One row and head of a memory, a chunk at a time: inner gradient, read and update (`chunk_forward.py`).
#pragma once

#include "native_coefficients.h"
#include "native_kept.h"
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
    for (T** x : {&k, &v, &error}) *x = cutter.take<T>(D * tokens);
    for (T** x : {&q, &answer}) *x = cutter.take<T>(D * queries);
    for (T** x : {&scores, &P}) *x = cutter.take<T>(b * queries);
    k_rows = cutter.take<T>(b * padded<T>(D));
    for (T** x : {&rows, &rows_A, &rows_E}) *x = cutter.take<T>(std::max(b, p.queries) * narrow);
    for (T** x : {&scaled_c, &scaled_d, &scaled_start}) *x = cutter.take<T>(p.widest * queries);
    for (std::vector<T*>* list : {&a, &g, &slope, &bend, &x, &read_slope, &forget_to}) list->assign(L, nullptr);
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      a[l] = l ? cutter.take<T>(layer.in * tokens) : k;
      g[l] = cutter.take<T>(layer.out * tokens);
      x[l] = l ? cutter.take<T>(layer.in * queries) : q;
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

  // Where a chunk's factors are put, or were.
  void place(Cutter& cutter) { factors.cut(cutter, p); }

  // a and g at the weights of ``state``.
  void inner_gradient(const T* state) {
    const long tokens = p.token_stride;
    for (long l = 0; l < L; ++l) {
      T* z = l + 1 < L ? factors.z[l] : factors.x_hat;
      forth(l, state + p.layers[l].weights, a[l], tokens, {z, tokens});
      if (l + 1 < L) activate(z, p.layers[l].out * tokens, a[l + 1], slope[l]);
    }
    if (p.has_norm()) normalize(factors.x_hat, T(p.eps), D, tokens, factors.rstd);
    top_error();
    for (long l = L - 1; l > 0; --l) {
      T* above = factors.p[l - 1];
      back(l, state + p.layers[l].weights, g[l], tokens, {above, tokens});
      each<T>(p.layers[l].in * tokens, [&](long i) {
        store(g[l - 1] + i, load(above + i) * load(slope[l - 1] + i));
      });
    }
  }

  // The same from factors that were kept; with ``backward`` also what g's own derivative needs.
  void inner_gradient_again(bool backward) {
    top_error();
    for (long l = 0; l + 1 < L; ++l) {
      each<T>(p.layers[l].out * p.token_stride, [&](long i) {
        const Gelu<T> gelu(load(factors.z[l] + i));
        const Vec<T> above = load(factors.p[l] + i), gelu_slope = gelu.slope();
        store(a[l + 1] + i, gelu.value());
        store(g[l] + i, above * gelu_slope);
        if (!backward) return;
        store(slope[l] + i, gelu_slope);
        store(bend[l] + i, above * gelu.curvature());
      });
    }
  }

  // Each token's inner loss, given `inner_gradient`.
  void inner_loss(T* loss) {
    each<T>(p.token_stride, [&](long i) {
      const Vec<T> sum = sum_rows<T>(D, [&](long r) {
        const long at = r * p.token_stride + i;
        return p.dot ? output_vector(k, factors.x_hat, at, r) * load(v + at) : load(error + at) * load(error + at);
      });
      for (long t = i; t < std::min(i + kLanes<T>, p.length); ++t) loss[t] = sum[t - i] * (p.dot ? T(-1) : T(0.25));
    });
  }

  // M_{W_t}(q_t), given `inner_gradient`.
  void read(const T* state) {
    const long queries = p.query_stride;
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      const T *W = state + layer.weights, *S = state + layer.momentum;
      attend(l);
      scale_columns(x[l], coefficients.read_c, layer.in, queries, scaled_c);
      scale_columns(x[l], coefficients.read_d, layer.in, queries, scaled_d);
      if (forget_to[l]) scale_columns(x[l], coefficients.forgotten, layer.in, queries, scaled_start);
      T* z = l + 1 < L ? factors.read_z[l] : factors.read_x_hat;
      product({{W, layer.stride, !layer.flipped, scaled_c, queries, layer.in},
                   {S, layer.stride, !layer.flipped, scaled_d, queries, layer.in},
                   {forget_to[l], layer.stride, !layer.flipped, scaled_start, queries, forget_to[l] ? layer.in : 0},
                   {g[l], p.token_stride, false, P, queries, p.length}},
                  layer.out, queries, {z, queries});
      if (l + 1 < L) activate(z, layer.out * queries, x[l + 1], nullptr);
    }
    if (p.has_norm()) normalize(factors.read_x_hat, T(p.eps), D, queries, factors.read_rstd);
  }

  // What was read, (b_q, D) in rows of ``stride``.
  void give_output(T* output, long stride) {
    const long queries = p.query_stride;
    for (long r = 0; r < D; ++r) {
      each<T>(queries, [&](long i) {
        const long at = r * queries + i;
        store(answer + at, output_vector(q, factors.read_x_hat, at, r));
      });
    }
    transpose(answer, queries, D, p.queries, output, stride, D);
  }

  // Puts the state behind chunk n into ``after``, which may be ``state``.
  void update(long n, const T* state, T* after) {
    if (!p.is_full(n, group)) {
      if (after != state) std::copy(state, state + p.state_size, after);
      return;
    }
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
                  {new_W, layer.stride, end.c, T(1), W, S, end.d});
      product({{wide, p.token_stride, false, rows_E, layer.stride, p.length}}, layer.rows, layer.columns,
                  {after + layer.momentum, layer.stride, end.m, T(1), S});
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

  // z -> gelu(z), and its slope where there is room for it.
  static void activate(const T* z, long n, T* value, T* slope) {
    each<T>(n, [&](long i) {
      const Gelu<T> gelu(load(z + i));
      store(value + i, gelu.value());
      if (slope) store(slope + i, gelu.slope());
    });
  }

  // A layer's scores of queries with keys, and minus A times them.
  void attend(long l) {
    const long queries = p.query_stride, b = p.length;
    product({{a[l], p.token_stride, true, x[l], queries, p.layers[l].in}}, b, queries, {scores, queries});
    each<T>(b * queries, [&](long i) { store(P + i, -load(coefficients.read_A + i) * load(scores + i)); });
  }

  // The error of M(k), and its gradient by M's last layer.
  void top_error() {
    compute_error();
    T* top = g[L - 1];
    if (p.has_norm()) {
      scale_rows(error, p.token_stride, top);
      norm_jacobian(top, factors.x_hat, factors.rstd, D, p.token_stride, top);
    } else {
      std::copy(error, error + D * p.token_stride, top);
    }
  }

  // d loss / d M(k): 2 (M - v), or -v for the inner loss -<M, v>; 0 where there is no token.
  void compute_error() {
    const long tokens = p.token_stride;
    for (long r = 0; r < D; ++r) {
      each<T>(tokens, [&](long i) {
        const long at = r * tokens + i;
        store(error + at, p.dot ? -load(v + at) : T(2) * (output_vector(k, factors.x_hat, at, r) - load(v + at)));
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
  Factors<T> factors;
  // Of keys: inputs and errors of layers, the slope of activations, the errors before it times the curvature.
  std::vector<T*> a, g, slope, bend;
  // Of queries: inputs of layers, slopes; W_0.
  std::vector<T*> x, read_slope, forget_to;
  T *k, *v, *q, *k_rows, *error, *answer, *scores, *P;
  T *rows, *rows_A, *rows_E, *scaled_c, *scaled_d, *scaled_start;
};

}  // namespace titans
