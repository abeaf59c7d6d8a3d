# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The chunked form of the neural memory: puts a call's tokens into chunks, scans them, and takes the output back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chunk_decode import NewTokens, OpenRead, empty_chunk, in_place_of, known_chunk, read_open_chunk
from .chunk_scan import PYTORCH_SCANS
from .inner_network import InnerNetwork
from .memory_state import MemoryState, PendingTokens
from .scan_inputs import Rule, ScanInputs, ScanOptions, ScanResult
from .short_calls import FEW
from .state_pair import Products
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
    rule: Rule


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
    reads = []
    if whole:
        # A lone chunk is read only where it is new; of several, the first one's pending tokens get idle queries.
        queries = call.q[:, : num_new - (total - whole)]
        if whole > b:
            queries = F.pad(queries, (0, 0, 0, 0, state.count, 0))
        result = _scan(call, state, queries, [t[:, :whole] for t in tokens], whole // b, write=True)
        state = MemoryState(result.weights, result.momentum, state.pending, state.count)
        reads.append(_columns_of(result, call))
    rest, chunk = PendingTokens(*(t[:, whole:] for t in tokens)), None
    if whole < total:
        queries = call.q[:, max(num_new - (total - whole), 0) :]
        if _keeps_chunk(call):
            output, surprise, chunk = _read_open(call, state, queries, rest)
            reads.append((output, surprise))
        else:
            reads.append(_columns_of(_scan(call, state, queries, rest, 1, write=False), call))
    outputs, surprises = zip(*reads, strict=True)
    output = _joined(outputs)[:, -num_new:]
    surprise = _joined(surprises)[:, -num_new:] if call.output_surprise else None
    return MemoryResult(output, MemoryState(state.weights, state.momentum, rest, total - whole, chunk), surprise)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _keeps_chunk(call: MemoryCall) -> bool:
    """Whether the call is one of those by which text is decoded: `read_open_chunk` reads its open chunk.

    It is not for autograd, and a kernel reads open chunks itself. What it keeps pays off where few tokens follow.
    """
    return call.q.shape[1] <= FEW and not torch.is_grad_enabled() and call.scan in PYTORCH_SCANS


def _read_open(call: MemoryCall, state: MemoryState, q, tokens: PendingTokens) -> OpenRead:
    """Reads the last of an open chunk's tokens (B, P + n, H, ...), of which P may be known by `state.chunk`."""
    chunk = empty_chunk(state.weights) if state.chunk is None else state.chunk
    k, v, *gates = tokens
    if call.chunk_gates:
        gates = [t[:, :1].expand_as(t) for t in gates]
    v, *gates = (t[:, chunk.mixed.shape[2] - 1 :] for t in (v, *gates))
    memory, tokens = (_network(call), state.weights, state.momentum, chunk), NewTokens(q, k, v, *gates)
    facts = {"sliding": call.rule.sliding, "surprise": call.output_surprise}
    return read_open_chunk(*memory, tokens, _forget_to(call), **facts)


def _read_one(call: MemoryCall) -> MemoryResult:
    """A single token in each row, that closes no chunk; rows differ in what they have pending, and in the mask."""
    state, pending, real = call.state, call.state.pending, call.layout.mask[:, 0]
    network, places = _network(call), torch.arange(call.chunk_size - 1, device=real.device)
    old, new = pending[2:], call.tokens[2:]
    if call.chunk_gates:
        is_first = (state.count == 0)[:, None, None]
        new = [torch.where(is_first, t, p[:, :1]) for t, p in zip(new, old, strict=True)]
        old = [t[:, :1].expand_as(t) for t in old]
    chunk = state.chunk
    if chunk is None:
        taken = places < state.count[:, None]
        tokens = NewTokens(call.q, pending.k, pending.v, *old)
        chunk = known_chunk(network, state.weights, tokens, taken, call.rule.sliding)
    keys = torch.cat([pending.k, call.tokens.k], 1)
    tokens = NewTokens(call.q, keys, call.tokens.v, *new)
    memory = (network, state.weights, state.momentum, chunk)
    facts = {"sliding": call.rule.sliding, "surprise": call.output_surprise}
    read = read_open_chunk(*memory, tokens, _forget_to(call), real, **facts)
    at = (places == state.count[:, None]) & real[:, None]
    pending = [
        torch.where(at.view(*at.shape, *(1,) * (t.dim() - 2)), t, p) for t, p in zip(call.tokens, pending, strict=True)
    ]
    state = MemoryState(
        state.weights, state.momentum, PendingTokens(*pending), call.layout.slots.count, in_place_of(read.chunk, at)
    )
    output = torch.where(real[:, None, None, None], read.output, 0)
    surprise = torch.where(real[:, None, None], read.surprise, 0) if call.output_surprise else None
    return MemoryResult(output, state, surprise)


def _network(call: MemoryCall) -> InnerNetwork:
    norm = [_by_row(t, call.q.shape[0], 1) for t in (call.norm_weight, call.norm_bias)]
    return InnerNetwork(call.residual, *norm, call.norm_eps, Products(None, call.q.dtype), call.rule.dot)


def _forget_to(call: MemoryCall) -> tuple[torch.Tensor, ...] | None:
    """(B * H, D_in, D_out) per layer, or None."""
    forget_to = call.forget_to_weights
    return None if forget_to is None else tuple(_by_row(w, call.q.shape[0]) for w in forget_to)


def _slotted_rows(call: MemoryCall) -> MemoryResult:
    """Rows differ: all of them go through slots, as many chunks as the longest one needs."""
    slots, state = call.layout.slots, call.state
    if slots.stays_open and call.q.shape[1] == 1 and isinstance(state.count, torch.Tensor) and _keeps_chunk(call):
        return _read_one(call)
    tokens = [slots.to_slots(*pair) for pair in zip(state.pending, call.tokens, strict=True)]
    idle = call.q.new_zeros(call.q.shape[0], state.pending.k.shape[1], *call.q.shape[2:])
    queries = slots.to_slots(idle, call.q)
    num_chunks = queries.shape[1] // call.chunk_size
    result = _scan(call, state, queries, tokens, num_chunks, write=num_chunks > 1 or not slots.stays_open)
    pending = PendingTokens(*(slots.open_chunk(t) for t in tokens))
    state = MemoryState(result.weights, result.momentum, pending, slots.count)
    output, surprise = (t if t is None else slots.to_columns(t) for t in _columns_of(result, call))
    return MemoryResult(output, state, surprise)


def _scan(call: MemoryCall, state: MemoryState, q, tokens, num_chunks: int, write: bool):
    """Scans ``num_chunks`` chunks of tokens (B, num_chunks * b, H, ...); q may cover only the last of them."""
    slots, batch_size = call.layout.slots, call.q.shape[0]
    start = call.start_state
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
        forget_to=_forget_to(call),
        start_weights=_start(start and start.weights, batch_size, restart),
        start_momentum=_start(start and start.momentum, batch_size, restart),
    )
    facts = (len(state.weights), call.residual, call.norm_eps, write, restart_at, call.output_surprise)
    result = call.scan(inputs, ScanOptions(*facts, call.products, rule=call.rule))
    shape = (batch_size, -1)
    return result._replace(
        weights=tuple(w.unflatten(0, shape) for w in result.weights),
        momentum=tuple(s.unflatten(0, shape) for s in result.momentum),
    )


def _to_chunks(t: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """(B, N * b, H, ...) -> (N, B * H, b, ...)."""
    return t.unflatten(1, (num_chunks, -1)).movedim(1, 0).transpose(2, 3).flatten(1, 2).contiguous()


def _columns_of(result: ScanResult, call: MemoryCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A scan's outputs and inner losses (B, tokens, H, ...)."""
    output, surprise = result.output, result.surprise
    output = _from_chunks(output, call, output.shape[0] * output.shape[2])
    return output, None if surprise is None else _from_chunks(surprise, call, surprise.shape[0] * surprise.shape[2])


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
