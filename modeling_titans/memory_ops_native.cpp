// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// The chunked scan of the neural memory for a processor (`memory_ops_native.py` calls it): each thread takes one row
// and head through all its chunks, so that its weights and momentum stay in that core's cache.
//
// Plain functions of raw pointers: nothing of Python or PyTorch is needed to build it, and no second OpenMP enters the
// process.

#include <atomic>
#include <thread>

#include "native_backward.h"

namespace titans {

// Runs work(arena, group) for each group; false if memory or threads could not be had.
template <class F>
bool for_each_group(long groups, long threads, F work) {
  std::atomic<long> next{0};
  std::atomic<bool> fine{true};
  auto take_groups = [&] {
    try {
      std::unique_ptr<Arena> arena = arenas().get();
      for (long group = next++; group < groups; group = next++) work(*arena, group);
      arenas().put(std::move(arena));
    } catch (const std::bad_alloc&) {
      fine = false;
    }
  };
  std::vector<std::thread> others;
  try {
    for (long i = 1; i < std::min(threads, groups); ++i) others.emplace_back(take_groups);
  } catch (const std::system_error&) {
    // The threads there are do all of it.
  }
  take_groups();
  for (std::thread& other : others) other.join();
  return fine;
}

template <class T>
int64_t kept_size(const Sizes& sizes, void* const* inputs) {
  return Kept<T>(Problem<T>(sizes, inputs), nullptr).row_size();
}

template <class T>
bool forward(const Sizes& sizes, void* const* inputs, void* const* outputs, long threads) {
  const Problem<T> p(sizes, inputs);
  T* const* out = reinterpret_cast<T* const*>(outputs);
  T *output = out[0], *surprise = out[1];
  const Kept<T> kept(p, out[2]);
  if (kept) expect_use(out[2], p.groups * kept.row_size() * sizeof(T));
  return for_each_group(p.groups, threads, [&](Arena& arena, long group) {
    Chunk<T> chunk(p);
    T* running = nullptr;
    for (bool counting : {true, false}) {
      Cutter cutter(counting ? nullptr : arena.block());
      running = cutter.take<T>(p.state_size);
      chunk.cut(cutter, false);
      if (!kept) chunk.place(cutter);
      if (counting) arena.reserve(cutter.used());
    }
    chunk.begin_row(group);
    const auto state_at = [&](long n) { return n < p.chunks && kept.has_state(n) ? kept.state(group, n) : running; };
    chunk.load_state(p.in.weights, p.in.momentum, state_at(0));
    for (long n = 0; n < p.chunks; ++n) {
      T* state = state_at(n);
      if (p.restarts(n, group)) chunk.load_state(p.in.start_weights, p.in.start_momentum, state);
      if (kept) {
        Cutter room = kept.factors(group, n);
        chunk.place(room);
      }
      chunk.begin_chunk(n);
      chunk.inner_gradient(state);
      const long at = n * p.groups + group;
      if (surprise) chunk.inner_loss(surprise + at * p.length);
      chunk.read(state);
      const Places answers = p.by_token(p.queries, p.dim);
      chunk.give_output(output + answers.at(n, group), answers.token);
      if (p.write) chunk.update(n, state, state_at(n + 1));
    }
    if (p.write) chunk.store_state(running, out + 3, out + 3 + p.depth);
  });
}

template <class T>
bool backward(const Sizes& sizes, void* const* inputs, void* const* gradients, void* const* outputs, long threads) {
  const Problem<T> p(sizes, inputs);
  T* const* given = reinterpret_cast<T* const*>(gradients);
  const Kept<T> kept(p, given[0]);
  T* output_bar = given[1];
  T* const* weights_bar = given + 2;
  const Tensors<T> out(outputs, p.depth);
  return for_each_group(p.groups, threads, [&](Arena& arena, long group) {
    ChunkAdjoint<T> chunk(p);
    T *bar = nullptr, *start_bar = nullptr, *between = nullptr;
    for (bool counting : {true, false}) {
      Cutter cutter(counting ? nullptr : arena.block());
      bar = cutter.take<T>(p.state_size);
      if (p.in.restart) start_bar = cutter.take<T>(p.state_size);
      between = cutter.take<T>((std::min(kept.span, p.chunks) - 1) * p.state_size);
      chunk.cut(cutter);
      if (counting) arena.reserve(cutter.used());
    }
    chunk.begin_row(group);
    if (p.in.restart) std::fill(start_bar, start_bar + p.state_size, T(0));
    if (p.write) {
      chunk.load_state(weights_bar, weights_bar + p.depth, bar);
    } else {
      std::fill(bar, bar + p.state_size, T(0));
    }
    const auto state_at = [&](long n) {
      return n % kept.span ? between + (n % kept.span - 1) * p.state_size : kept.state(group, n);
    };
    for (long n = p.chunks - 1, first = p.chunks; n >= 0; --n) {
      if (n < first) {
        first = n / kept.span * kept.span;
        for (long m = first; m < n; ++m) {
          chunk.write_again(m, kept.factors(group, m), state_at(m), state_at(m + 1));
          if (p.restarts(m + 1, group)) chunk.load_state(p.in.start_weights, p.in.start_momentum, state_at(m + 1));
        }
      }
      chunk.run(n, kept.factors(group, n), state_at(n), bar, output_bar, out);
      if (!p.restarts(n, group)) continue;
      each<T>(p.state_size, [&](long i) { store(start_bar + i, load(start_bar + i) + load(bar + i)); });
      std::fill(bar, bar + p.state_size, T(0));
    }
    chunk.end_row(out);
    chunk.store_state(bar, out.weights, out.momentum);
    if (p.in.restart) chunk.store_state(start_bar, out.start_weights, out.start_momentum);
  });
}

}  // namespace titans

// Each returns 0, or 1 where memory ran out. ``sizes``: `titans::Sizes`, then the widths; ``inputs``: pointers as
// `ScanInputs.flatten()` orders its tensors, null for None.
extern "C" {

// Numbers that the forward keeps of a row for the backward.
int64_t titans_kept_size(const int64_t* sizes, int64_t item_size) {
  const titans::Sizes given(sizes, 0);
  const std::vector<void*> inputs(10 + 5 * given.depth);
  return item_size == 4 ? titans::kept_size<float>(given, inputs.data())
                        : titans::kept_size<double>(given, inputs.data());
}

// ``outputs``: output, surprise or null, what is kept or null, weights of each layer, momentum of each layer.
int titans_forward(const int64_t* sizes, double eps, int64_t item_size, void* const* inputs, void* const* outputs,
                   int64_t threads) {
  const titans::Sizes given(sizes, eps);
  return !(item_size == 4 ? titans::forward<float>(given, inputs, outputs, threads)
                          : titans::forward<double>(given, inputs, outputs, threads));
}

// ``gradients``: what was kept, then the gradients of the output and of weights and momentum of each layer;
// ``outputs``: the gradients of the inputs.
int titans_backward(const int64_t* sizes, double eps, int64_t item_size, void* const* inputs, void* const* gradients,
                    void* const* outputs, int64_t threads) {
  const titans::Sizes given(sizes, eps);
  return !(item_size == 4 ? titans::backward<float>(given, inputs, gradients, outputs, threads)
                          : titans::backward<double>(given, inputs, gradients, outputs, threads));
}

}
