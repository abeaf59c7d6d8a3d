// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// Memory that is used again by the next call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace titans {

constexpr long kAlignment = 64;

// Asks for large pages where memory is about to be filled: a page that is touched first costs as much as ten thousand
// products.
inline void expect_use([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t large = uintptr_t(1) << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + large - 1) / large * large;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) / large * large;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// One block of memory that buffers are cut from.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(block_); }

  void reserve(size_t bytes) {
    constexpr size_t large = size_t(1) << 21;
    const size_t unit = bytes >= large ? large : kAlignment;
    bytes = (bytes + unit - 1) / unit * unit;
    if (bytes > size_) {
      std::free(block_);
      block_ = static_cast<char*>(std::aligned_alloc(unit, bytes));
      size_ = block_ ? bytes : 0;
      if (!block_) throw std::bad_alloc();
      expect_use(block_, bytes);
    }
#ifdef TITANS_POISON
    std::memset(block_, 0xff, size_);
#endif
  }
  char* block() { return block_; }

 private:
  char* block_ = nullptr;
  size_t size_ = 0;
};

// Cuts buffers from a block, or, where there is none yet, only counts them.
class Cutter {
 public:
  explicit Cutter(char* block) : block_(block) {}

  template <class T>
  T* take(long count) {
    T* result = block_ ? reinterpret_cast<T*>(block_ + used_) : nullptr;
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return result;
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

// Arenas that no thread uses at the moment: a call finds its memory as the call before left it.
class ArenaPool {
 public:
  std::unique_ptr<Arena> get() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Arena>();
    std::unique_ptr<Arena> arena = std::move(free_.back());
    free_.pop_back();
    return arena;
  }
  void put(std::unique_ptr<Arena> arena) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(arena));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Arena>> free_;
};

inline ArenaPool& arenas() {
  static ArenaPool pool;
  return pool;
}

}  // namespace titans
