# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The chunked form of the neural memory: puts a call's tokens into chunks, scans them, and takes the output back."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .memory_state import MemoryState, PendingTokens
from .scan_inputs import ScanInputs, ScanOptions, ScanResult
from .token_layout import TokenLayout


class MemoryCall(NamedTuple):
    """The checked arguments of `neural_memory`.

    All tensors are in the state's dtype, except that a scan may take q, k and v, pending ones too, in another one.
    """

    q: torch.Tensor
    tokens: PendingTokens
    state: MemoryState
    chunk_size: int
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    norm_eps: float
    residual: bool
    forget_to_weights: tuple[torch.Tensor, ...] | None
    layout: TokenLayout
    start_state: MemoryState | None
    output_surprise: bool
    chunk_gates: bool
    scan: Callable[[ScanInputs, ScanOptions], ScanResult]
    products: torch.dtype | None


class MemoryResult(NamedTuple):
    """Output (B, T, H, D), the state after the call, and the inner losses (B, T, H) or None."""

    output: torch.Tensor
    state: MemoryState
    surprise: torch.Tensor | None


def chunked_memory(call: MemoryCall) -> MemoryResult:
    """See `neural_memory`."""
    return _alike_rows(call) if call.layout.slots is None else _slotted_rows(call)


def _alike_rows(call: MemoryCall) -> MemoryResult:
    """Every row has the same count and T real tokens: whole chunks first, then the rest, which stays open."""
    state, b = call.state, call.chunk_size
    tokens = [torch.cat(pair, 1) for pair in zip(state.pending, call.tokens, strict=True)]
    num_new, total = call.q.shape[1], tokens[0].shape[1]
    whole = total // b * b
    outputs, surprises = [], []
    if whole:
        # A lone chunk is read only where it is new; of several, the first one's pending tokens get idle queries.
        queries = call.q[:, : num_new - (total - whole)]
        if whole > b:
            queries = F.pad(queries, (0, 0, 0, 0, state.count, 0))
        result = _scan(call, state, queries, [t[:, :whole] for t in tokens], whole // b, write=True)
        state = MemoryState(result.weights, result.momentum, state.pending, state.count)
        outputs.append(_from_chunks(result.output, call, queries.shape[1]))
        surprises.append(result.surprise)
    rest = [t[:, whole:] for t in tokens]
    if whole < total:
        result = _scan(call, state, call.q[:, max(num_new - (total - whole), 0) :], rest, 1, write=False)
        outputs.append(_from_chunks(result.output, call, min(num_new, total - whole)))
        surprises.append(result.surprise)
    output = torch.cat(outputs, 1)[:, -num_new:]
    surprise = None
    if call.output_surprise:
        surprise = torch.cat([_from_chunks(s, call, s.shape[0] * s.shape[2]) for s in surprises], 1)[:, -num_new:]
    state = MemoryState(state.weights, state.momentum, PendingTokens(*rest), total - whole)
    return MemoryResult(output, state, surprise)


def _slotted_rows(call: MemoryCall) -> MemoryResult:
    """Rows differ: all of them go through slots, as many chunks as the longest one needs."""
    slots, state = call.layout.slots, call.state
    tokens = [slots.to_slots(*pair) for pair in zip(state.pending, call.tokens, strict=True)]
    idle = call.q.new_zeros(call.q.shape[0], state.pending.k.shape[1], *call.q.shape[2:])
    queries = slots.to_slots(idle, call.q)
    num_slots = queries.shape[1]
    result = _scan(call, state, queries, tokens, num_slots // call.chunk_size, write=True)
    pending = PendingTokens(*(slots.open_chunk(t) for t in tokens))
    state = MemoryState(result.weights, result.momentum, pending, slots.count)
    output = slots.to_columns(_from_chunks(result.output, call, num_slots))
    surprise = None
    if call.output_surprise:
        surprise = slots.to_columns(_from_chunks(result.surprise, call, num_slots))
    return MemoryResult(output, state, surprise)


def _scan(call: MemoryCall, state: MemoryState, q, tokens, num_chunks: int, write: bool):
    """Scans ``num_chunks`` chunks of tokens (B, num_chunks * b, H, ...); q may cover only the last of them."""
    slots, batch_size = call.layout.slots, call.q.shape[0]
    start, forget_to = call.start_state, call.forget_to_weights
    full, restart, restart_at = None, None, frozenset()
    if slots is not None:
        full = _by_chunk(slots.full, call)
        if slots.restart is not None:
            restart, restart_at = _by_chunk(slots.restart, call), slots.restart_at
    k, v, *gates = (_to_chunks(t, num_chunks) for t in tokens)
    if call.chunk_gates:
        gates = [t[..., :1].expand_as(t) for t in gates]
    inputs = ScanInputs(
        _to_chunks(q, num_chunks),
        k,
        v,
        *gates,
        full=full,
        restart=restart,
        norm_weight=_by_row(call.norm_weight, batch_size, 1),
        norm_bias=_by_row(call.norm_bias, batch_size, 1),
        weights=tuple(w.flatten(0, 1) for w in state.weights),
        momentum=tuple(s.flatten(0, 1) for s in state.momentum),
        forget_to=None if forget_to is None else tuple(_by_row(w, batch_size) for w in forget_to),
        start_weights=_start(start and start.weights, batch_size, restart),
        start_momentum=_start(start and start.momentum, batch_size, restart),
    )
    facts = (len(state.weights), call.residual, call.norm_eps, write, restart_at, call.output_surprise)
    result = call.scan(inputs, ScanOptions(*facts, call.products))
    shape = (batch_size, -1)
    return result._replace(
        weights=tuple(w.unflatten(0, shape) for w in result.weights),
        momentum=tuple(s.unflatten(0, shape) for s in result.momentum),
    )


def _to_chunks(t: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """(B, N * b, H, ...) -> (N, B * H, b, ...)."""
    return t.unflatten(1, (num_chunks, -1)).movedim(1, 0).transpose(2, 3).flatten(1, 2).contiguous()


def _from_chunks(t: torch.Tensor, call: MemoryCall, length: int) -> torch.Tensor:
    """(N, B * H, b, ...) -> (B, length, H, ...)."""
    t = t.unflatten(1, (call.q.shape[0], -1)).transpose(2, 3).movedim(0, 1)
    return t.reshape(t.shape[0], length, *t.shape[3:])


def _by_chunk(t: torch.Tensor, call: MemoryCall) -> torch.Tensor:
    """(B, N) -> (N, B * H)."""
    return t.T.repeat_interleave(call.q.shape[2], dim=1)


def _by_row(t: torch.Tensor | None, batch_size: int, unsqueeze: int | None = None) -> torch.Tensor | None:
    """(H, ...) -> (B * H, ...), with a dimension of 1 put in at ``unsqueeze``."""
    if t is None:
        return None
    t = t.expand(batch_size, *t.shape).flatten(0, 1)
    return t if unsqueeze is None else t.unsqueeze(unsqueeze)


def _start(group, batch_size: int, restart: torch.Tensor | None):
    """(1, H, ...) -> (B * H, ...) for each layer; None where no row restarts."""
    return None if restart is None else tuple(t.expand(batch_size, *t.shape[1:]).flatten(0, 1) for t in group)
