// Copyright 2026 The transformers-titans authors.
// SPDX-License-Identifier: Apache-2.0
// All blocks at one token of each row (`native_blocks.py` calls it). What takes the time is to read the
// weights once: threads share each product's, and wait for each other between the steps.

#include "native_arena.h"
#include "native_block_attention.h"
#include "native_block_memory.h"

namespace titans {

// The wiring of `decoder_layer.py`.
template <class T>
class BlockReader {
 public:
  BlockReader(Member<T>& member, const Block<T>& block, const T* cos, const T* sin)
      : member_(member), s(member.s), w(block.weights), own(member.own), shared(member.shared), memory_(member, block),
        attention_(member, block, cos, sin) {}

  // own.stream (rows, width) -> the stream behind the block.
  void read() {
    if (s.variant == kLmm) remember_alone();
    if (s.variant == kMal) remember_and_attend();
    if (s.variant == kMag) attend_gated(false);
    if (s.variant == kMac) attend_gated(true);
    add(own.stream, own.mixed, own.stream);
    feed_forward();
  }

 private:
  Member<T>& member_;
  const BlockSizes& s;
  const BlockWeights<T>& w;
  const OwnBuffers<T>& own;
  const SharedBuffers<T>& shared;
  BlockMemory<T> memory_;
  BlockAttention<T> attention_;

  long size() const { return s.rows * s.width; }
  void add(const T* x, const T* y, T* sum) const {
    map(size(), sum, [](Vec<T> a, Vec<T> b) { return a + b; }, x, y);
  }

  void remember_alone() {
    member_.norm(own.stream, w.input_norm, s.rows, own.tokens);
    memory_.remember(own.tokens);
    std::copy_n(shared.remembered, size(), own.mixed);
  }

  void remember_and_attend() {
    remember_alone();
    add(own.stream, own.mixed, own.tokens);
    member_.norm(own.tokens, w.pre_attention_norm, s.rows, own.tokens);
    member_.norm(w.persistent, w.pre_attention_norm, s.persistent, own.tokens + size());
    attention_.attend(false);
    add(own.mixed, shared.attention, own.mixed);
  }

  // What the attention says, gated by the memory. If the memory is attention's context, it is written with what the
  // attention says; else both read the same.
  void attend_gated(bool retrieves) {
    member_.norm(own.stream, w.input_norm, s.rows, own.tokens);
    if (retrieves) {
      memory_.retrieve(own.tokens);
      member_.norm(shared.retrieved, w.input_norm, s.rows, own.tokens + size());
    }
    member_.norm(w.persistent, w.input_norm, s.persistent, own.tokens + (1 + retrieves) * size());
    attention_.attend(retrieves);
    member_.norm(shared.attention, w.attention_norm, s.rows, own.mixed);
    memory_.remember(retrieves ? own.mixed : own.tokens);
    member_.norm(shared.remembered, w.memory_norm, s.rows, own.tokens);
    const bool swish = s.silu_gating;
    map(size(), own.mixed, [=](Vec<T> y, Vec<T> m) { return y * (swish ? silu<T>(m) : sigmoid<T>(m)); }, own.mixed,
        own.tokens);
  }

  void feed_forward() {
    member_.norm(own.stream, w.pre_mlp_norm, s.rows, own.tokens);
    member_.project(w.gate, own.tokens, shared.mlp_gate);
    const Share part = member_.project(w.up, own.tokens, shared.mlp_up);
    for (long row = 0; row < s.rows; ++row) {
      const long at = row * s.intermediate + part.begin;
      T* y = shared.mlp_gate + at;
      map(part.end - part.begin, y, [](Vec<T> a, Vec<T> b) { return silu<T>(a) * b; }, y, shared.mlp_up + at);
    }
    member_.wait();
    member_.project(w.down, shared.mlp_gate, shared.mlp);
    member_.wait();
    add(own.stream, shared.mlp, own.stream);
  }
};

template <class T>
void read_blocks(const BlockSizes& s, long layers, void* const* parameters, void* const* states, void* const* nexts,
                 const T* cos, const T* sin, const T* stream, T* streams, long threads) {
  Reader<T> weights(parameters), rooms(states), ends(nexts);
  std::vector<Block<T>> blocks;
  for (long l = 0; l < layers; ++l) blocks.emplace_back(weights, rooms, ends, s);
  threads = std::min<long>(threads, s.rows * s.heads);
  std::unique_ptr<Arena> arena = arenas().get();
  Cutter shared_size(nullptr), own_size(nullptr);
  SharedBuffers<T>(shared_size, s), OwnBuffers<T>(own_size, s);
  arena->reserve(shared_size.used() + threads * own_size.used());
  Cutter cutter(arena->block());
  const SharedBuffers<T> shared(cutter, s);
  char* const own = arena->block() + cutter.used();
  Team team;
  team.run(threads, [&](long index) {
    Cutter own_cutter(own + index * own_size.used());
    Member<T> member(s, team, index, shared, own_cutter);
    const long size = s.rows * s.width;
    std::copy_n(stream, size, member.own.stream);
    for (long l = 0; l < layers; ++l) {
      BlockReader<T>(member, blocks[l], cos, sin).read();
      if (member.is_first()) std::copy_n(member.own.stream, size, streams + l * size);
    }
  });
  arenas().put(std::move(arena));
}

}  // namespace titans

extern "C" {

// 0, or 1 if there was no memory for its buffers.
int titans_read_blocks(const titans::BlockSizes* sizes, int64_t layers, int64_t item_size, void* const* parameters,
                       void* const* states, void* const* nexts, const void* cos, const void* sin, const void* stream,
                       void* streams, int64_t threads) {
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    titans::read_blocks<T>(*sizes, layers, parameters, states, nexts, static_cast<const T*>(cos),
                           static_cast<const T*>(sin), static_cast<const T*>(stream), static_cast<T*>(streams),
                           threads);
  };
  try {
    item_size == sizeof(float) ? run(static_cast<float*>(nullptr)) : run(static_cast<double*>(nullptr));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}
