# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a block's state together from a file's tensors, and refuses what cannot have been one."""

from types import SimpleNamespace

import torch

from .kept_memories import KeptMemories
from .layer_state import AttentionState, TitansLayerState
from .memory_caching import CachingOptions
from .memory_state import MemoryState, NeuralMemoryState, OpenChunk, PendingTokens, SegmentState, iterate_tensors


def state_from_tensors(tensors: dict, geometry: dict, batch_size: int) -> TitansLayerState:
    """Puts a layer's state together.

    Args:
        tensors: the state's tensors, and what kept memories count, in nested dictionaries, by field name or index.
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
    if attention is not None:
        counts += [attention.keys.shape[2], attention.count]
    return counts if state.memory.kept is None else [*counts, *state.memory.kept.counts]


def _check_kinds(state: TitansLayerState) -> None:
    """Numbers where numbers belong, in float32 at least where the memory's weights are."""
    exact = (torch.float32, torch.float64)
    for name, tensor in iterate_tensors(state):
        if name.endswith(("count", "closed", "left")):
            allowed = (torch.long,)
        elif any(group in name for group in ("weights", "momentum", "pending", "chunk", "kept")):
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
    for name, kept in (("memory", state.memory.kept), ("segment", state.segment and state.segment.kept)):
        if kept is not None:
            _check_kept(name, kept, geometry)
    if state.memory.kept is not None:
        _check_runners(state.memory.kept, geometry)
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


def _check_kept(name: str, kept: KeptMemories, geometry: dict) -> None:
    """There is a place for each memory that was kept, and the running segment is not complete."""
    closed, left = torch.as_tensor(kept.closed), torch.as_tensor(kept.left)
    length, places = geometry["cache_segment_length"], kept.weights[0].shape[1]
    if not bool(((left >= 0) & (left < length)).all()):
        raise ValueError(f"the state's {name}.kept.left must be within {length - 1}, got {kept.left}")
    number = _caching(geometry).kept.numbers(closed)
    if not bool(((closed >= 0) & (number <= places)).all()) or (closed.dim() == 0 and int(number) != places):
        raise ValueError(
            f"the state's {name}.kept.closed must be of as many memories as are kept, {places}, got {kept.closed}"
        )


def _check_runners(kept: KeptMemories, geometry: dict) -> None:
    """There is a runner for each length of block that is complete, where blocks begin anew."""
    options = _caching(geometry).kept
    most = int(torch.as_tensor(kept.closed).max())
    if options.logarithmic and options.restarts and len(kept.runners) < most.bit_length():
        raise ValueError(
            f"the state's memory.kept.runners must be at least {most.bit_length()} for {most} segments, "
            f"got {len(kept.runners)}"
        )


def _caching(geometry: dict) -> CachingOptions | None:
    return CachingOptions.of_fields(SimpleNamespace(**geometry, cache_top_k=1))


def _kept_template(tensors: dict, layers: tuple, batch_size: int, is_gated: bool, has_runners: bool) -> KeptMemories:
    """Of a layer's state whose weights have the shapes of ``layers``."""
    places = tensors["weights"]["0"].shape[1]
    weights = tuple(_shape(batch_size, places, *w.shape[1:]) for w in layers)
    keys = _shape(batch_size, places, *layers[0].shape[1:3]) if is_gated else None
    total = _shape(batch_size, *layers[0].shape[1:3]) if is_gated else None
    counts = [n if isinstance(n, int) else _shape(batch_size) for n in (tensors["closed"], tensors["left"])]
    runners = ((layers, layers),) * (len(tensors.get("runners", {})) if has_runners else 0)
    return KeptMemories(weights, keys, total, *counts, runners)


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
    caching, kept = _caching(geometry), None
    if caching is not None:
        has_runners = caching.kept.logarithmic and caching.kept.restarts
        kept = _kept_template(tensors["memory"]["kept"], layers, batch_size, caching.is_gated, has_runners)
    attention = segment = None
    if geometry["variant"] != "lmm":
        parts, is_mac = tensors["attention"], geometry["variant"] == "mac"
        places = parts["keys"].shape[2]
        keys = _shape(batch_size, geometry["num_key_value_heads"], places, geometry["head_dim"])
        retrieved = (keys, keys) if is_mac else (None, None)
        attention = AttentionState(keys, keys, *retrieved, _shape(batch_size) if "count" in parts else places)
        if is_mac:
            segment_kept = None
            if caching is not None:
                parts = tensors["segment"]["kept"]
                segment_kept = _kept_template(parts, layers, batch_size, caching.is_gated, False)
            segment = SegmentState(layers, segment_tail, segment_kept)
    return TitansLayerState(NeuralMemoryState(state, tail, kept), attention, segment)


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
        _fill(part, tensors[str(key)], found, f"{name}.{key}") if _has_tensors(part) else part
        for key, part in zip(keys, template, strict=True)
    ]
    return type(template)(*leaves) if hasattr(template, "_fields") else tuple(leaves)


def _has_tensors(part) -> bool:
    return isinstance(part, torch.Tensor) or (isinstance(part, tuple) and len(part) > 0)


def _count_tensors(tensors) -> int:
    if isinstance(tensors, dict):
        return sum(_count_tensors(t) for t in tensors.values())
    return int(isinstance(tensors, torch.Tensor))
