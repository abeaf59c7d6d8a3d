// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// Matrix products of operands that lie in a core's cache: no packing, sums in registers, results combined on the way.
#pragma once

#include <array>
#include <initializer_list>

#include "native_vectors.h"

namespace titans {

// A term of a sum of products, (m, k) x (k, n): a is (m, k), or (k, m) if ``crosswise``. Rows of b are aligned and as
// long as n is padded.
template <class T>
struct Term {
  const T* a;
  long a_stride;
  bool crosswise;
  const T* b;
  long b_stride;
  long k;
};

// What becomes of a sum of products p: c = keep * base + other_scale * other + scale * p.
template <class T>
struct Result {
  T* c;
  long stride;
  T keep = 0;
  T scale = 1;
  const T* base = nullptr;  // Null: c itself.
  const T* other = nullptr;
  T other_scale = 0;
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
// Vectors side by side in a tile, and its rows: sums, one row of b and a broadcast element fit the vector registers, and
// pointers to the rows of a the others.
constexpr int kMaxVectors = kRegisters == 32 ? 4 : 2;
constexpr int rows_of_tile(int vectors) {
  return kRegisters == 32 ? std::array<int, 4>{8, 8, 8, 6}[vectors - 1] : std::array<int, 2>{8, 6}[vectors - 1];
}

// Puts a tile's sums where they belong.
template <class T, int Rows, int Vectors>
inline void put(Vec<T> (&sum)[Rows][Vectors], long row, long column, const Result<T> result) {
  using V = Vec<T>;
  constexpr int n = kLanes<T>;
  const long offset = row * result.stride + column;
  T* c = result.c + offset;
  const T* base = result.base ? result.base + offset : c;
  const T* other = result.other ? result.other + offset : nullptr;
  const auto each_sum = [&](auto f) {
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) f(sum[i][j], i * result.stride + j * n);
    }
  };
  if (result.scale != 1) each_sum([&](V& x, long) { x *= result.scale; });
  if (result.keep != 0) each_sum([&](V& x, long at) { x += result.keep * load(base + at); });
  if (other) each_sum([&](V& x, long at) { x += result.other_scale * load(other + at); });
  each_sum([&](V& x, long at) { store(c + at, x); });
}

// How tiles of Vectors vectors in width cover ``rows`` rows: of nearly equal height, since a short last one would leave
// most of the registers idle. ``tiles`` are functions by height.
template <int Vectors, class Table, class... Arguments>
void column_block(const Table& tiles, long rows, long column, const Arguments&... arguments) {
  constexpr int most = rows_of_tile(Vectors);
  const long num_tiles = (rows + most - 1) / most;
  for (long i = 0, row = 0; i < num_tiles; ++i) {
    const long height = rows / num_tiles + (i < rows % num_tiles);
    tiles[height - 1](arguments..., row, column);
    row += height;
  }
}

// Covers (rows, columns) by tiles; Kernel<Rows, Vectors>::run(arguments..., row, column) computes one.
template <class T, template <int, int> class Kernel, int Vectors, size_t... I, class... Arguments>
void column_block_of(std::index_sequence<I...>, long rows, long column, const Arguments&... arguments) {
  static constexpr std::array tiles{&Kernel<int(I) + 1, Vectors>::run...};
  column_block<Vectors>(tiles, rows, column, arguments...);
}

template <class T, template <int, int> class Kernel, int Vectors, class... Arguments>
void column_blocks(long rows, long column, long vectors, const Arguments&... arguments) {
  constexpr auto heights = std::make_index_sequence<rows_of_tile(Vectors)>{};
  for (; vectors >= Vectors; vectors -= Vectors, column += Vectors * kLanes<T>) {
    column_block_of<T, Kernel, Vectors>(heights, rows, column, arguments...);
  }
  if constexpr (Vectors > 1) {
    if (vectors) column_blocks<T, Kernel, Vectors - 1>(rows, column, vectors, arguments...);
  }
}

template <class T>
struct Plain {
  template <int Rows, int Vectors>
  struct Kernel {
    // A term's products; a's rows are ``down`` apart, and what is summed over ``along``.
    template <class Down>
    static inline void add(Vec<T> (&sum)[Rows][Vectors], const T* a, Down down, long along, const Term<T>& term,
                           long column) {
      const T* b = term.b + column;
      for (long k = 0; k < term.k; ++k, a += along, b += term.b_stride) {
        Vec<T> right[Vectors];
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) right[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < Vectors; ++j) sum[i][j] += a[i * down] * right[j];
        }
      }
    }

    static void run(const Term<T>* terms, int count, const Result<T>& result, long row, long column) {
      Vec<T> sum[Rows][Vectors] = {};
      for (const Term<T>* term = terms; term < terms + count; ++term) {
        // Rows of a that lie beside each other are at offsets known to the compiler.
        if (term->crosswise) {
          add(sum, term->a + row, std::integral_constant<long, 1>(), term->a_stride, *term, column);
        } else {
          add(sum, term->a + row * term->a_stride, term->a_stride, 1, *term, column);
        }
      }
      put<T, Rows, Vectors>(sum, row, column, result);
    }
  };
};

// The sum of products of ``terms``, (rows, columns), put into ``result``; columns are padded to whole vectors.
template <class T>
void multiply(const Term<T>* terms, int count, long rows, long columns, const Result<T>& result) {
  const long vectors = padded<T>(columns) / kLanes<T>;
  column_blocks<T, Plain<T>::template Kernel, kMaxVectors>(rows, 0, vectors, terms, count, result);
}

// Products that are summed in one chain; of more of them, sums are added up: less is lost to rounding, and the rows of
// b that a block takes stay in the innermost cache.
constexpr long kChain = 128;

template <class T>
void multiply(std::initializer_list<Term<T>> terms, long rows, long columns, Result<T> result) {
  if (std::all_of(terms.begin(), terms.end(), [](const Term<T>& term) { return term.k <= kChain; })) {
    multiply(terms.begin(), int(terms.size()), rows, columns, result);
    return;
  }
  for (Term<T> part : terms) {
    for (long left = part.k; left > 0; left -= part.k) {
      part.k = std::min(left, kChain);
      multiply(&part, 1, rows, columns, result);
      part.a += part.k * (part.crosswise ? part.a_stride : 1), part.b += part.k * part.b_stride;
      result.keep = 1, result.base = nullptr, result.other = nullptr;
    }
  }
}

}  // namespace titans
