// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The adjoint of a chunk: of its read, its update and its inner gradient (`chunk_backward.py`; MEMORY.md derives it).
#pragma once

#include "native_forward.h"

namespace titans {

template <class T>
class ChunkAdjoint : public Chunk<T> {
  using Base = Chunk<T>;
  using Base::a, Base::g, Base::slope, Base::bend, Base::x, Base::scores, Base::P, Base::read_slope, Base::factors;
  using Base::forget_to, Base::error, Base::scale, Base::product;

 public:
  using Base::p, Base::L, Base::D, Base::group, Base::coefficients;

  explicit ChunkAdjoint(const Problem<T>& problem) : Base(problem) {}

  void cut(Cutter& cutter) {
    Base::cut(cutter, true);
    const long b = p.length, tokens = p.token_stride, queries = p.query_stride, narrow = p.narrow_stride;
    for (T** t : {&output_bar, &q_bar}) *t = cutter.take<T>(D * queries);
    for (T** t : {&top_bar, &error_bar}) *t = cutter.take<T>(D * tokens);
    for (T** t : {&product_bar, &A_bar}) *t = cutter.take<T>(b * queries);
    read_rows = cutter.take<T>(p.queries * tokens);
    for (T** t : {&c_bar, &d_bar}) *t = cutter.take<T>(queries);
    for (T** t : {&end_A_bar, &end_E_bar, &along, &across}) *t = cutter.take<T>(tokens);
    for (T** t : {&through_W, &through_S}) *t = cutter.take<T>(p.widest * std::max(tokens, queries));
    q_rows = cutter.take<T>(p.queries * narrow), inner_rows = cutter.take<T>(2 * b * narrow);
    scale_sums = cutter.take<T>(D * kLanes<T>), shift_sums = cutter.take<T>(D * kLanes<T>);
    for (auto* list : {&r, &a_bar, &g_bar, &z_bar, &p_bar, &rows_c, &rows_d, &rows_start, &forget_to_bar}) {
      list->assign(L, nullptr);
    }
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      r[l] = cutter.take<T>(layer.out * queries);
      a_bar[l] = cutter.take<T>(layer.in * tokens);
      for (auto* list : {&g_bar, &z_bar}) (*list)[l] = cutter.take<T>(layer.out * tokens);
      if (l + 1 < L) p_bar[l] = cutter.take<T>(layer.out * tokens);
      for (auto* list : {&rows_c, &rows_d, &rows_start}) (*list)[l] = cutter.take<T>(p.queries * layer.stride);
      if (p.in.forget_to[0]) forget_to_bar[l] = cutter.take<T>(layer.size);
    }
  }

  void begin_row(long group) {
    Base::begin_row(group);
    for (T* sums : {scale_sums, shift_sums}) std::fill(sums, sums + D * kLanes<T>, T(0));
    for (long l = 0; l < L && forget_to_bar[0]; ++l) {
      std::fill(forget_to_bar[l], forget_to_bar[l] + p.layers[l].size, T(0));
    }
  }

  // Sums over a row's chunks.
  void end_row(const Tensors<T>& out) {
    for (long i = 0; i < D && p.has_norm(); ++i) {
      out.norm_weight[group * D + i] = sum_of<T>(load(scale_sums + i * kLanes<T>));
      out.norm_bias[group * D + i] = sum_of<T>(load(shift_sums + i * kLanes<T>));
    }
    for (long l = 0; l < L && forget_to_bar[0]; ++l) {
      give_out(p.layers[l], forget_to_bar[l], out.forget_to[l] + group * this->matrix(l));
    }
  }

  // The state behind chunk n from the one before it and what was kept.
  void write_again(long n, Cutter kept, const T* state, T* after) {
    this->place(kept);
    this->begin_chunk(n);
    this->inner_gradient_again(false);
    this->update(n, state, after);
  }

  // Chunk n from what was kept and the state before it; ``bar``, the gradient of the state behind it, becomes that of
  // the state before.
  void run(long n, Cutter kept, const T* state, T* bar, const T* output_bar_rows, const Tensors<T>& out) {
    const Places vectors = p.by_token(p.length, D), gates = p.by_token(p.length, 1), answers = p.by_token(p.queries, D);
    const long at = vectors.at(n, group), gate = gates.at(n, group), tokens = p.token_stride;
    const bool ended = p.write && p.is_full(n, group);
    this->place(kept);
    this->begin_chunk(n);
    this->inner_gradient_again(true);
    for (long l = 0; l + 1 < L; ++l) {
      this->activate(factors.read_z[l], p.layers[l].out * p.query_stride, x[l + 1], read_slope[l]);
    }
    transpose(output_bar_rows + p.output_bar.at(n, group), p.output_bar.token, p.queries, D, output_bar, p.query_stride, p.query_stride);
    unread(state);
    EndScalars<T> end_bar = {0, 0, 0};
    for (T* sums : {end_A_bar, end_E_bar}) std::fill(sums, sums + tokens, T(0));
    if (ended) unupdate(state, bar, end_bar);
    inner_adjoint(state, out.k + at, out.v + at, vectors.token);
    add_state(bar, ended ? coefficients.end() : EndScalars<T>{1, 0, 1});
    transpose(q_bar, p.query_stride, D, p.queries, out.q + answers.at(n, group), answers.token, D);
    coefficients.adjoint(A_bar, c_bar, d_bar, ended, end_bar, end_A_bar, end_E_bar, out.theta + gate,
                         out.alpha + gate, out.eta + gate, gates.token);
  }

 private:
  // Of the read: gradients of its queries, coefficients and of the factors a and g, and of what the state's is made of.
  void unread(const T* state) {
    const long queries = p.query_stride, tokens = p.token_stride, b = p.length, b_q = p.queries;
    T* top = r[L - 1];
    if (p.has_norm()) {
      add_row_sums(output_bar, factors.read_x_hat, D, queries, scale_sums);
      add_row_sums<T>(output_bar, nullptr, D, queries, shift_sums);
      this->scale_rows(output_bar, queries, top);
      norm_jacobian(top, factors.read_x_hat, factors.read_rstd, D, queries, top);
    } else {
      std::copy(output_bar, output_bar + D * queries, top);
    }
    std::fill(A_bar, A_bar + b * queries, T(0));
    for (T* sums : {c_bar, d_bar}) std::fill(sums, sums + queries, T(0));
    for (long l = L - 1; l >= 0; --l) {
      const Layer& layer = p.layers[l];
      this->attend(l);
      product({{g[l], tokens, true, r[l], queries, layer.out}}, b, queries, {product_bar, queries});
      each<T>(b * queries, [&](long i) {
        const Vec<T> bar = load(product_bar + i);
        store(A_bar + i, load(A_bar + i) - bar * load(scores + i));
        store(product_bar + i, -bar * load(coefficients.read_A + i));
      });
      transpose(product_bar, queries, b, b_q, read_rows, tokens, tokens);
      product({{x[l], queries, false, read_rows, tokens, b_q}}, layer.in, tokens, {a_bar[l], tokens});
      transpose(P, queries, b, b_q, read_rows, tokens, tokens);
      product({{r[l], queries, false, read_rows, tokens, b_q}}, layer.out, tokens, {g_bar[l], tokens});
      T* x_bar = l ? r[l - 1] : q_bar;
      unread_state(l, state, x_bar);
      if (l) {
        each<T>(layer.in * queries, [&](long i) { store(x_bar + i, load(x_bar + i) * load(read_slope[l - 1] + i)); });
      } else if (p.residual) {
        each<T>(D * queries, [&](long i) { store(q_bar + i, load(q_bar + i) + load(output_bar + i)); });
      }
    }
  }

  // The gradient of a layer's queries; through the state, W_0 and the attention, whose part is in product_bar.
  void unread_state(long l, const T* state, T* x_bar) {
    const Layer& layer = p.layers[l];
    const long queries = p.query_stride, b_q = p.queries, stride = layer.stride;
    const T* start = forget_to[l];
    product({{a[l], p.token_stride, false, product_bar, queries, p.length}}, layer.in, queries, {x_bar, queries});
    add_through(l, state + layer.weights, coefficients.read_c, T(1), c_bar, x_bar);
    add_through(l, state + layer.momentum, coefficients.read_d, T(1), d_bar, x_bar);
    if (start) add_through(l, start, coefficients.forgotten, T(-1), c_bar, x_bar);
    // The narrow side's tokens in rows, for the state's gradient.
    transpose(layer.flipped ? x[l] : r[l], queries, layer.columns, b_q, q_rows, stride, stride);
    copy_rows(q_rows, stride, b_q, stride, rows_c[l], stride, stride, coefficients.read_c);
    copy_rows(q_rows, stride, b_q, stride, rows_d[l], stride, stride, coefficients.read_d);
    if (start) copy_rows(q_rows, stride, b_q, stride, rows_start[l], stride, stride, coefficients.forgotten);
  }

  // Adds by * (W r) to x_bar, and sign * <W r, x> to ``bar``.
  void add_through(long l, const T* W, const T* by, T sign, T* bar, T* x_bar) {
    const long queries = p.query_stride, in = p.layers[l].in;
    this->back(l, W, r[l], queries, {through_W, queries});
    add_column_dots(through_W, x[l], sign, in, queries, bar);
    add_scaled_columns(through_W, by, T(1), in, queries, x_bar);
  }

  // Of the update, with respect to factors (added to a_bar, g_bar) and coefficients.
  void unupdate(const T* state, const T* bar, EndScalars<T>& end_bar) {
    const long tokens = p.token_stride;
    const T *by_A = token_weights(coefficients.end_A(), along), *by_E = token_weights(coefficients.end_E(), across);
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      const T *W_bar = bar + layer.weights, *S_bar = bar + layer.momentum;
      const bool inputs = layer.flipped;
      const T* narrow = inputs ? a[l] : g[l];
      T *narrow_bar = inputs ? a_bar[l] : g_bar[l], *wide_bar = inputs ? g_bar[l] : a_bar[l];
      const T* wide = inputs ? g[l] : a[l];
      // A half of the state is (wide, narrow).
      product({{W_bar, layer.stride, true, wide, tokens, layer.rows}}, layer.columns, tokens, {through_W, tokens});
      product({{S_bar, layer.stride, true, wide, tokens, layer.rows}}, layer.columns, tokens, {through_S, tokens});
      add_column_dots(through_W, narrow, T(-1), layer.columns, tokens, end_A_bar);
      add_column_dots(through_S, narrow, T(-1), layer.columns, tokens, end_E_bar);
      add_scaled_columns(through_W, by_A, T(-1), layer.columns, tokens, narrow_bar);
      add_scaled_columns(through_S, by_E, T(-1), layer.columns, tokens, narrow_bar);
      scale_columns(narrow, by_A, layer.columns, tokens, through_W);
      scale_columns(narrow, by_E, layer.columns, tokens, through_S);
      product({{W_bar, layer.stride, false, through_W, tokens, layer.columns},
                   {S_bar, layer.stride, false, through_S, tokens, layer.columns}},
                  layer.rows, tokens, {wide_bar, tokens, T(1), T(-1)});
      add_end(l, state, bar, end_bar);
    }
  }

  // The gradients of c, d and m, and of W_0, at the chunk's end.
  void add_end(long l, const T* state, const T* bar, EndScalars<T>& end_bar) {
    const Layer& layer = p.layers[l];
    const T *W = state + layer.weights, *S = state + layer.momentum;
    const T *W_bar = bar + layer.weights, *S_bar = bar + layer.momentum, *start = forget_to[l];
    Vec<T> c = {}, d = {}, m = {};
    const T forgotten = 1 - coefficients.end().c;
    each<T>(layer.size, [&](long i) {
      const Vec<T> w_bar = load(W_bar + i), s = load(S + i);
      c += w_bar * load(W + i), d += w_bar * s, m += load(S_bar + i) * s;
      if (start) {
        c -= w_bar * load(start + i);
        store(forget_to_bar[l] + i, load(forget_to_bar[l] + i) + forgotten * w_bar);
      }
    });
    end_bar.c += sum_of<T>(c), end_bar.d += sum_of<T>(d), end_bar.m += sum_of<T>(m);
  }

  const T* token_weights(const T* weights, T* room) {
    std::copy(weights, weights + p.length, room);
    std::fill(room + p.length, room + p.token_stride, T(0));
    return room;
  }

  // Through the inner gradient: k's and v's, and what that of the weights is made of (z_bar, p_bar).
  void inner_adjoint(const T* state, T* k_bar, T* v_bar, long stride) {
    const long tokens = p.token_stride;
    // Upwards through g_l = (g_{l+1} W_{l+1}^T) * gelu'(z_l).
    for (long l = 0; l + 1 < L; ++l) {
      each<T>(p.layers[l].out * tokens, [&](long i) {
        const Vec<T> bar = load(g_bar[l] + i);
        store(z_bar[l] + i, bar * load(bend[l] + i));
        store(p_bar[l] + i, bar * load(slope[l] + i));
      });
      const T* W = state + p.layers[l + 1].weights;
      this->forth(l + 1, W, p_bar[l], tokens, {g_bar[l + 1], tokens, T(1)});
    }
    error_adjoint();
    transpose(error_bar, tokens, D, p.length, v_bar, stride, D);
    // Downwards through z_l = a_l W_l, a_{l+1} = gelu(z_l).
    for (long l = L - 1; l >= 0; --l) {
      this->back(l, state + p.layers[l].weights, z_bar[l], tokens, {a_bar[l], tokens, T(1)});
      if (l) {
        each<T>(p.layers[l].in * tokens, [&](long i) {
          store(z_bar[l - 1] + i, load(z_bar[l - 1] + i) + load(a_bar[l] + i) * load(slope[l - 1] + i));
        });
      }
    }
    if (p.residual && !p.dot) {
      each<T>(D * tokens, [&](long i) { store(a_bar[0] + i, load(a_bar[0] + i) - load(error_bar + i)); });
    }
    transpose(a_bar[0], tokens, D, p.length, k_bar, stride, D);
  }

  // Through g_L = J (error * scale), J being LN's Jacobian: f's gradient into z_bar, v's into error_bar. M's own is
  // minus v's, or none if the error is -v.
  void error_adjoint() {
    const long tokens = p.token_stride, n = D * tokens;
    const T *x_hat = factors.x_hat, *rstd = factors.rstd;
    T *bar = g_bar[L - 1], *f_bar = z_bar[L - 1];
    const T by_output = p.dot ? T(0) : T(2), by_v = p.dot ? T(-1) : T(-2);
    if (!p.has_norm()) {
      each<T>(n, [&](long i) {
        store(error_bar + i, by_v * load(bar + i));
        store(f_bar + i, by_output * load(bar + i));
      });
      return;
    }
    // The gradient of error * scale, and the dots by which g_L depends on x_hat and 1 / sigma in J.
    norm_jacobian(bar, x_hat, rstd, D, tokens, top_bar);
    for (long i = 0; i < tokens; i += kLanes<T>) {
      const auto at_row = [&](const T* x, long row) { return load(x + row * tokens + i); };
      const Vec<T> scaled_dot =
          sum_rows<T>(D, [&](long row) { return at_row(error, row) * scale[row] * at_row(x_hat, row); });
      const Vec<T> bar_dot = sum_rows<T>(D, [&](long row) { return at_row(bar, row) * at_row(x_hat, row); });
      const Vec<T> sigma_dot = sum_rows<T>(D, [&](long row) { return at_row(bar, row) * at_row(g[L - 1], row); });
      const Vec<T> weight = load(rstd + i) / T(D);
      for (long row = 0; row < D; ++row) {
        const long at = row * tokens + i;
        const Vec<T> scaled_bar = load(top_bar + at), e = load(error + at), hat = load(x_hat + at);
        const Vec<T> from_output = by_output * scaled_bar * scale[row];
        const Vec<T> hat_bar = from_output * scale[row] - load(bar + at) * (weight * scaled_dot) -
                               e * scale[row] * (weight * bar_dot);
        store(f_bar + at, hat_bar);
        T *to_scale = scale_sums + row * kLanes<T>, *to_shift = shift_sums + row * kLanes<T>;
        store(to_scale, load(to_scale) + scaled_bar * e + from_output * hat);
        store(to_shift, load(to_shift) + from_output);
        store(error_bar + at, by_v * scaled_bar * scale[row]);
      }
      const Vec<T> mean = sum_rows<T>(D, [&](long row) { return at_row(f_bar, row); }) / T(D);
      const Vec<T> hat_dot = sum_rows<T>(D, [&](long row) { return at_row(f_bar, row) * at_row(x_hat, row); }) / T(D);
      for (long row = 0; row < D; ++row) {
        const long at = row * tokens + i;
        const Vec<T> hat = load(x_hat + at);
        store(f_bar + at, (load(f_bar + at) - mean - hat * hat_dot) * load(rstd + i) - hat * (weight * sigma_dot));
      }
    }
  }

  // The gradient of the state before the chunk: through the update, the read and the inner gradient, in one pass.
  void add_state(T* bar, EndScalars<T> end) {
    const long tokens = p.token_stride, queries = p.query_stride, b = p.length, b_q = p.queries;
    for (long l = 0; l < L; ++l) {
      const Layer& layer = p.layers[l];
      const long stride = layer.stride;
      T *W_bar = bar + layer.weights, *S_bar = bar + layer.momentum;
      const T* wide = layer.flipped ? r[l] : x[l];
      product({{wide, queries, false, rows_d[l], stride, b_q}}, layer.rows, layer.columns,
                  {S_bar, stride, end.m, T(1), nullptr, W_bar, end.d});
      if (forget_to[l]) {
        product({{wide, queries, false, rows_start[l], stride, b_q}}, layer.rows, layer.columns,
                    {forget_to_bar[l], stride, T(1)});
      }
      const Term<T> reading{wide, queries, false, rows_c[l], stride, b_q};
      // x^T r of two pairs: the layer's input with z's gradient, the gradient of p = g W^T with g.
      T* more_rows = inner_rows + b * p.narrow_stride;
      const T* narrow = layer.flipped ? this->token_rows(true, l, inner_rows) : in_rows(z_bar[l], layer, inner_rows);
      const Term<T> forward{layer.flipped ? z_bar[l] : a[l], tokens, false, narrow, stride, b};
      if (l) {
        const T* second = layer.flipped ? in_rows(p_bar[l - 1], layer, more_rows) : this->token_rows(false, l, more_rows);
        const Term<T> backward{layer.flipped ? g[l] : p_bar[l - 1], tokens, false, second, stride, b};
        product({reading, forward, backward}, layer.rows, layer.columns, {W_bar, stride, end.c});
      } else {
        product({reading, forward}, layer.rows, layer.columns, {W_bar, stride, end.c});
      }
    }
  }

  // A layer's narrow side, tokens in rows.
  const T* in_rows(const T* from, const Layer& layer, T* room) {
    transpose(from, p.token_stride, layer.columns, p.length, room, layer.stride, layer.stride);
    return room;
  }

  std::vector<T*> r, a_bar, g_bar, z_bar, p_bar, rows_c, rows_d, rows_start, forget_to_bar;
  T *output_bar, *q_bar, *top_bar, *error_bar, *product_bar, *A_bar, *read_rows, *c_bar, *d_bar;
  T *end_A_bar, *end_E_bar, *along, *across, *through_W, *through_S, *q_rows, *inner_rows, *scale_sums, *shift_sums;
};

}  // namespace titans
