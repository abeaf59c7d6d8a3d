# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts a call at the ends of segments, which each row counts in its own real tokens, document by document.

A *piece* holds, of each row, the tokens of one segment of one document; the pieces are read one after another
(Titans, section 4.1). A call that ends inside a segment leaves it open, and the next call goes on there.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .attention_layout import AttentionLayout
from .kept_plan import KeptCounts
from .memory_caching import CachingOptions
from .token_layout import (
    TensorTable,
    TokenDocuments,
    TokenLayout,
    columns_by_place,
    exclusive_cumsum,
    round_up,
    take_or_zero,
)


# Steps in which room for kept keys grows.
PLACES = 64


@dataclass(frozen=True)
class SegmentPiece(TensorTable):
    """One piece of n columns.

    Attributes:
        mask: (B, n) real tokens, or None where all rows are alike.
        restart: (B,) rows in which a document begins with this piece, or None if there is none.
        closed: whether a segment ends with this piece: a bool for all rows, or (B,).
        memory, attention: the piece's layouts.
        position_embeddings: cos and sin, (B or 1, n, D) each.
    """

    mask: torch.Tensor | None
    restart: torch.Tensor | None
    closed: bool | torch.Tensor
    memory: TokenLayout
    attention: AttentionLayout
    position_embeddings: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SegmentPlan(TensorTable):
    """The pieces of a call.

    Attributes:
        pieces: in the order in which they are read.
        lengths: their numbers of columns.
        columns: (B, sum of lengths) column of each row's tokens, piece by piece, T where there is none; None where
            they are the columns as they stand.
        place: (B, T) each column's place among them; None likewise.
    """

    pieces: tuple[SegmentPiece, ...]
    lengths: tuple[int, ...]
    columns: torch.Tensor | None
    place: torch.Tensor | None

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, T, C) -> (B, n, C) for each piece, zeros where there is no token."""
        if self.columns is not None:
            x = take_or_zero([x], self.columns)
        return x.split(self.lengths, 1)

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The pieces' results (B, n, ...) -> (B, T, ...), zeros at masked columns."""
        if self.place is None:
            return torch.cat(pieces, 1)
        return take_or_zero(pieces, self.place)


@dataclass(frozen=True)
class SegmentOptions:
    """What does not change from call to call: see `TitansConfig` and `AttentionLayout.build`."""

    segment_length: int
    chunk_size: int
    num_persistent: int
    implementation: str
    caching: CachingOptions | None = None

    def attention(
        self, shape, device, count, num_kept: int, kept_later: int = 0, memory: TokenLayout | None = None
    ) -> AttentionLayout:
        """``memory``: the piece's other layout, which has counted its tokens; None where all rows are alike."""
        return AttentionLayout.build(
            tuple(shape),
            device,
            window=self.segment_length,
            implementation=self.implementation,
            num_persistent=self.num_persistent,
            count=count,
            num_kept=num_kept,
            kept_later=kept_later,
            mask=None if memory is None else memory.mask,
            documents=None if memory is None else memory.documents,
            is_segment=True,
        )

    def memory(self, count, kept: KeptCounts, shape, device, mask=None) -> tuple[TokenLayout, KeptCounts]:
        """The layout of a piece, and how far memory caching is behind it."""
        layout = TokenLayout.build(mask, count=count % self.chunk_size, chunk_size=self.chunk_size)
        if self.caching is None:
            return layout, kept
        layout = self.caching.plan(layout, kept, shape, device)
        plan = layout.kept
        return layout, KeptCounts(plan.closed, plan.left, plan.carried.shape[1])


def plan_segments(
    options: SegmentOptions,
    shape: tuple[int, int],
    count: int | torch.Tensor,
    num_kept: int,
    kept: KeptCounts,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
) -> SegmentPlan:
    """Plans a call.

    Args:
        options: lengths.
        shape: (B, T).
        count: tokens in each row's open segment, an int if all rows are alike, else (B,).
        num_kept: places that the state has for them.
        kept: how far memory caching is; without it, without a meaning.
        position_embeddings: cos and sin of the columns, (B or 1, T, D) each.
        mask: (B, T) bool real tokens; None if all rows are alike.
        document_starts: (B, T) bool, real tokens that begin a document in a row that has read another, or None.
    """
    if mask is None:
        return _alike_rows(options, shape, count, kept, position_embeddings)
    tokens = _locate(options.segment_length, shape, count, mask, document_starts)
    facts = _facts(tokens, options.segment_length, options.chunk_size)
    lengths = tuple(fact.length for fact in facts)
    columns, place = _columns(tokens, lengths)
    masks = (columns < shape[1]).split(lengths, 1)
    cos_sin = [take_or_zero([t.expand(shape[0], -1, -1)], columns).split(lengths, 1) for t in position_embeddings]
    pieces, num_kept = [], _places(num_kept, options.segment_length)
    for n, fact in enumerate(facts):
        before = tokens.before[:, n]
        if fact.restarts:
            kept = kept.restart(tokens.restart[:, n])
        memory, kept = options.memory(before, kept, tuple(masks[n].shape), mask.device, masks[n])
        pieces.append(
            SegmentPiece(
                masks[n],
                tokens.restart[:, n] if fact.restarts else None,
                tokens.closed[:, n] if fact.closes else False,
                memory,
                options.attention(masks[n].shape, mask.device, before, num_kept, fact.num_kept, memory),
                tuple(t[n] for t in cos_sin),
            )
        )
        num_kept = fact.num_kept
    return SegmentPlan(tuple(pieces), lengths, columns, place)


def _places(num_kept: int, segment_length: int) -> int:
    """Places for kept keys where rows differ: in steps, so that rows are computed alike whatever is beside them."""
    return min(round_up(max(num_kept, 1), PLACES), segment_length - 1)


class _Tokens(NamedTuple):
    """Where the tokens of rows that differ belong.

    Attributes:
        piece, index: (B, T) piece of each column, and place in it.
        mask: (B, T) real tokens.
        number: (B, N) tokens in each piece.
        before: (B, N) tokens in the open segment when the piece begins.
        restart: (B, N) pieces with which a document begins.
        closed: (B, N) pieces with which a segment ends.
    """

    piece: torch.Tensor
    index: torch.Tensor
    mask: torch.Tensor
    number: torch.Tensor
    before: torch.Tensor
    restart: torch.Tensor
    closed: torch.Tensor


def _locate(segment_length: int, shape, count: int | torch.Tensor, mask, document_starts) -> _Tokens:
    documents = TokenDocuments.count(mask, document_starts)
    most = count if isinstance(count, int) else segment_length - 1
    count = torch.full_like(documents.rank[:, 0], count) if isinstance(count, int) else count
    first = torch.arange(documents.length.shape[1], device=mask.device) == 0
    pieces = -(-(documents.length + first * count[:, None]) // segment_length) * (documents.length > 0)
    num_pieces = -(-(most + shape[1]) // segment_length)
    if documents.length.shape[1] > 1:
        num_pieces = max(int(pieces.sum(1).max()), 1)
    base = exclusive_cumsum(pieces)
    offset = documents.rank_in_document() + torch.where(documents.index == 0, count[:, None], 0)
    piece = (base.gather(1, documents.index) + offset // segment_length).masked_fill(~mask, 0)
    # What the open segment holds already takes no place in its piece.
    taken = torch.where((documents.index == 0) & (offset < segment_length), count[:, None], 0)
    number = torch.zeros_like(mask[:, :1], dtype=torch.long).repeat(1, num_pieces).scatter_add_(1, piece, mask.long())
    begins = base.masked_fill(first | (documents.length == 0), num_pieces)
    restart = mask.new_zeros(shape[0], num_pieces + 1).scatter_(1, begins, True)[:, :-1]
    before, closed = [], []
    for n in range(num_pieces):
        before.append(torch.where(restart[:, n], 0, count))
        count = before[-1] + number[:, n]
        closed.append(count == segment_length)
        count = count % segment_length
    tables = (torch.stack(table, 1) for table in (before, closed))
    return _Tokens(piece, offset % segment_length - taken, mask, number, next(tables), restart, next(tables))


class _Fact(NamedTuple):
    """What decides which code runs: a piece's columns, and places for kept keys behind it, and whether any row
    begins a document, or ends a segment, with it."""

    length: int
    num_kept: int
    restarts: bool
    closes: bool


def _facts(tokens: _Tokens, segment_length: int, chunk_size: int) -> list[_Fact]:
    """For each piece; with one wait for the device. A trace cannot wait and makes room for everything.

    Lengths are whole chunks, or the call's own: few different shapes, and the memory works on whole chunks anyway.
    """
    if torch.compiler.is_compiling():
        length = min(segment_length, tokens.mask.shape[1])
        return [_Fact(length, segment_length - 1, True, True)] * tokens.number.shape[1]
    behind = (tokens.before + tokens.number) % segment_length
    tables = (tokens.number, behind, tokens.restart.long(), tokens.closed.long())
    table = torch.stack([t.amax(0) for t in tables], 1).tolist()
    # A piece that no row needs is there because its number was not waited for.
    most, facts = min(segment_length, tokens.mask.shape[1]), []
    for length, kept, restarts, closes in table:
        if length or not facts:
            length = min(round_up(max(length, 1), chunk_size), most)
            facts.append(_Fact(length, _places(kept, segment_length), bool(restarts), bool(closes)))
    return facts


def _columns(tokens: _Tokens, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SegmentPlan`."""
    begin = torch.tensor([0, *lengths], device=tokens.mask.device).cumsum(0)
    place = (begin[tokens.piece] + tokens.index).masked_fill(~tokens.mask, sum(lengths))
    return columns_by_place(place, sum(lengths)), place


def _alike_rows(options: SegmentOptions, shape, count: int, kept: KeptCounts, position_embeddings) -> SegmentPlan:
    pieces, lengths, layouts, begin = [], [], {}, 0
    device = position_embeddings[0].device
    while begin < shape[1]:
        # Decided by comparisons: in a trace min() of a count is a symbol, which attention does not take for a length.
        rest, left = shape[1] - begin, options.segment_length - count
        end = shape[1] if rest <= left else begin + left
        closed = False if rest < left else True
        # Whole segments are all alike, and so are their masks.
        key = "whole" if closed and begin else begin
        if key not in layouts:
            layouts[key] = options.attention((shape[0], end - begin), device, count, count)
        cos_sin = tuple(t[:, begin:end] for t in position_embeddings)
        memory, kept = options.memory(count, kept, (shape[0], end - begin), device)
        pieces.append(SegmentPiece(None, None, closed, memory, layouts[key], cos_sin))
        lengths.append(end - begin)
        begin, count = end, 0
    return SegmentPlan(tuple(pieces), tuple(lengths), None, None)
