// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// Matrix products of operands rounded to bfloat16, summed in float32: in pairs where the processor multiplies them so.
#pragma once

#include "native_arena.h"
#include "native_network.h"

#if defined(__AVX512BF16__) && !defined(TITANS_NO_BFLOAT16)
#define TITANS_BFLOAT16_PAIRS 1
#include <immintrin.h>
#endif

namespace titans {

// Takes products of T as a call wants them: plain, or rounded.
template <class T>
class Products {
 public:
  // Room for the operands of up to ``kTerms`` products that are summed.
  void cut(Cutter& cutter, const Problem<T>& p) {
    rounded_ = p.rounded;
    if (!rounded_) return;
    const long inner = padded<T>(std::max({p.widest, p.length, p.queries}));
    const long outer = std::max({p.token_stride, p.query_stride, padded<T>(p.dim), p.narrow_stride});
    left_ = cutter.take<T>(kTerms * std::max(p.widest, std::max(p.length, p.queries)) * inner);
    right_ = cutter.take<T>(kTerms * inner * outer);
  }

  void operator()(std::initializer_list<Term<T>> terms, long rows, long columns, const Result<T>& result) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (rounded_) {
        multiply_rounded(terms, rows, columns, result);
        return;
      }
    }
    multiply(terms, rows, columns, result);
  }

 private:
  static constexpr int kTerms = 4;

  void multiply_rounded(std::initializer_list<Term<float>> terms, long rows, long columns,
                        const Result<float>& result) const;

  bool rounded_ = false;
  T *left_ = nullptr, *right_ = nullptr;
};

#ifdef TITANS_BFLOAT16_PAIRS

// As `Term`, each 32 bits holding two neighbours in k.
struct PairTerm {
  const uint32_t* a;
  long a_stride;
  bool crosswise;
  const uint32_t* b;
  long b_stride;
  long pairs;
};

inline __m512bh pair_of(uint32_t x) { return (__m512bh)_mm512_set1_epi32(int(x)); }

struct Paired {
  template <int Rows, int Vectors>
  struct Kernel {
    static void run(const PairTerm* terms, int count, const Result<float>& result, long row, long column) {
      Vec<float> sum[Rows][Vectors] = {};
      for (const PairTerm* term = terms; term < terms + count; ++term) {
        const uint32_t* b = term->b + column;
        if (term->crosswise) {
          add<Rows, Vectors, true>(sum, term->a + row, *term, b);
        } else {
          add<Rows, Vectors, false>(sum, term->a + row * term->a_stride, *term, b);
        }
      }
      put<float, Rows, Vectors>(sum, row, column, result);
    }
  };

  template <int Rows, int Vectors, bool Crosswise>
  static inline void add(Vec<float> (&sum)[Rows][Vectors], const uint32_t* a, const PairTerm& term,
                         const uint32_t* b) {
    const long a_stride = term.a_stride;
    for (long k = 0; k < term.pairs; ++k, a += Crosswise ? a_stride : 1, b += term.b_stride) {
      __m512bh right[Vectors];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) right[j] = (__m512bh)_mm512_load_si512(b + j * 16);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
        const __m512bh left = pair_of(a[Crosswise ? i : i * a_stride]);
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) sum[i][j] = (Vec<float>)_mm512_dpbf16_ps((__m512)sum[i][j], left, right[j]);
      }
    }
  }
};

// (k, width) -> (k / 2, width), two rows in one.
inline void pair_rows(const float* from, long stride, long k, long width, uint32_t* to) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; ++i) order[2 * i] = uint16_t(i), order[2 * i + 1] = uint16_t(16 + i);
  const __m512i interleave = _mm512_load_si512(order);
  for (long r = 0; r < k; r += 2, from += 2 * stride, to += width) {
    for (long c = 0; c < width; c += 16) {
      const __m512 low = _mm512_loadu_ps(from + c);
      const __m512 high = r + 1 < k ? _mm512_loadu_ps(from + stride + c) : _mm512_setzero_ps();
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_store_si512(to + c, _mm512_permutexvar_epi16(interleave, both));
    }
  }
}

// (rows, k) -> (rows, k / 2), two columns in one; the columns after the last are 0.
inline void pair_columns(const float* from, long stride, long rows, long k, uint32_t* to, long to_stride) {
  for (long r = 0; r < rows; ++r, from += stride, to += to_stride) {
    for (long c = 0; c < k; c += 32) {
      const long left = k - c;
      const __mmask16 first = __mmask16(left >= 16 ? 0xffff : (1u << left) - 1);
      const __mmask16 second = __mmask16(left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0);
      const __m512 low = _mm512_maskz_loadu_ps(first, from + c), high = _mm512_maskz_loadu_ps(second, from + c + 16);
      _mm512_storeu_si512(to + c / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

template <class T>
void Products<T>::multiply_rounded(std::initializer_list<Term<float>> terms, long rows, long columns,
                                   const Result<float>& result) const {
  PairTerm pairs[kTerms];
  int count = 0;
  uint32_t *left = reinterpret_cast<uint32_t*>(left_), *right = reinterpret_cast<uint32_t*>(right_);
  const long width = padded<float>(columns), padded_rows = padded<float>(rows);
  for (const Term<float>& term : terms) {
    if (term.k == 0) continue;
    const long half = (term.k + 1) / 2, stride = term.crosswise ? padded_rows : padded<float>(half);
    if (term.crosswise) {
      pair_rows(term.a, term.a_stride, term.k, padded_rows, left);
    } else {
      pair_columns(term.a, term.a_stride, rows, term.k, left, stride);
    }
    pair_rows(term.b, term.b_stride, term.k, width, right);
    pairs[count++] = {left, stride, term.crosswise, right, width, half};
    left += term.crosswise ? half * padded_rows : rows * stride, right += half * width;
  }
  const PairTerm* const all = pairs;
  column_blocks<float, Paired::Kernel, kMaxVectors>(rows, 0, width / 16, all, count, result);
}

#else

// To the nearest bfloat16, to the even one of two; what is not a number stays so.
inline Vec<float> rounded(Vec<float> x) {
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes), may_alias));
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return x == x ? reinterpret_cast<Vec<float>>(nearest) : x;
}

inline void round_rows(const float* from, long stride, long rows, long columns, float* to, long to_stride) {
  for (long r = 0; r < rows; ++r, from += stride, to += to_stride) {
    long c = 0;
    for (; c + kLanes<float> <= columns; c += kLanes<float>) store(to + c, rounded(load_anywhere(from + c)));
    for (; c < columns; ++c) to[c] = rounded(filled(from[c]))[0];
  }
}

template <class T>
void Products<T>::multiply_rounded(std::initializer_list<Term<float>> terms, long rows, long columns,
                                   const Result<float>& result) const {
  Term<float> copies[kTerms];
  int count = 0;
  float *left = reinterpret_cast<float*>(left_), *right = reinterpret_cast<float*>(right_);
  const long width = padded<float>(columns);
  for (const Term<float>& term : terms) {
    if (term.k == 0) continue;
    const long height = term.crosswise ? term.k : rows, across = term.crosswise ? rows : term.k;
    const long stride = padded<float>(across);
    round_rows(term.a, term.a_stride, height, across, left, stride);
    round_rows(term.b, term.b_stride, term.k, width, right, width);
    copies[count++] = {left, stride, term.crosswise, right, width, term.k};
    left += height * stride, right += term.k * width;
  }
  multiply(copies, count, rows, columns, result);
}

#endif

}  // namespace titans
