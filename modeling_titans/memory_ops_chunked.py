# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The chunked form of the neural memory: puts a call's tokens into chunks, scans them, and takes the output back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .chunk_decode import NewTokens, OpenRead, empty_chunk, in_place_of, known_chunk, read_open_chunk
from .chunk_scan import chunk_scan, compiled_chunk_scan
from .inner_network import InnerNetwork
from .kept_plan import SegmentEnds
from .memory_ops_native import native_scan
from .memory_soup import Soup
from .memory_state import MemoryState, PendingTokens
from .scan_inputs import Rule, ScanInputs, ScanOptions, ScanResult
from .segmented_scan import scan_segments
from .short_calls import is_short
from .state_pair import Products
from .token_layout import TokenLayout


# Scans that take every tensor in the state's dtype, and for which PyTorch reads open chunks.
PLAIN_SCANS = (chunk_scan, compiled_chunk_scan, native_scan)
# Scans that hand out weights at the ends of segments; the others are called segment by segment.
SEGMENTING_SCANS = (chunk_scan, compiled_chunk_scan)


class MemoryCall(NamedTuple):
    """The checked arguments of `neural_memory`.

    All tensors are in the state's dtype, except that a scan may take q, k and v, pending ones too, in another one.
    Where nothing is to be read, q has no tokens.
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
    kept: tuple[torch.Tensor, ...] | None = None
    mix: torch.Tensor | None = None
    segments: SegmentEnds | None = None

    @property
    def reads(self) -> bool:
        return self.q.shape[1] > 0


class MemoryResult(NamedTuple):
    """Output (B, T, H, D), the state after the call, the inner losses (B, T, H) or None, and the weights at the ends
    of segments, per layer (B, J, H, D_in, D_out), or None where none were asked for."""

    output: torch.Tensor
    state: MemoryState
    surprise: torch.Tensor | None
    kept: tuple[torch.Tensor, ...] | None = None


def chunked_memory(call: MemoryCall) -> MemoryResult:
    """See `neural_memory`."""
    return _alike_rows(call) if call.layout.slots is None else _slotted_rows(call)


def _alike_rows(call: MemoryCall) -> MemoryResult:
    """Every row has the same count and T real tokens: whole chunks first, then the rest, which stays open."""
    state, b = call.state, call.chunk_size
    tokens = call.tokens
    if state.count:
        tokens = [torch.cat(pair, 1) for pair in zip(state.pending, call.tokens, strict=True)]
    num_new, total = call.tokens.k.shape[1], tokens[0].shape[1]
    whole = total // b * b
    reads, kept = [], ()
    if whole:
        # A lone chunk is read only where it is new; of several, the first one's pending tokens get idle queries.
        queries = [t[:, : num_new - (total - whole)] for t in _queries(call)]
        if whole > b and state.count and call.reads:
            queries = [F.pad(t, (0, 0, 0, 0, state.count, 0)) for t in queries]
        result = _scan(call, state, queries, [t[:, :whole] for t in tokens], whole // b, write=True)
        kept, state = result.kept, MemoryState(result.weights, result.momentum, state.pending, state.count)
        reads.append(_columns_of(result, call))
    new = handed_out(kept, call)
    if call.kept is not None and kept:
        call = call._replace(kept=tuple(torch.cat(pair, 1) for pair in zip(call.kept, new, strict=True)))
    # What a state keeps is its own: neither the caller's tensors nor the memory of a whole sequence.
    rest = PendingTokens(*(t[:, whole:] if state.count else t[:, whole:].clone() for t in tokens))
    chunk = None
    if whole < total and call.reads:
        queries = [t[:, max(num_new - (total - whole), 0) :] for t in _queries(call)]
        if _keeps_chunk(call):
            output, surprise, chunk = _read_open(call, state, queries, rest)
            reads.append((output, surprise))
        else:
            reads.append(_columns_of(_scan(call, state, queries, rest, 1, write=False), call))
    output, surprise = call.q, None
    if call.reads:
        outputs, surprises = zip(*reads, strict=True)
        output = _joined(outputs)[:, -num_new:]
        surprise = _joined(surprises)[:, -num_new:] if call.output_surprise else None
    state = MemoryState(state.weights, state.momentum, rest, total - whole, chunk)
    return MemoryResult(output, state, surprise, new)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _queries(call: MemoryCall) -> list[torch.Tensor]:
    """What a token is read with, (B, T, H, .) each: its query and, for a mixture of memories, its shares of them."""
    return [call.q] if call.mix is None else [call.q, call.mix]


def _keeps_chunk(call: MemoryCall) -> bool:
    """Whether the call is one of those by which text is decoded: `read_open_chunk` reads its open chunk.

    It is not for autograd, and a kernel reads open chunks itself. What it keeps pays off where few tokens follow.
    """
    return is_short(call.q.shape[1]) and call.scan in PLAIN_SCANS


def _read_open(call: MemoryCall, state: MemoryState, queries, tokens: PendingTokens) -> OpenRead:
    """Reads the last of an open chunk's tokens (B, P + n, H, ...), of which P may be known by `state.chunk`."""
    q, *mix = queries
    chunk = empty_chunk(state.weights) if state.chunk is None else state.chunk
    k, v, *gates = tokens
    if call.chunk_gates:
        gates = [t[:, :1].expand_as(t) for t in gates]
    v, *gates = (t[:, chunk.mixed.shape[2] - 1 :] for t in (v, *gates))
    memory, tokens = (_network(call), state.weights, state.momentum, chunk), NewTokens(q, k, v, *gates)
    soup = Soup.of_tokens(mix[0], call.kept) if mix else None
    facts = {"sliding": call.rule.sliding, "surprise": call.output_surprise}
    return read_open_chunk(*memory, tokens, _forget_to(call), soup=soup, **facts)


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
    soup = None if call.mix is None else Soup.of_tokens(call.mix, call.kept)
    read = read_open_chunk(*memory, tokens, _forget_to(call), real, soup, **facts)
    at = (places == state.count[:, None]) & real[:, None]
    pending = [
        torch.where(at.view(*at.shape, *(1,) * (t.dim() - 2)), t, p) for t, p in zip(call.tokens, pending, strict=True)
    ]
    state = MemoryState(
        state.weights, state.momentum, PendingTokens(*pending), call.layout.slots.count, in_place_of(read.chunk, at)
    )
    output = torch.where(real[:, None, None, None], read.output, 0)
    surprise = torch.where(real[:, None, None], read.surprise, 0) if call.output_surprise else None
    return MemoryResult(output, state, surprise, handed_out((), call))


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
    pending = PendingTokens(*(slots.open_chunk(t) for t in tokens))
    if slots.stays_open and not call.reads:
        state = MemoryState(state.weights, state.momentum, pending, slots.count)
        return MemoryResult(call.q, state, None, handed_out((), call))
    queries = _queries(call)
    if call.reads:
        idle = call.q.shape[0], state.pending.k.shape[1]
        queries = [slots.to_slots(t.new_zeros(*idle, *t.shape[2:]), t) for t in queries]
    num_chunks = tokens[0].shape[1] // call.chunk_size
    result = _scan(call, state, queries, tokens, num_chunks, write=num_chunks > 1 or not slots.stays_open)
    state = MemoryState(result.weights, result.momentum, pending, slots.count)
    output, surprise = call.q, None
    if call.reads:
        output, surprise = (t if t is None else slots.to_columns(t) for t in _columns_of(result, call))
    return MemoryResult(output, state, surprise, handed_out(result.kept, call))


def handed_out(kept: Sequence[torch.Tensor], call: MemoryCall) -> tuple[torch.Tensor, ...] | None:
    """The weights ``kept`` at the ends of segments, per layer (B, J, H, D_in, D_out), or () where none ended."""
    if call.segments is None:
        return None
    return tuple(kept) or tuple(w.new_zeros(w.shape[0], 0, *w.shape[1:]) for w in call.state.weights)


def _scan(call: MemoryCall, state: MemoryState, queries, tokens, num_chunks: int, write: bool) -> ScanResult:
    """Scans ``num_chunks`` chunks of tokens (B, num_chunks * b, H, ...); queries may cover only the last of them.

    Returns the result with the state by row, (B, H, D_in, D_out) by layer, and (B, J, H, D_in, D_out) what is kept.
    """
    slots, batch_size = call.layout.slots, call.q.shape[0]
    start = call.start_state
    full, restart, restart_at = None, None, frozenset()
    if slots is not None:
        full = _by_chunk(slots.full, call)
        if slots.restart is not None:
            restart, restart_at = _by_chunk(slots.restart, call), slots.restart_at
    queries, tokens = ([_to_chunks(t, num_chunks) for t in group] for group in (queries, tokens))
    if call.scan is not native_scan:
        queries, tokens = ([t.contiguous() for t in group] for group in (queries, tokens))
    (q, *mix), (k, v, *gates) = queries, tokens
    if call.chunk_gates:
        gates = [t[..., :1].expand_as(t) for t in gates]
    inputs = ScanInputs(
        q,
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
        kept=_kept(call),
        mix=mix[0] if mix else None,
    )
    facts = (len(state.weights), call.residual, call.norm_eps, write, restart_at, call.output_surprise)
    result = _run(call, inputs, ScanOptions(*facts, call.products, rule=call.rule))

    def by_row(layers) -> tuple[torch.Tensor, ...]:
        return tuple(w.unflatten(0, (batch_size, -1)) for w in layers)

    kept = tuple(w.unflatten(1, (batch_size, -1)).transpose(0, 1).contiguous() for w in result.kept)
    return result._replace(weights=by_row(result.weights), momentum=by_row(result.momentum), kept=kept)


def _run(call: MemoryCall, inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    segments = call.segments
    if segments is None or not segments.chunks or not options.write:
        return call.scan(inputs, options)
    if call.scan in SEGMENTING_SCANS and not segments.restarts and inputs.mix is None:
        return call.scan(inputs, options._replace(ends=segments.chunks))
    start = None
    if segments.restarts:
        batch_size, start_state = call.q.shape[0], call.start_state
        start = tuple(_rows_of(group, batch_size) for group in (start_state.weights, start_state.momentum))
    rows = segments.rows
    if rows is not None:
        segments = SegmentEnds(segments.chunks, rows.repeat_interleave(call.q.shape[2], 0), segments.restarts)
    return scan_segments(call.scan, inputs, options, segments, start)


def _to_chunks(t: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """(B, N * b, H, ...) -> (N, B * H, b, ...)."""
    return t.unflatten(1, (num_chunks, -1)).movedim(1, 0).transpose(2, 3).flatten(1, 2)


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


def _kept(call: MemoryCall) -> tuple[torch.Tensor, ...] | None:
    """(B, K, H, D_in, D_out) -> (B * H, K, D_in, D_out) per layer: a view where a head's weights lie together."""
    return None if call.kept is None else tuple(w.transpose(1, 2).flatten(0, 1) for w in call.kept)


def _start(group, batch_size: int, restart: torch.Tensor | None):
    """(1, H, ...) -> (B * H, ...) for each layer; None where no row restarts."""
    return None if restart is None else _rows_of(group, batch_size)


def _rows_of(group, batch_size: int) -> tuple[torch.Tensor, ...]:
    return tuple(t.expand(batch_size, *t.shape[1:]).flatten(0, 1) for t in group)
