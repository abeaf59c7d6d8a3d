# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of one block: an explicit argument and result of every call, never a module's attribute."""

from typing import NamedTuple

import torch

from .kept_plan import KeptCounts
from .memory_state import NeuralMemoryState, SegmentState, map_tensors


class LayerCounts(NamedTuple):
    """How far a block has read: what the plan of a call begins with.

    Attributes:
        memory: tokens pending in the memory's open chunk (`MemoryState.count`).
        attention: keys that attention has kept (`AttentionState.count`).
        num_kept: places that the state has for them.
        kept: how far memory caching is; without it, without a meaning.
    """

    memory: int | torch.Tensor
    attention: int | torch.Tensor
    num_kept: int
    kept: KeptCounts


NOTHING_READ = LayerCounts(0, 0, 0, KeptCounts(0, 0, 0))


class Sealed:
    """A state or plan on its way into or out of a block.

    Those who shard a model or run it in 16 bits cast every tensor that they find in a module's arguments and results,
    inside tuples and dataclasses too. States must keep their precision, so they travel in an object that says nothing
    of its contents, except that they can be moved.

    Attributes:
        content: the state or plan.
        is_owned: whether it is known that its tensors are nobody else's, nor parts of larger ones.
    """

    __slots__ = ("content", "is_owned")

    def __init__(self, content, is_owned: bool = False):
        self.content, self.is_owned = content, is_owned

    def to(self, device, **kwargs) -> "Sealed":
        if hasattr(self.content, "to"):
            return Sealed(self.content.to(device, **kwargs))
        return Sealed(map_tensors(lambda t: t.to(device, **kwargs), self.content))

    @property
    def counts(self) -> LayerCounts:
        """Of a state, or of None: the state before any token."""
        state = self.content
        if state is None:
            return NOTHING_READ
        attention, num_kept, kept = 0, 0, NOTHING_READ.kept
        if state.attention is not None:
            attention, num_kept = state.attention.count, state.attention.keys.shape[2]
        if state.memory.kept is not None:
            kept = state.memory.kept.counts
        return LayerCounts(state.memory.memory.count, attention, num_kept, kept)


class AttentionState(NamedTuple):
    """The keys that later tokens may still see.

    Attributes:
        keys, values: (B, G, K, D) of the last tokens, keys rotated, right-aligned.
        retrieved_keys, retrieved_values: the same of what the memory gave for those tokens (`mac`), else None.
        count: kept keys, an int if it is the same in every row (then K == count), else a LongTensor (B,).
    """

    keys: torch.Tensor
    values: torch.Tensor
    retrieved_keys: torch.Tensor | None
    retrieved_values: torch.Tensor | None
    count: int | torch.Tensor


class TitansLayerState(NamedTuple):
    """All that a block knows of the tokens it has read, by row.

    Attributes:
        memory: the neural memory's state.
        attention: the keys that later tokens may see; None in `lmm`.
        segment: the memory as it was at the open segment's start; None except in `mac`.
    """

    memory: NeuralMemoryState
    attention: AttentionState | None = None
    segment: SegmentState | None = None


# The config fields that give a state its shape and meaning, and those that do so in some variants.
GEOMETRY = (
    "variant",
    "num_hidden_layers",
    "hidden_size",
    "memory_num_heads",
    "memory_head_dim",
    "memory_depth",
    "memory_expansion",
    "memory_chunk_size",
    "memory_conv_kernel_size",
    "memory_rule",
    "memory_gate_granularity",
    "memory_caching",
    "cache_segment_length",
    "cache_initialization",
    "cache_segmentation",
    "cache_max_segments",
    "connector",
)
ATTENTION_GEOMETRY = ("num_key_value_heads", "head_dim", "rope_parameters")
VARIANT_GEOMETRY = {
    "lmm": GEOMETRY,
    "mal": (*GEOMETRY, *ATTENTION_GEOMETRY, "sliding_window"),
    "mag": (*GEOMETRY, *ATTENTION_GEOMETRY, "sliding_window"),
    "mac": (*GEOMETRY, *ATTENTION_GEOMETRY, "segment_length"),
}
