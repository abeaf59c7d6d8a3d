# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The layer of `memory-caching`, set up to compute what ours computes: pip install "transformers-titans[bench]".

Both keep a memory network of two layers, four times as wide in between, at each segment's end, and mix the answers by
the gates of GRM with connectors of their own projection. The peer writes token by token (chunks of 1), with one step
size, one momentum and one retention for all tokens; its network has biases, but neither residual nor LN, and around it
are no convolution, no gates and no output norm. Two things are set differently from its defaults:

- `update_convention="gradient_descent"`: the default, "paper", climbs the inner loss.
- Start weights are random: at the package's zeros no token ever reaches a weight, a bias apart, and queries would have
  no influence at all.

`differentiable` back-propagates through the writes, as ours does; "stopgrad", the package's default, does not.
"""

from dataclasses import replace

import torch


try:
    from memory_caching.backends.titans import TitansBackend
    from memory_caching.config import MCConfig
    from memory_caching.config import TitansConfig as PeerConfig
    from memory_caching.layer import MemoryCachingLayer
except ImportError as error:
    raise SystemExit(f'not timed: {error}; pip install "transformers-titans[bench]"') from error


class RandomStart(TitansBackend):
    """The package's memory with start weights such as ours."""

    def init_state(self, **sizes):
        state = super().init_state(**sizes)
        return replace(state, weights=tuple(torch.randn_like(w) * w.shape[-1] ** -0.5 for w in state.weights))


def caching_layer(width: int, heads: int, segment: int, differentiable: bool) -> MemoryCachingLayer:
    """A layer with GRM."""
    memory = PeerConfig(
        memory_width=4 * width // heads,
        memory_depth=2,
        inner_update_mode="differentiable" if differentiable else "stopgrad",
        step_size=0.001,
        momentum=0.5,
        retention_alpha=0.999,
        update_convention="gradient_descent",
    )
    config = MCConfig(d_model=width, num_heads=heads, backend="titans", titans=memory, segment_size=segment)
    return MemoryCachingLayer(config=config, backend=RandomStart(memory))
