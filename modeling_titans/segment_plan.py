# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts a call at the ends of segments, which each row counts in its own real tokens, document by document.

A *piece* holds, of each row, the tokens of one segment of one document; the pieces are read one after another
(Titans, section 4.1). A call that ends inside a segment leaves it open, and the next call goes on there.
"""

from dataclasses import dataclass

import torch

from .attention_layout import AttentionLayout
from .token_layout import TensorTable, TokenDocuments, TokenLayout, exclusive_cumsum, take


@dataclass(frozen=True)
class SegmentPiece(TensorTable):
    """One piece.

    Attributes:
        begin, end: its columns, where all rows are alike.
        columns: (B, n) columns of each row's tokens, T where there is none; None where all rows are alike.
        restart: (B,) rows in which a document begins with this piece, or None if there can be none.
        closed: whether a segment ends with this piece: a bool for all rows, or (B,).
        memory, attention: the piece's layouts.
        position_embeddings: cos and sin, (B or 1, n, D) each.
    """

    begin: int
    end: int
    columns: torch.Tensor | None
    restart: torch.Tensor | None
    closed: bool | torch.Tensor
    memory: TokenLayout
    attention: AttentionLayout
    position_embeddings: tuple[torch.Tensor, torch.Tensor]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, n, C), zeros where there is no token."""
        if self.columns is None:
            return x[:, self.begin : self.end]
        return take(torch.cat([x, torch.zeros_like(x[:, :1])], 1), self.columns)


@dataclass(frozen=True)
class SegmentPlan(TensorTable):
    """The pieces of a call, and for each column its place among all pieces' tokens, or None where it is the same."""

    pieces: tuple[SegmentPiece, ...]
    place: torch.Tensor | None

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The pieces' results (B, n, ...) -> (B, T, ...), zeros at masked columns."""
        if self.place is None:
            return torch.cat(pieces, 1)
        return take(torch.cat([*pieces, torch.zeros_like(pieces[0][:, :1])], 1), self.place)


@dataclass(frozen=True)
class SegmentOptions:
    """What does not change from call to call: see `TitansConfig` and `AttentionLayout.build`."""

    segment_length: int
    chunk_size: int
    num_persistent: int
    implementation: str

    def piece(self, shape, count, mask, documents, position_embeddings, **kwargs) -> SegmentPiece:
        attention = AttentionLayout.build(
            shape,
            position_embeddings[0].device,
            window=self.segment_length,
            implementation=self.implementation,
            num_persistent=self.num_persistent,
            count=count,
            mask=mask,
            documents=documents,
            is_segment=True,
        )
        memory = TokenLayout.build(mask, count=count % self.chunk_size, chunk_size=self.chunk_size)
        return SegmentPiece(memory=memory, attention=attention, position_embeddings=position_embeddings, **kwargs)


def plan_segments(
    options: SegmentOptions,
    shape: tuple[int, int],
    count: int | torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
) -> SegmentPlan:
    """Plans a call.

    Args:
        options: lengths.
        shape: (B, T).
        count: tokens in each row's open segment, an int if all rows are alike, else (B,).
        position_embeddings: cos and sin of the columns, (B or 1, T, D) each.
        mask: (B, T) bool real tokens; None if all rows are alike.
        document_starts: (B, T) bool, real tokens that begin a document in a row that has read another, or None.
    """
    if mask is None:
        return _alike_rows(options, shape, count, position_embeddings)
    num_columns = shape[1]
    count = torch.full_like(mask[:, 0], count, dtype=torch.long) if isinstance(count, int) else count
    documents = TokenDocuments.count(mask, document_starts)
    first = torch.arange(documents.length.shape[1], device=mask.device) == 0
    length = documents.length + first * count[:, None]
    pieces = -(-length // options.segment_length) * (documents.length > 0)
    number = -(-(options.segment_length - 1 + num_columns) // options.segment_length)
    if documents.length.shape[1] > 1:
        number = max(int(pieces.sum(1).max()), 1)
    base = exclusive_cumsum(pieces)
    offset = documents.rank_in_document() + torch.where(documents.index == 0, count[:, None], 0)
    piece = base.gather(1, documents.index) + offset // options.segment_length
    # What the open segment holds already takes no place in its piece.
    begins = torch.where((documents.index == 0) & (offset < options.segment_length), count[:, None], 0)
    width = min(options.segment_length, num_columns)
    place = (piece * width + offset % options.segment_length - begins).masked_fill(~mask, number * width)
    columns = torch.full((mask.shape[0], number * width + 1), num_columns, device=mask.device)
    columns.scatter_(1, place, torch.arange(num_columns, device=mask.device).expand_as(place))
    columns = columns[:, :-1].unflatten(1, (number, width))
    restart = None
    if documents.length.shape[1] > 1:
        begins = base.masked_fill(first | (documents.length == 0), number)
        restart = mask.new_zeros(mask.shape[0], number + 1).scatter_(1, begins, True)[:, :-1]
    return SegmentPlan(_ragged_pieces(options, columns, num_columns, count, restart, position_embeddings), place)


def _alike_rows(options: SegmentOptions, shape, count: int, position_embeddings) -> SegmentPlan:
    pieces, begin = [], 0
    while begin < shape[1]:
        # Decided by comparisons: in a trace min() of a count is a symbol, which attention does not take for a length.
        rest, left = shape[1] - begin, options.segment_length - count
        end = shape[1] if rest <= left else begin + left
        closed = False if rest < left else True
        cos_sin = tuple(t[:, begin:end] for t in position_embeddings)
        facts = {"begin": begin, "end": end, "columns": None, "restart": None, "closed": closed}
        pieces.append(options.piece((shape[0], end - begin), count, None, None, cos_sin, **facts))
        begin, count = end, 0
    return SegmentPlan(tuple(pieces), None)


def _ragged_pieces(options, columns, num_columns, count, restart, position_embeddings) -> tuple[SegmentPiece, ...]:
    """``columns`` (B, N, n), ``restart`` (B, N) or None."""
    pieces = []
    cos_sin = [t.expand(columns.shape[0], -1, -1) for t in position_embeddings]
    cos_sin = [torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in cos_sin]
    for n in range(columns.shape[1]):
        restarts = None if restart is None else restart[:, n]
        count = count if restarts is None else torch.where(restarts, 0, count)
        mask = columns[:, n] < num_columns
        documents = TokenDocuments.count(mask, None)
        read = count + mask.sum(1)
        # A segment is closed once: a row that has no token here has nothing to close.
        closed = (read == options.segment_length) & mask.any(1)
        facts = {"begin": 0, "end": 0, "columns": columns[:, n], "restart": restarts, "closed": closed}
        taken = tuple(take(t, columns[:, n]) for t in cos_sin)
        pieces.append(options.piece(tuple(mask.shape), count, mask, documents, taken, **facts))
        count = read % options.segment_length
    return tuple(pieces)
