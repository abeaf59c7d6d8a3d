# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of one block: an explicit argument and result of every call, never a module's attribute."""

from typing import NamedTuple

import torch

from .memory_state import MemoryState, NeuralMemoryState, PendingTokens, SegmentState, map_tensors


class Sealed:
    """A state or plan on its way into or out of a block.

    Those who shard a model or run it in 16 bits cast every tensor that they find in a module's arguments and results,
    inside tuples and dataclasses too. States must keep their precision, so they travel in an object that says nothing
    of its contents, except that they can be moved.
    """

    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content

    def to(self, device, **kwargs) -> "Sealed":
        if hasattr(self.content, "to"):
            return Sealed(self.content.to(device, **kwargs))
        return Sealed(map_tensors(lambda t: t.to(device, **kwargs), self.content))


class AttentionState(NamedTuple):
    """The keys that later tokens may still see.

    Attributes:
        keys, values: (B, G, K, D) of the last tokens, keys rotated, right-aligned.
        retrieved_keys, retrieved_values: the same of what the memory gave for those tokens (`mac`), else None.
        count: kept keys, an int if it is the same in every row (then K == count), else a LongTensor (B,) (then K is
            the most there can be).
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
)
ATTENTION_GEOMETRY = ("num_key_value_heads", "head_dim", "rope_parameters")
VARIANT_GEOMETRY = {
    "lmm": GEOMETRY,
    "mal": (*GEOMETRY, *ATTENTION_GEOMETRY, "sliding_window"),
    "mag": (*GEOMETRY, *ATTENTION_GEOMETRY, "sliding_window"),
    "mac": (*GEOMETRY, *ATTENTION_GEOMETRY, "segment_length"),
}


def state_from_tensors(tensors: dict, geometry: dict, batch_size: int) -> TitansLayerState:
    """Puts a layer's state together.

    Args:
        tensors: the state's tensors in nested dictionaries, by field name or index.
        geometry: values of the fields that `VARIANT_GEOMETRY` names.
        batch_size: B.

    Raises:
        KeyError: if a tensor is missing.
        ValueError: if one is too many, or not of the shape that the geometry asks for.
    """
    found: dict = {}
    state = _fill(_template(tensors, geometry, batch_size), tensors, found, "")
    extra = _count_tensors(tensors) - len(found)
    wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    if wrong or extra:
        raise ValueError(
            f"the shapes of the state's tensors must be { ({n: p[0] for n, p in wrong.items()}) }, "
            f"got { ({n: p[1] for n, p in wrong.items()}) }, and {extra} tensors too many"
        )
    return state


def _template(tensors: dict, geometry: dict, batch_size: int) -> TitansLayerState:
    """The state with tensors that have a shape and nothing else."""
    num_heads, head_dim = geometry["memory_num_heads"], geometry["memory_head_dim"]
    hidden = [geometry["memory_expansion"] * head_dim] * (geometry["memory_depth"] - 1)
    widths = [head_dim, *hidden, head_dim]
    layers = tuple(_shape(batch_size, num_heads, *pair) for pair in zip(widths[:-1], widths[1:], strict=True))
    memory = tensors["memory"]["memory"]
    pending = memory["pending"]["k"].shape[1]
    count = _shape(batch_size) if "count" in memory else pending
    vector, gate = _shape(batch_size, pending, num_heads, head_dim), _shape(batch_size, pending, num_heads)
    tail = segment_tail = None
    if geometry["memory_conv_kernel_size"]:
        reach, channels = geometry["memory_conv_kernel_size"] - 1, num_heads * head_dim
        tail, segment_tail = _shape(batch_size, reach, 3 * channels), _shape(batch_size, reach, channels)
    state = MemoryState(layers, layers, PendingTokens(vector, vector, gate, gate, gate), count)
    attention = segment = None
    if geometry["variant"] != "lmm":
        parts, is_mac = tensors["attention"], geometry["variant"] == "mac"
        kept = parts["keys"].shape[2]
        keys = _shape(batch_size, geometry["num_key_value_heads"], kept, geometry["head_dim"])
        retrieved = (keys, keys) if is_mac else (None, None)
        attention = AttentionState(keys, keys, *retrieved, _shape(batch_size) if "count" in parts else kept)
        segment = SegmentState(layers, segment_tail) if is_mac else None
    return TitansLayerState(NeuralMemoryState(state, tail), attention, segment)


def _shape(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _fill(template, tensors, found: dict, name: str):
    """``template`` with the tensors; notes (expected, actual) shape of each under its name."""
    if isinstance(template, torch.Tensor):
        found[name] = (tuple(template.shape), tuple(tensors.shape))
        return tensors
    if not isinstance(template, tuple):
        return template
    keys = getattr(template, "_fields", range(len(template)))
    leaves = [
        part if part is None or isinstance(part, int) else _fill(part, tensors[str(key)], found, f"{name}.{key}")
        for key, part in zip(keys, template, strict=True)
    ]
    return type(template)(*leaves) if hasattr(template, "_fields") else tuple(leaves)


def _count_tensors(tensors) -> int:
    return sum(_count_tensors(t) for t in tensors.values()) if isinstance(tensors, dict) else 1
