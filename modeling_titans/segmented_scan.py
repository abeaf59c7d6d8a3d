# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A scan that hands out the memory at the ends of segments (Memory Caching, section 3), by any backend's scan: for
backends whose scan does not do so itself, and for segments that begin anew or are read while the scan goes on.

Shapes: N chunks, G rows times heads, J chunks behind which a segment ends, m chunks in a segment.
"""

import itertools
from collections.abc import Callable

import torch

from .kept_plan import SegmentEnds
from .memory_soup import KeptRoom
from .scan_inputs import ScanInputs, ScanOptions, ScanResult


# Weights, then momentum, per layer (G, D_in, D_out).
State = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def scan_segments(
    scan: Callable[[ScanInputs, ScanOptions], ScanResult],
    inputs: ScanInputs,
    options: ScanOptions,
    ends: SegmentEnds,
    start: State | None,
) -> ScanResult:
    """Scans segment by segment; the result's ``kept`` are the weights behind each.

    Args:
        scan: of a backend.
        inputs, options: of the whole scan.
        ends: where segments end; ``rows`` (G, J) or None.
        start: where segments begin if ``ends.restarts``.
    """
    num_chunks = inputs.k.shape[0]
    state: State = (inputs.weights, inputs.momentum)
    results, kept, begin = [], [], 0
    room = None if inputs.mix is None else KeptRoom(inputs.kept, len(ends.chunks))
    parts = _parts(ends, num_chunks, inputs.mix is None)
    for (number, length), span in zip(parts, inputs.split_chunks([length for _, length in parts]), strict=True):
        stop = begin + length
        span_options = options.of_chunks(begin, stop)
        if room is not None:
            span = span._replace(kept=room.filled, mix=span.mix[..., : 1 + room.filled[0].shape[1]])
        if number > 1:
            result, states = _scan_side_by_side(scan, span, span_options, number, start)
        else:
            result = scan(span._replace(weights=state[0], momentum=state[1]), span_options)
            state = (result.weights, result.momentum)
            states = [state[0]] if stop - 1 in ends.chunks else []
        results.append(result)
        kept += states
        if room is not None and states:
            room.put(states[0])
        if states and ends.restarts:
            state = _restart(ends, len(kept) - 1, start, state)
        begin = stop
    output = torch.cat([result.output for result in results])
    surprise = torch.cat([result.surprise for result in results]) if options.surprise else None
    return ScanResult(output, *state, surprise, tuple(map(torch.stack, zip(*kept, strict=True))))


def _parts(ends: SegmentEnds, num_chunks: int, is_free: bool) -> list[tuple[int, int]]:
    """(how many segments, how many chunks) of each part of a scan: one segment, but those that all rows begin anew
    and alike are one part, if they are ``is_free`` of each other in reading too."""
    borders = [0, *(chunk + 1 for chunk in ends.chunks)]
    parts = [(1, stop - begin) for begin, stop in itertools.pairwise(borders)]
    if is_free and ends.restarts and ends.rows is None and len(parts) > 2:
        parts = [parts[0], (len(parts) - 1, borders[-1] - borders[1])]
    if borders[-1] < num_chunks:
        parts.append((1, num_chunks - borders[-1]))
    return parts


def _restart(ends: SegmentEnds, number: int, start: State, state: State) -> State:
    if ends.rows is None:
        return start
    rows = ends.rows[:, number, None, None]
    return tuple(
        tuple(torch.where(rows, new, old) for new, old in zip(*pair, strict=True))
        for pair in zip(start, state, strict=True)
    )


def _scan_side_by_side(scan, inputs: ScanInputs, options: ScanOptions, number: int, start: State):
    """Segments of m chunks that know nothing of each other, as rows of one scan."""

    def fold(t: torch.Tensor | None) -> torch.Tensor | None:
        """(number * m, G, ...) -> (m, number * G, ...)."""
        return None if t is None else t.unflatten(0, (number, -1)).transpose(0, 1).flatten(1, 2)

    def repeat(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.repeat(number, *(1,) * (t.dim() - 1))

    forget_to = inputs.forget_to
    folded = inputs._replace(
        **{name: fold(getattr(inputs, name)) for name in ("q", "k", "v", "theta", "alpha", "eta")},
        norm_weight=repeat(inputs.norm_weight),
        norm_bias=repeat(inputs.norm_bias),
        forget_to=None if forget_to is None else tuple(map(repeat, forget_to)),
        weights=tuple(map(repeat, start[0])),
        momentum=tuple(map(repeat, start[1])),
    )
    result = scan(folded, options)

    def unfold(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (number, -1)).transpose(0, 1).flatten(0, 1)

    states = list(zip(*(w.unflatten(0, (number, -1)).unbind(0) for w in result.weights), strict=True))
    surprise = None if result.surprise is None else unfold(result.surprise)
    return ScanResult(unfold(result.output), result.weights, result.momentum, surprise), states
