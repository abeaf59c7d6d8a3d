# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a block's state together from a file's tensors, and refuses what cannot have been one."""

import torch

from .layer_state import AttentionState, TitansLayerState
from .memory_state import MemoryState, NeuralMemoryState, OpenChunk, PendingTokens, SegmentState, iterate_tensors


def state_from_tensors(tensors: dict, geometry: dict, batch_size: int) -> TitansLayerState:
    """Puts a layer's state together.

    Args:
        tensors: the state's tensors in nested dictionaries, by field name or index.
        geometry: values of the fields that `VARIANT_GEOMETRY` names.
        batch_size: B.

    Raises:
        KeyError: if a tensor is missing.
        ValueError: if one is too many, not of the shape or kind that the geometry asks for, or counts what is not
            there.
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
    _check_kinds(state)
    _check_counts(state, geometry)
    return state


def counts_of(state: TitansLayerState) -> list:
    """What all layers of a cache have alike: tokens pending, keys kept, and how many of them each row has."""
    memory, attention = state.memory.memory, state.attention
    counts = [memory.pending.k.shape[1], memory.count]
    return counts if attention is None else [*counts, attention.keys.shape[2], attention.count]


def _check_kinds(state: TitansLayerState) -> None:
    """Numbers where numbers belong, in float32 at least where the memory's weights are."""
    exact = (torch.float32, torch.float64)
    for name, tensor in iterate_tensors(state):
        if name.endswith("count"):
            allowed = (torch.long,)
        elif any(group in name for group in ("weights", "momentum", "pending", "chunk")):
            allowed = exact
        else:
            allowed = (*exact, torch.bfloat16, torch.float16)
        if tensor.dtype not in allowed:
            raise ValueError(f"the state's {name} must be of a dtype in {allowed}, got {tensor.dtype}")


def _check_counts(state: TitansLayerState, geometry: dict) -> None:
    """Rows have no more tokens pending, or keys kept, than there is room for."""
    chunk_size = geometry["memory_chunk_size"]
    memory, attention = state.memory.memory, state.attention
    _check_count("memory.count", memory.count, memory.pending.k.shape[1], chunk_size)
    if attention is None:
        return
    window = geometry["segment_length" if geometry["variant"] == "mac" else "sliding_window"]
    _check_count("attention.count", attention.count, attention.keys.shape[2], window)
    if geometry["variant"] == "mac":
        pending = attention.count % chunk_size
        if not torch.equal(torch.as_tensor(pending), torch.as_tensor(memory.count)):
            raise ValueError(
                f"the state's memory.count must be {pending}, attention.count in chunks, got {memory.count}"
            )


def _check_count(name: str, count: int | torch.Tensor, width: int, size: int) -> None:
    """``width`` places for at most ``size`` - 1 tokens, of which ``count`` are taken."""
    counts = torch.as_tensor(count)
    if width >= size or not bool(((counts >= 0) & (counts <= width)).all()):
        raise ValueError(f"the state's {name} must be within {size - 1}, got {count} in {width} places")


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
    chunk = None
    if "chunk" in memory:
        inner = tuple(_shape(batch_size, num_heads, pending, width) for width in widths[1:])
        scalars = _shape(batch_size, num_heads, 1 + pending)
        chunk = OpenChunk(inner[:-1], inner, _shape(batch_size, num_heads, 1), scalars, scalars)
    state = MemoryState(layers, layers, PendingTokens(vector, vector, gate, gate, gate), count, chunk)
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
    # A file holds no tensors of an empty tuple, which is what an open chunk of a single layer has for hidden inputs.
    leaves = [
        part
        if part is None or isinstance(part, int) or _is_empty(part)
        else _fill(part, tensors[str(key)], found, f"{name}.{key}")
        for key, part in zip(keys, template, strict=True)
    ]
    return type(template)(*leaves) if hasattr(template, "_fields") else tuple(leaves)


def _is_empty(part) -> bool:
    return isinstance(part, tuple) and not part


def _count_tensors(tensors) -> int:
    return sum(_count_tensors(t) for t in tensors.values()) if isinstance(tensors, dict) else 1
