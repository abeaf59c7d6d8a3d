# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What `neural_memory` asks of its arguments: a ValueError names the argument, its value and what is allowed."""

import torch

from .memory_state import MemoryState, PendingTokens
from .scan_inputs import Rule
from .token_layout import TokenLayout


def check_options(chunk_size, norm_eps, choices: dict[str, tuple[object, tuple]]) -> None:
    """``choices``: name -> (value, allowed values)."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer >= 1, got {chunk_size!r}")
    if not norm_eps > 0:
        raise ValueError(f"norm_eps must be > 0, got {norm_eps!r}")
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_tokens(vectors: dict[str, torch.Tensor], gates: dict[str, torch.Tensor]) -> None:
    q = vectors["q"]
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q must be (B, T, H, D) with at least one token, got {tuple(q.shape)}")
    for name, tensor in vectors.items():
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        _check_tensor(name, tensor, "(B, T, H, D)", q.shape)
    for name, gate in gates.items():
        _check_tensor(name, gate, "(B, T, H)", q.shape[:3])


def check_state(name: str, state: MemoryState, batch_size: int, q: torch.Tensor) -> None:
    """Checks a state of ``batch_size`` rows against q (B, T, H, D)."""
    if not all(hasattr(state, field) for field in MemoryState._fields):
        raise ValueError(f"{name} must be a MemoryState, got {type(state).__name__}")
    num_heads, head_dim = q.shape[2:]
    if not state.weights or len(state.weights) != len(state.momentum):
        raise ValueError(
            f"{name} must hold weights and momentum of one depth >= 1, got {len(state.weights)}, {len(state.momentum)}"
        )
    width = head_dim
    for layer, (w, s) in enumerate(zip(state.weights, state.momentum, strict=True)):
        expected = (batch_size, num_heads, width)
        if w.dim() != 4 or tuple(w.shape[:3]) != expected:
            raise ValueError(
                f"{name}.weights[{layer}] must be (B, H, D_in, D_out) = (*{expected}, D_out), got {tuple(w.shape)}"
            )
        if w.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}.weights[{layer}] must be float32 or float64, got {w.dtype}")
        _check_tensor(f"{name}.momentum[{layer}]", s, "(B, H, D_in, D_out)", w.shape)
        width = w.shape[3]
    if width != head_dim:
        raise ValueError(f"{name}.weights must lead back to the head dimension {head_dim}, got {width}")
    _check_pending(name, state, batch_size, q)


def check_rule(name: str, rule: Rule, state: MemoryState, residual: bool, norm_weight) -> None:
    """What the rule of this name asks of the memory network."""
    if not rule.linear:
        return
    if len(state.weights) != 1:
        raise ValueError(f"rule {name!r} needs a state of depth 1, a matrix, got depth {len(state.weights)}")
    if residual:
        raise ValueError(f"rule {name!r} needs residual=False, got {residual!r}")
    if norm_weight is not None:
        raise ValueError(f"rule {name!r} needs norm_weight=None, got a tensor {tuple(norm_weight.shape)}")


def _check_pending(name: str, state: MemoryState, batch_size: int, q: torch.Tensor) -> None:
    width, count = state.pending.k.shape[1], state.count
    if isinstance(count, torch.Tensor):
        if tuple(count.shape) != (batch_size,) or count.dtype != torch.long:
            raise ValueError(
                f"{name}.count must be an int or an int64 tensor (B,) = {(batch_size,)}, "
                f"got {count.dtype} {tuple(count.shape)}"
            )
    elif not isinstance(count, int) or count != width:
        raise ValueError(f"{name}.count must be the number of pending tokens, {width}, got {count!r}")
    for field, tensor in zip(PendingTokens._fields, state.pending, strict=True):
        letters, ends = ("(B, P, H, D)", 4) if field in ("k", "v") else ("(B, P, H)", 3)
        _check_tensor(f"{name}.pending.{field}", tensor, letters, (batch_size, width, *q.shape[2:ends]))


def check_layout(
    layout: TokenLayout, state: MemoryState, q: torch.Tensor, chunk_size: int, start_state, segments
) -> None:
    if layout.chunk_size != chunk_size:
        raise ValueError(f"layout was built for chunk_size {layout.chunk_size}, not {chunk_size}")
    if not _same_count(layout.count, state.count):
        raise ValueError(f"layout was built for the count {layout.count}, but state.count is {state.count}")
    width = state.pending.k.shape[1]
    # Comparisons alone: while a graph is traced the width may be a symbol, and no range knows whether it holds one.
    if width >= chunk_size or (isinstance(state.count, torch.Tensor) and width != chunk_size - 1):
        allowed = chunk_size - 1 if isinstance(state.count, torch.Tensor) else range(chunk_size)
        raise ValueError(f"state has room for {width} pending tokens; with chunk_size {chunk_size} allowed: {allowed}")
    if layout.mask is not None and layout.mask.shape != q.shape[:2]:
        raise ValueError(f"layout was built for (B, T) = {tuple(layout.mask.shape)}, got q {tuple(q.shape)}")
    if layout.document_starts is not None or (segments is not None and segments.restarts and segments.chunks):
        _check_start_state(start_state, state, q)


def _same_count(one: int | torch.Tensor, other: int | torch.Tensor) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return type(one) is type(other) and one == other
    # Counts on an accelerator are not compared: that would wait for the device in every layer.
    return one is other or one.device.type != "cpu" or torch.compiler.is_compiling() or torch.equal(one, other)


def _check_start_state(start_state: MemoryState | None, state: MemoryState, q: torch.Tensor) -> None:
    if start_state is None:
        raise ValueError("start_state is needed where the layout has document starts, or segments begin anew")
    check_state("start_state", start_state, 1, q[:1])
    if start_state.count != 0:
        raise ValueError(f"start_state must have no pending tokens, got count {start_state.count}")
    allowed = [(1, *w.shape[1:]) for w in state.weights]
    if [tuple(w.shape) for w in start_state.weights] != allowed:
        raise ValueError(
            f"start_state.weights must be {allowed}, {len(allowed)} layers as state.weights have, "
            f"got {len(start_state.weights)}: {[tuple(w.shape) for w in start_state.weights]}"
        )


def check_parameters(norm_weight, norm_bias, forget_to_weights, state: MemoryState, q: torch.Tensor) -> None:
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("norm_weight and norm_bias must both be given or both be None")
    if norm_weight is not None:
        _check_tensor("norm_weight", norm_weight, "(H, D)", q.shape[2:])
        _check_tensor("norm_bias", norm_bias, "(H, D)", q.shape[2:])
    if forget_to_weights is not None:
        shapes = [tuple(w.shape[1:]) for w in state.weights]
        if [tuple(w.shape) for w in forget_to_weights] != shapes:
            raise ValueError(
                f"forget_to_weights must be {shapes} by layer, got {[tuple(w.shape) for w in forget_to_weights]}"
            )
        for layer, w in enumerate(forget_to_weights):
            _check_tensor(f"forget_to_weights[{layer}]", w, "(H, D_in, D_out)", shapes[layer])


def check_soup(kept_weights, mix, num_ends: int, state: MemoryState, q: torch.Tensor) -> None:
    """Checks shares of the running weights, of ``kept_weights`` and of those behind ``num_ends`` segments."""
    if (kept_weights is None) != (mix is None):
        raise ValueError("kept_weights and mix must both be given or both be None")
    if mix is None:
        return
    letters = "(B, T, H, 1 + K + J)" if num_ends else "(B, T, H, 1 + K)"
    if mix.dim() != 4 or mix.shape[3] < 1 + num_ends:
        raise ValueError(f"mix must be {letters}, J = {num_ends}, got {tuple(mix.shape)}")
    num_kept = mix.shape[3] - 1 - num_ends
    _check_tensor("mix", mix, letters, (*q.shape[:3], mix.shape[3]))
    depth = len(state.weights)
    if len(kept_weights) != depth:
        raise ValueError(f"kept_weights must have {depth} layers as state.weights have, got {len(kept_weights)}")
    for layer, (w, running) in enumerate(zip(kept_weights, state.weights, strict=True)):
        shape = (q.shape[0], num_kept, *running.shape[1:])
        _check_tensor(f"kept_weights[{layer}]", w, "(B, K, H, D_in, D_out)", shape)


def _check_tensor(name: str, tensor: torch.Tensor, letters: str, shape) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must be {letters} = {tuple(shape)}, got {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
