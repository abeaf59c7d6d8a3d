# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Which kept memories each token of a call reads, and which ones the call keeps (Memory Caching, sections 3 and 4.2).

Segments count the real tokens of a document. With n complete segments behind it a token may read what was kept at
their ends: all of it, or with logarithmic segmentation the blocks of n's binary expansion (37 = 32 + 4 + 1), which
are the prefixes of n's binary digits. Constant segments may be bounded: then only the latest ``most`` are kept.

Shapes: B rows (1 where all are alike), T columns, K memories kept before the call, E segments that end in it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .token_layout import TensorTable, TokenLayout, columns_by_place


# Binary digits of a number of segments.
DIGITS = 31


@dataclass(frozen=True)
class KeptOptions:
    """What does not change from call to call.

    Attributes:
        segment_length: tokens in a (base) segment, a multiple of the memory's chunk size.
        chunk_size: the memory's.
        logarithmic: whether memories are kept by the blocks of a binary expansion.
        restarts: whether a segment begins at the start state.
        most: how many memories are kept at most, or None; for constant segments.
    """

    segment_length: int
    chunk_size: int
    logarithmic: bool
    restarts: bool
    most: int | None

    def number(self, closed: int) -> int:
        """How many memories are kept behind ``closed`` segments."""
        if self.logarithmic:
            return closed.bit_count()
        return closed if self.most is None else min(closed, self.most)

    def numbers(self, closed: torch.Tensor) -> torch.Tensor:
        """`number` of each element."""
        if self.logarithmic:
            return _bit_count(closed)
        return closed if self.most is None else closed.clamp(max=self.most)

    def is_kept(self, end: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        """Whether behind ``closed`` segments the memory is kept that was when ``end`` >= 1 of them were complete."""
        later, kept = closed - end, (end >= 1) & (end <= closed)
        if self.logarithmic:
            # The block that ends there has as many segments as end's lowest digit says, and is read as long.
            return kept & (later < (end & -end))
        return kept if self.most is None else kept & (later < self.most)

    def life(self, end: int) -> int:
        """A bound for the number of segments in which the memory kept at ``end`` is read."""
        if self.logarithmic:
            return end & -end
        return 1 << DIGITS if self.most is None else self.most

    def kept_ends(self, closed: int | torch.Tensor, places: int, device) -> torch.Tensor:
        """For each place the number of segments behind which its memory was kept: (B, K), 0 where there is none."""
        closed = by_row(closed, device).view(-1, 1)
        number, place = self.numbers(closed), torch.arange(places, device=device)
        if not self.logarithmic:
            return torch.where(place < number, closed - number + 1 + place, 0)
        digit = torch.arange(DIGITS, device=device)
        prefix = closed >> digit
        index = torch.where(prefix & 1 == 1, _bit_count(prefix >> 1), places).clamp(max=places)
        ends = closed.new_zeros(closed.shape[0], places + 1).scatter_(1, index, prefix << digit)
        return ends[:, :places]


@dataclass(frozen=True)
class SegmentEnds(TensorTable):
    """Where the segments of a call end, for the op.

    Attributes:
        chunks: the chunks behind which a segment ends in any row, counted from the first one of the call.
        rows: (B, chunks) the rows in which that is so; None: all.
        restarts: whether the next segment begins at the start state.
    """

    chunks: tuple[int, ...]
    rows: torch.Tensor | None
    restarts: bool


@dataclass(frozen=True)
class RunnerPlan(TensorTable):
    """How the memory that begins anew after each 2**level segments goes through a call.

    Attributes:
        ends: where that is so.
        chosen: (B, E) which of these ends each segment's is; their number where there is none.
        is_kept: (B, E) the segments at whose end this memory is the one to keep: 2**level is their number's lowest
            binary digit.
    """

    ends: SegmentEnds
    chosen: torch.Tensor
    is_kept: torch.Tensor


@dataclass(frozen=True)
class KeptPlan(TensorTable):
    """One call, the same for all layers.

    Attributes:
        options: what does not change.
        allowed: (B, T, K + E) the memories that a token reads beside the running one: those kept before, then the
            call's own.
        spans: for each of them the columns outside of which no row reads it.
        first: (B, T) column at which the token's segment begins, -1 if it is the one that was running.
        length: (B, T) tokens of its segment up to and with this one.
        last: (B, E) last column of each segment that ends, T where there is none.
        ends: for the op.
        chosen: (B, E) which of its chunks each segment ends with, their number where there is none; None: in order.
        end: (B, K + E) segments complete at the end of each memory, 0 where there is none.
        blocks: (B, E, K + E) memories whose segments the block kept at each end comes to; None: just the last one.
        carried: (B, K') the memories kept behind the call, K + E where there is none.
        levels: with runners (see `KeptMemories`), how each of them goes through the call; else none.
        closed, left: segments complete and tokens of the running one behind the call: an int each if all rows are
            alike, else (B,).
    """

    options: KeptOptions
    allowed: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    first: torch.Tensor
    length: torch.Tensor
    last: torch.Tensor
    ends: SegmentEnds
    chosen: torch.Tensor | None
    end: torch.Tensor
    blocks: torch.Tensor | None
    carried: torch.Tensor
    levels: tuple["RunnerPlan", ...]
    closed: int | torch.Tensor
    left: int | torch.Tensor

    @property
    def places(self) -> int:
        """K."""
        return self.end.shape[1] - self.last.shape[1]


class KeptCounts(NamedTuple):
    """How far the rows are: segments complete, tokens of the running one (an int or (B,) each), places K."""

    closed: int | torch.Tensor
    left: int | torch.Tensor
    places: int

    def restart(self, rows: torch.Tensor) -> "KeptCounts":
        """Rows (B,) bool begin a document."""
        return self._replace(closed=torch.where(rows, 0, self.closed), left=torch.where(rows, 0, self.left))


def plan_kept(
    options: KeptOptions, counts: KeptCounts, layout: TokenLayout, shape: tuple[int, int], device
) -> KeptPlan:
    """Plans a call of T columns over ``layout``, where ``counts`` say what was kept before."""
    if layout.slots is None and isinstance(counts.closed, int):
        return _alike_rows(options, counts, layout.count, shape[1], device)
    return _differing_rows(options, counts, layout, shape, device)


class _Columns(NamedTuple):
    """What is counted.

    Attributes:
        document: (B, T) of each column, 0 for the one that a row was in before the call.
        number: (B, T) tokens of its document up to and with this one, those before the call too.
        real: (B, T) whether it is a token.
        last_document: (B, 1) document in which a row is behind the call.
        total: (B, 1) tokens of that.
    """

    document: torch.Tensor
    number: torch.Tensor
    real: torch.Tensor
    last_document: torch.Tensor
    total: torch.Tensor


class _Ends(NamedTuple):
    """Where segments end: columns (B, E), the op's and which of them each one is, see `KeptPlan`; what comes of it:
    places K', the most segments that a document of the call completes, and, if all rows are alike, those before it."""

    last: torch.Tensor
    ends: SegmentEnds
    chosen: torch.Tensor | None
    places: int
    most: int
    closed: int | None


def _alike_rows(options: KeptOptions, counts: KeptCounts, pending: int, num_columns: int, device) -> KeptPlan:
    closed, left, length = counts.closed, counts.left, options.segment_length
    number = (left + num_columns) // length
    last = [(n + 1) * length - left - 1 for n in range(number)]
    ends = SegmentEnds(tuple((pending + t) // options.chunk_size for t in last), None, options.restarts)
    # A single token reads all that was kept before it; a trace need not ask how much of the text that is.
    spans = [(0, 1)] * counts.places + [(1, 1)] * number if num_columns == 1 else []
    if not spans:
        known = [*_python_ends(options, closed), *range(closed + 1, closed + number + 1)]
        for end in known:
            begin, stop = (max((n - closed) * length - left, 0) for n in (end, end + options.life(end)))
            spans.append((min(begin, num_columns), min(stop, num_columns)))
    place = torch.arange(num_columns, device=device)[None]
    total = closed * length + left + num_columns
    columns = _Columns(
        torch.zeros_like(place),
        place + closed * length + left + 1,
        torch.ones_like(place, dtype=torch.bool),
        place.new_zeros(1, 1),
        place.new_full((1, 1), total),
    )
    after = closed + number
    last = torch.tensor([last], dtype=torch.long, device=device)
    found = _Ends(last, ends, None, options.number(after), after, closed)
    return _plan(options, counts, columns, found, tuple(spans), (after, total % length))


def _python_ends(options: KeptOptions, closed: int) -> list[int]:
    """`KeptOptions.kept_ends` of one number, where there is a memory in every place."""
    number = options.number(closed)
    ends = range(1, closed + 1)
    if options.logarithmic:
        ends = [closed >> digit << digit for digit in reversed(range(DIGITS)) if closed >> digit & 1]
    return list(ends[len(ends) - number :])


def _differing_rows(options: KeptOptions, counts: KeptCounts, layout: TokenLayout, shape, device) -> KeptPlan:
    length, documents, slots = options.segment_length, layout.documents, layout.slots
    closed, left = (torch.as_tensor(n, device=device).expand(shape[0]) for n in (counts.closed, counts.left))
    before = (closed * length + left)[:, None]
    number = documents.rank_in_document() + 1 + torch.where(documents.index == 0, before, 0)
    last_document = documents.index[:, -1:]
    total = documents.length.gather(1, last_document) + torch.where(last_document == 0, before, 0)
    columns = _Columns(documents.index, number, layout.mask, last_document, total)
    is_end = layout.mask & (number % length == 0)
    after = total.squeeze(1) // length
    # A document that ends in the call may have had more segments than the one behind it.
    reached = torch.maximum(torch.where(layout.mask, number // length, 0).amax(1), after)
    most = torch.stack([is_end.sum(1), options.numbers(after), reached]).amax(1).tolist()
    num_ends, places, num_closed = most
    last = columns_by_place(torch.where(is_end, is_end.long().cumsum(1) - 1, num_ends), num_ends)
    chunk = _take(slots.slot // options.chunk_size, last, -1)
    chunks = sorted(set(chunk[chunk >= 0].tolist()))
    at = torch.tensor(chunks, dtype=torch.long, device=device)
    rows = (chunk[:, :, None] == at).any(1)
    ends = SegmentEnds(tuple(chunks), rows, options.restarts)
    # Where there is no segment's end, behind them all.
    chosen = torch.where(chunk >= 0, torch.searchsorted(at, chunk), len(chunks))
    found = _Ends(last, ends, chosen, places, num_closed, None)
    return _plan(options, counts, columns, found, None, (after, total.squeeze(1) % length))


def _plan(options, counts, columns: _Columns, found: _Ends, spans, after) -> KeptPlan:
    length, last, device = options.segment_length, found.last, found.last.device
    complete = (columns.number - 1) // length
    kept = options.kept_ends(counts.closed, counts.places, device).expand(last.shape[0], -1)
    end = torch.cat([kept, _take(complete, last, -1) + 1], 1)
    document = torch.cat([torch.zeros_like(kept), _take(columns.document, last, -1)], 1)
    same = document[:, None] == columns.document[:, :, None]
    # A row's own last column is behind whatever ends in it; a masked column reads nothing.
    allowed = options.is_kept(end[:, None], complete[:, :, None]) & same & columns.real[:, :, None]
    is_carried = options.is_kept(end, columns.total // length) & (document == columns.last_document)
    order = torch.argsort((~is_carried).long(), dim=1, stable=True)[:, : found.places]
    carried = torch.where(is_carried.gather(1, order), order, end.shape[1])
    column = torch.arange(complete.shape[1], device=device)
    begins = columns.real & ((columns.number - 1) % length == 0)
    first = torch.where(begins, column, -1).cummax(1).values
    blocks = None
    if options.logarithmic and last.shape[1]:
        own = end[:, counts.places :, None]
        blocks = (end[:, None] > own - (own & -own)) & (end[:, None] <= own) & (end[:, None] >= 1)
        blocks = blocks & (document[:, None] == document[:, counts.places :, None])
    if spans is None:
        spans = _spans(allowed)
    within = (columns.number - 1) % length + 1
    levels = ()
    if options.logarithmic and options.restarts:
        levels = _levels(end[:, counts.places :], found)
    return KeptPlan(
        options, allowed, spans, first, within, last, found.ends, found.chosen, end, blocks, carried, levels, *after
    )


def _levels(end: torch.Tensor, found: _Ends) -> tuple[RunnerPlan, ...]:
    """For levels 1, 2, ... up to the first of which no block is complete; ``end`` (B, E)."""
    levels, ends = [], found.ends
    for level in range(1, found.most.bit_length() + 1):
        step = 1 << level
        here = (end > 0) & (end % step == 0)
        is_kept = here & (end & step != 0)
        if found.chosen is None:
            chunks = tuple(chunk for n, chunk in enumerate(ends.chunks, found.closed + 1) if n % step == 0)
            rows, chosen = None, torch.where(here, here.long().cumsum(1) - 1, len(chunks))
        else:
            chunks, chosen = ends.chunks, found.chosen
            rows = F.pad(torch.zeros_like(ends.rows), (0, 1)).scatter_(1, chosen, here)[:, :-1]
        levels.append(RunnerPlan(SegmentEnds(chunks, rows, True), chosen, is_kept))
    return tuple(levels)


def _spans(allowed: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """For each memory the columns between which any row reads it; with one wait for the device."""
    anywhere, number = allowed.any(0), allowed.shape[1]
    column = torch.arange(number, device=allowed.device)[:, None]
    begin = torch.where(anywhere, column, number).amin(0)
    stop = torch.where(anywhere, column + 1, 0).amax(0)
    return tuple((min(b, e), e) for b, e in torch.stack([begin, stop], 1).tolist())


def by_row(count: int | torch.Tensor, device) -> torch.Tensor:
    """A count as (B or 1,); an int in such a way that a trace does not compile the number in."""
    return count.to(device) if torch.is_tensor(count) else torch.full((1,), count, device=device)


def _take(values: torch.Tensor, column: torch.Tensor, otherwise: int) -> torch.Tensor:
    """values (B, T) at the columns (B, E); ``otherwise`` where the column is T."""
    return F.pad(values, (0, 1), value=otherwise).gather(1, column)


def _bit_count(n: torch.Tensor) -> torch.Tensor:
    """The number of binary digits 1 of each element, >= 0 and below 2 ** 31."""
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return ((n * 0x01010101) & 0xFFFFFFFF) >> 24
