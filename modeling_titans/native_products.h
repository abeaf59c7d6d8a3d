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

// What becomes of a sum of products p: c = keep * base + other_scale * other + scale * by_column * p, columnwise.
template <class T>
struct Result {
  T* c;
  long stride;
  T keep = 0;
  T scale = 1;
  const T* by_column = nullptr;
  const T* base = nullptr;  // Null: c itself.
  const T* other = nullptr;
  T other_scale = 0;
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
// Vectors side by side in a tile, and its rows: sums, one row of b and a broadcast element fit the registers.
constexpr int kMaxVectors = kRegisters == 32 ? 4 : 2;
constexpr int rows_of_tile(int vectors) {
  return kRegisters == 32 ? std::array<int, 4>{16, 12, 8, 6}[vectors - 1] : std::array<int, 2>{8, 6}[vectors - 1];
}

template <class T, int Rows, int Vectors>
void tile(const Term<T>* terms, int count, long row, long column, const Result<T>& result) {
  using V = Vec<T>;
  constexpr int n = kLanes<T>;
  V sum[Rows][Vectors] = {};
  for (const Term<T>* term = terms; term < terms + count; ++term) {
    const T* b = term->b + column;
    const long b_stride = term->b_stride, a_stride = term->a_stride, depth = term->k;
    if (term->crosswise) {
      const T* a = term->a + row;
      for (long k = 0; k < depth; ++k, a += a_stride, b += b_stride) {
        V right[Vectors];
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) right[j] = load(b + j * n);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < Vectors; ++j) sum[i][j] += a[i] * right[j];
        }
      }
    } else {
      const T* a = term->a + row * a_stride;
      for (long k = 0; k < depth; ++k, ++a, b += b_stride) {
        V right[Vectors];
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) right[j] = load(b + j * n);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < Vectors; ++j) sum[i][j] += a[i * a_stride] * right[j];
        }
      }
    }
  }
  const long offset = row * result.stride + column;
  T* c = result.c + offset;
  const T* base = result.base ? result.base + offset : c;
  const T* other = result.other ? result.other + offset : nullptr;
#pragma GCC unroll 4
  for (int j = 0; j < Vectors; ++j) {
    V scale = filled(result.scale);
    if (result.by_column) scale *= load(result.by_column + column + j * n);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const long at = i * result.stride + j * n;
      V x = sum[i][j] * scale;
      if (result.keep != 0) x += result.keep * load(base + at);
      if (other) x += result.other_scale * load(other + at);
      store(c + at, x);
    }
  }
}

template <class T>
using Tile = void (*)(const Term<T>*, int, long, long, const Result<T>&);

template <class T, int Vectors, size_t... I>
constexpr std::array<Tile<T>, sizeof...(I)> tiles_of(std::index_sequence<I...>) {
  return {tile<T, int(I) + 1, Vectors>...};
}

template <class T, int Vectors>
void column_block(const Term<T>* terms, int count, long rows, long column, const Result<T>& result) {
  constexpr int most = rows_of_tile(Vectors);
  static constexpr auto tiles = tiles_of<T, Vectors>(std::make_index_sequence<most>{});
  // Tiles of nearly equal height: a short last one would leave most of the registers idle.
  const long num_tiles = (rows + most - 1) / most;
  for (long i = 0, row = 0; i < num_tiles; ++i) {
    const long height = rows / num_tiles + (i < rows % num_tiles);
    tiles[height - 1](terms, count, row, column, result);
    row += height;
  }
}

// The sum of products of ``terms``, (rows, columns), put into ``result``; columns are padded to whole vectors.
template <class T>
void multiply(const Term<T>* terms, int count, long rows, long columns, const Result<T>& result) {
  const long vectors = padded<T>(columns) / kLanes<T>;
  for (long done = 0; done < vectors;) {
    const long column = done * kLanes<T>, left = std::min<long>(vectors - done, kMaxVectors);
    switch (left) {
      case 1: column_block<T, 1>(terms, count, rows, column, result); break;
      case 2: column_block<T, 2>(terms, count, rows, column, result); break;
#if defined(__AVX512F__) || defined(__aarch64__)
      case 3: column_block<T, 3>(terms, count, rows, column, result); break;
      default: column_block<T, 4>(terms, count, rows, column, result); break;
#endif
    }
    done += left;
  }
}

// Products that are summed in one chain; of more of them, sums are added up: less is lost to rounding, and the rows of
// b that a block takes stay in the innermost cache.
constexpr long kChain = 128;

template <class T>
void multiply(std::initializer_list<Term<T>> terms, long rows, long columns, Result<T> result) {
  if (terms.size() > 1 || terms.begin()->k <= kChain) {
    multiply(terms.begin(), int(terms.size()), rows, columns, result);
    return;
  }
  Term<T> part = *terms.begin();
  for (long left = part.k; left > 0; left -= part.k) {
    part.k = std::min(left, kChain);
    multiply(&part, 1, rows, columns, result);
    part.a += part.k * (part.crosswise ? part.a_stride : 1), part.b += part.k * part.b_stride;
    result.keep = 1, result.base = nullptr, result.other = nullptr;
  }
}

}  // namespace titans
