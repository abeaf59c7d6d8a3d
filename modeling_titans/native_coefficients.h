// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The scalars by which state and inner gradients enter each weight inside a chunk, and their adjoint, token by token.
//
//     S_t = eta_t S_{t-1} - theta_t u_t,  W_t = (1 - alpha_t) W_{t-1} + S_t                     (Titans, eq. 13-14)
//
// holds for coefficients as it does for weights: with rows of one vector per earlier token,
//
//     E_t = eta_t E_{t-1} + theta_t e_t,  m_t = eta_t m_{t-1}
//     A_t = (1 - alpha_t) A_{t-1} + E_t,  d_t = (1 - alpha_t) d_{t-1} + m_t,  c_t = (1 - alpha_t) c_{t-1}
//
// Where the write slides over two tokens (Memory Caching, eq. 28), A_t = (1 - alpha_t) A_{t-1} + theta_t e_t +
// eta_t e_{t-1}, the momentum behind the chunk is the last pair alone, and before it the pair that came before.
#pragma once

#include "native_arena.h"
#include "native_vectors.h"

namespace titans {

// Scalars of a chunk's end. E and A behind it are the last rows of `Coefficients`.
template <class T>
struct EndScalars {
  T c, d, m;
};

template <class T>
class Coefficients {
 public:
  void cut(Cutter& cutter, long length, long queries) {
    length_ = length, queries_ = queries;
    stride_ = padded<T>(length), read_stride = padded<T>(queries);
    for (T** rows : {&A_, &E_}) *rows = cutter.take<T>(length * stride_);
    for (T** values : {&c_, &d_, &m_, &A_bar_, &E_bar_}) *values = cutter.take<T>(stride_);
    for (T** values : {&read_c, &read_d, &forgotten}) *values = cutter.take<T>(read_stride);
    read_A = cutter.take<T>(length * read_stride);
    last_E_ = cutter.take<T>(stride_);
    bar_rows_ = cutter.take<T>(queries * stride_);
    for (T** gates : {&theta_, &alpha_, &eta_}) *gates = cutter.take<T>(stride_);
  }

  // What is read with, tokens that write in rows and tokens that read in columns, padded with 0.
  T *read_A, *read_c, *read_d, *forgotten;
  long read_stride;

  const T* end_A() const { return A_ + (length_ - 1) * stride_; }
  const T* end_E() const { return last_E_; }
  EndScalars<T> end() const { return {c_[length_ - 1], d_[length_ - 1], sliding_ ? T(0) : m_[length_ - 1]}; }

  // The gates are ``stride`` numbers apart.
  void compute(const T* theta, long theta_stride, const T* alpha, long alpha_stride, const T* eta, long eta_stride,
               bool sliding) {
    sliding_ = sliding;
    for (long t = 0; t < length_; ++t) {
      theta_[t] = theta[t * theta_stride], alpha_[t] = alpha[t * alpha_stride], eta_[t] = eta[t * eta_stride];
    }
    for (long t = 0; t < length_; ++t) {
      const T kept = 1 - alpha_[t], past_c = t ? c_[t - 1] : T(1), past_m = t ? m_[t - 1] : T(1);
      const T past_d = t ? d_[t - 1] : T(0);
      c_[t] = kept * past_c;
      if (sliding) {
        d_[t] = t ? kept * past_d : eta_[0];
        m_[t] = 0;
      } else {
        m_[t] = eta_[t] * past_m;
        d_[t] = kept * past_d + m_[t];
      }
      rows(t, kept);
    }
    if (sliding) {
      std::fill(last_E_, last_E_ + stride_, T(0));
      last_E_[length_ - 1] = 1;
    } else {
      std::copy(E_ + (length_ - 1) * stride_, E_ + length_ * stride_, last_E_);
    }
    const long first = length_ - queries_;
    transpose(A_ + first * stride_, stride_, queries_, length_, read_A, read_stride, read_stride);
    for (long t = 0; t < read_stride; ++t) {
      const bool real = t < queries_;
      read_c[t] = real ? c_[first + t] : T(0);
      read_d[t] = real ? d_[first + t] : T(0);
      forgotten[t] = real ? 1 - c_[first + t] : T(0);
    }
  }

  // Gradients of the gates, ``stride`` apart, given those of what `compute` gave: ``read_A_bar`` as `read_A` is, and
  // behind the chunk.
  void adjoint(const T* read_A_bar, const T* read_c_bar, const T* read_d_bar, bool ended, EndScalars<T> end_bar,
               const T* end_A_bar, const T* end_E_bar, T* theta_bar, T* alpha_bar, T* eta_bar,
               long stride) {
    const long first = length_ - queries_;
    transpose(read_A_bar, read_stride, length_, queries_, bar_rows_, stride_, stride_);
    T c_bar = 0, d_bar = 0, m_bar = 0;
    std::fill(A_bar_, A_bar_ + stride_, T(0));
    std::fill(E_bar_, E_bar_ + stride_, T(0));
    if (ended) {
      c_bar = end_bar.c, d_bar = end_bar.d;
      std::copy(end_A_bar, end_A_bar + length_, A_bar_);
      if (!sliding_) {
        m_bar = end_bar.m;
        std::copy(end_E_bar, end_E_bar + length_, E_bar_);
      }
    }
    for (long t = length_ - 1; t >= 0; --t) {
      const T kept = 1 - alpha_[t];
      if (t >= first) {
        const T* bar = bar_rows_ + (t - first) * stride_;
        for (long i = 0; i < stride_; ++i) A_bar_[i] += bar[i];
        c_bar += read_c_bar[t - first], d_bar += read_d_bar[t - first];
      }
      T kept_bar = c_bar * (t ? c_[t - 1] : T(1)) + dot(A_bar_, t ? A_ + (t - 1) * stride_ : nullptr);
      if (sliding_) {
        theta_bar[t * stride] = A_bar_[t];
        eta_bar[t * stride] = t ? A_bar_[t - 1] : d_bar;
        if (t) kept_bar += d_bar * d_[t - 1];
      } else {
        if (t) kept_bar += d_bar * d_[t - 1];
        for (long i = 0; i < stride_; ++i) E_bar_[i] += A_bar_[i];
        m_bar += d_bar;
        theta_bar[t * stride] = E_bar_[t];
        eta_bar[t * stride] = m_bar * (t ? m_[t - 1] : T(1)) + dot(E_bar_, t ? E_ + (t - 1) * stride_ : nullptr);
        m_bar *= eta_[t];
        for (long i = 0; i < stride_; ++i) E_bar_[i] *= eta_[t];
      }
      alpha_bar[t * stride] = -kept_bar;
      c_bar *= kept, d_bar *= kept;
      for (long i = 0; i < stride_; ++i) A_bar_[i] *= kept;
    }
  }

 private:
  void rows(long t, T kept) {
    T *A = A_ + t * stride_, *E = E_ + t * stride_;
    if (t == 0) {
      std::fill(A, A + stride_, T(0));
      std::fill(E, E + stride_, T(0));
    } else {
      const T *past_A = A - stride_, *past_E = E - stride_, eta = sliding_ ? T(0) : eta_[t];
      for (long i = 0; i < stride_; ++i) {
        E[i] = eta * past_E[i];
        A[i] = kept * past_A[i] + E[i];
      }
    }
    A[t] = theta_[t];
    if (!sliding_) E[t] = theta_[t];
    if (sliding_ && t) A[t - 1] += eta_[t];
  }

  T dot(const T* x, const T* y) const {
    Vec<T> sum = {};
    if (y) {
      for (long i = 0; i < stride_; i += kLanes<T>) sum += load(x + i) * load(y + i);
    }
    return sum_of<T>(sum);
  }

  long length_, queries_, stride_;
  bool sliding_;
  T *theta_, *alpha_, *eta_;
  T *A_, *E_, *c_, *d_, *m_, *A_bar_, *E_bar_, *last_E_, *bar_rows_;
};

}  // namespace titans
