// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// Threads that take the same steps side by side and wait for each other between them.
#pragma once

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace titans {

// A part of n things that are counted from 0.
struct Share {
  long begin, end;
};

class Team {
 public:
  long size() const { return size_.load(std::memory_order_relaxed); }

  // Until all members have come here. What one has written before, the others see behind it.
  void wait() {
    if (size() == 1) return;
    const long round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      until([&] { return round_.load(std::memory_order_acquire) != round; });
    }
  }

  Share share(long member, long n) const { return {n * member / size(), n * (member + 1) / size()}; }

  // Calls work(member) on as many threads as can be had of ``number``, this one being member 0.
  template <class F>
  void run(long number, F work) {
    std::vector<std::thread> others;
    others.reserve(number);
    const auto begin = [&](long member) {
      until([&] { return size_.load(std::memory_order_acquire) != 0; });
      work(member);
    };
    try {
      for (long member = 1; member < number; ++member) others.emplace_back(begin, member);
    } catch (const std::system_error&) {
      // The threads there are do all of it.
    }
    size_.store(long(others.size()) + 1, std::memory_order_release);
    work(0);
    for (std::thread& other : others) other.join();
  }

 private:
  // Others are a few microseconds behind, unless they have no core to run on.
  template <class F>
  static void until(F is_so) {
    for (long tries = 0; !is_so(); ++tries) {
      if (tries > 4096) std::this_thread::yield();
    }
  }

  std::atomic<long> size_{0}, arrived_{0}, round_{0};
};

}  // namespace titans
