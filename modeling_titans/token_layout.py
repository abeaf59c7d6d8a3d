# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Where each token of a call goes when rows are padded, packed, or at different places in their chunk.

A memory counts chunks in each row's own real tokens, from the start of the row's document. The tables here move the
real tokens of a call to *slots* in which that is literally so: slot 0 of a row is the first token of its open chunk,
chunks are ``chunk_size`` neighbouring slots, and a new document begins on a new chunk. Code that works on slots needs
no mask: within a chunk real tokens come first, and nothing behind the last of them is ever written or read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class TensorTable:
    """Base of the index tables: they follow their tensors to the device on which a layer runs."""

    def to(self, device, **kwargs):
        def move(value):
            if isinstance(value, tuple):
                return tuple(move(v) for v in value)
            return value.to(device, **kwargs) if hasattr(value, "to") else value

        return type(self)(**{f.name: move(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class TokenDocuments(TensorTable):
    """Tokens counted by row and document; document 0 is the one that a row's state already belongs to."""

    rank: torch.Tensor  # (B, T) number of real tokens before this one in its row
    index: torch.Tensor  # (B, T) document of each token
    length: torch.Tensor  # (B, documents) real tokens of each document in this call

    @classmethod
    def count(cls, mask: torch.Tensor, document_starts: torch.Tensor | None) -> "TokenDocuments":
        rank = mask.long().cumsum(1) - 1
        if document_starts is None:
            return cls(rank, torch.zeros_like(rank), mask.long().sum(1, keepdim=True))
        index = (document_starts & mask).long().cumsum(1)
        # The number of documents sizes a table, hence this one wait for the device (only where documents are packed).
        num_documents = int(index.max()) + 1
        length = rank.new_zeros(mask.shape[0], num_documents).scatter_add_(1, index, mask.long())
        return cls(rank, index, length)

    def rank_in_document(self) -> torch.Tensor:
        """(B, T) number of this call's real tokens before this one in its document."""
        return self.rank - exclusive_cumsum(self.length).gather(1, self.index)


@dataclass(frozen=True)
class SlotTable(TensorTable):
    """Moves columns (B, T) to chunk slots (B, N * chunk_size) and back.

    Attributes:
        slot: (B, T) slot of each column; a masked column has the slot behind the last one.
        source: (B, S) for each slot its place in [pending, columns, one column of zeros].
        full: (B, N) chunks that end inside this call, whose update takes place.
        restart: (B, N) chunks that begin a new document, or None if there is none.
        restart_at: the chunks in which that is so in any row.
        pending_slot: (B, chunk_size - 1) slots of the open chunk's tokens; ``pending_real`` says which exist.
        count: (B,) tokens pending after the call.
        stays_open: whether it is known that no chunk ends, and no document begins, inside this call.
    """

    slot: torch.Tensor
    source: torch.Tensor
    full: torch.Tensor
    restart: torch.Tensor | None
    restart_at: frozenset[int]
    pending_slot: torch.Tensor
    pending_real: torch.Tensor
    count: torch.Tensor
    stays_open: bool

    @classmethod
    def build(cls, mask: torch.Tensor, documents: TokenDocuments, count: int | torch.Tensor, chunk_size: int):
        batch_size, num_columns = mask.shape
        width = count if isinstance(count, int) else chunk_size - 1
        count = torch.full_like(documents.rank[:, 0], count) if isinstance(count, int) else count
        first = torch.arange(documents.length.shape[1], device=mask.device) == 0
        length = documents.length + first * count[:, None]
        base = exclusive_cumsum(round_up(length, chunk_size))
        last = documents.index[:, -1:]
        total = (base.gather(1, last) + length.gather(1, last)).squeeze(1)
        if documents.length.shape[1] == 1:
            num_slots = round_up(width + num_columns, chunk_size)
        else:
            num_slots = max(round_up(int(total.max()), chunk_size), chunk_size)
        offset = documents.rank_in_document() + torch.where(documents.index == 0, count[:, None], 0)
        slot = (base.gather(1, documents.index) + offset).masked_fill(~mask, num_slots)

        zeros_at = width + num_columns
        source = torch.full((batch_size, num_slots + 1), zeros_at, device=mask.device)
        pending = torch.arange(width, device=mask.device).expand(batch_size, width)
        source.scatter_(1, pending.masked_fill(pending >= count[:, None], num_slots), pending)
        source.scatter_(1, slot, torch.arange(width, zeros_at, device=mask.device).expand_as(slot))
        source = source[:, :num_slots]
        full = (source != zeros_at).view(batch_size, -1, chunk_size).all(-1)

        restart, restart_at = None, frozenset()
        if documents.length.shape[1] > 1:
            restart = full.new_zeros(batch_size, full.shape[1] + 1)
            begins = (base // chunk_size).masked_fill((documents.length == 0) | first, full.shape[1])
            restart = restart.scatter_(1, begins, True)[:, :-1]
            restart_at = frozenset(torch.nonzero(restart.any(0)).flatten().tolist())

        # One wait for the device, where it may spare every layer a copy of its weights; a trace cannot wait.
        may_stay = restart is None and num_columns < chunk_size and not torch.compiler.is_compiling()
        stays_open = may_stay and not bool(full.any())
        left = total % chunk_size
        ahead = torch.arange(chunk_size - 1, device=mask.device)
        pending_slot = ((total - left)[:, None] + ahead).clamp(max=num_slots - 1)
        return cls(slot, source, full, restart, restart_at, pending_slot, ahead < left[:, None], left, stays_open)

    def to_slots(self, pending: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """(B, P, ...) and (B, T, ...) -> (B, S, ...); empty slots are zero."""
        return take_or_zero([pending, columns], self.source)

    def to_columns(self, slots: torch.Tensor) -> torch.Tensor:
        """(B, S, ...) -> (B, T, ...); masked columns are zero."""
        return take_or_zero([slots], self.slot)

    def open_chunk(self, slots: torch.Tensor) -> torch.Tensor:
        """(B, S, ...) -> (B, chunk_size - 1, ...): the tokens of the chunk that stays open."""
        real = self.pending_real.view(*self.pending_real.shape, *(1,) * (slots.dim() - 2))
        return torch.where(real, take(slots, self.pending_slot), 0)


@dataclass(frozen=True)
class TokenLayout(TensorTable):
    """The layout of one call, shared by all layers.

    Attributes:
        chunk_size: tokens per chunk.
        count: tokens pending before the call, as in `MemoryState`.
        mask: (B, T) which tokens are real, or None if all are.
        document_starts: (B, T) real tokens that begin a document in a row that has read another one, or None.
        slots: the table, or None if all rows are alike: every token real, one document, the same count.
        kept: the `KeptPlan` of a memory with caching, else None.
    """

    chunk_size: int
    count: int | torch.Tensor
    mask: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    slots: SlotTable | None = None
    documents: TokenDocuments | None = None
    kept: TensorTable | None = None

    @classmethod
    def build(
        cls,
        attention_mask: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
        *,
        count: int | torch.Tensor = 0,
        chunk_size: int,
        shape: tuple[int, int] | None = None,
    ) -> "TokenLayout":
        """Lays out a call.

        Args:
            attention_mask: (B, T), nonzero where a token is real.
            document_starts: (B, T) bool, the real tokens before which the row goes back to its start state.
            count: tokens pending in the state (`MemoryState.count`).
            chunk_size: the memory's chunk length, >= 1.
            shape: (B, T), needed only if neither mask nor starts are given but ``count`` differs between rows.

        Raises:
            ValueError: if the shapes do not agree.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
        if attention_mask is None and document_starts is None and isinstance(count, int):
            return cls(chunk_size, count)
        given = [t for t in (attention_mask, document_starts) if t is not None]
        if not given and shape is None:
            raise ValueError("shape is needed where count differs between rows and neither mask nor starts are given")
        shape = tuple(given[0].shape) if given else shape
        if len(shape) != 2 or any(tuple(t.shape) != shape for t in given):
            shapes = [tuple(t.shape) for t in given]
            raise ValueError(f"attention_mask and document_starts must be (B, T) alike, got {shapes}")
        if isinstance(count, torch.Tensor) and tuple(count.shape) != shape[:1]:
            raise ValueError(f"count must be an int or (B,) = {shape[:1]}, got {tuple(count.shape)}")
        if attention_mask is None:
            reference = document_starts if document_starts is not None else count
            attention_mask = torch.ones(shape, dtype=torch.bool, device=reference.device)
        mask = attention_mask.bool()
        document_starts = None if document_starts is None else document_starts.bool()
        documents = TokenDocuments.count(mask, document_starts)
        slots = SlotTable.build(mask, documents, count, chunk_size)
        return cls(chunk_size, count, mask, document_starts, slots, documents)


def convolution_inputs(
    x: torch.Tensor, tail: torch.Tensor, start_tail: torch.Tensor | None, layout: TokenLayout
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Puts in front of each document the inputs that a causal convolution sees there.

    Args:
        x: (B, T, C) inputs of this call.
        tail: (B, K - 1, C) each row's last real inputs before this call.
        start_tail: (1, K - 1, C) what a new document finds in front of it; needed if the layout has document starts.
        layout: the call's layout.

    Returns:
        The inputs (B, S, C) for a convolution without padding; for each column its place in the convolution's output
        (B, T), or None for "the same place"; and the tail (B, K - 1, C) after this call.
    """
    reach = tail.shape[1]
    if layout.slots is None:
        inputs = torch.cat([tail, x], 1)
        return inputs, None, inputs[:, inputs.shape[1] - reach :]
    documents, mask = layout.documents, layout.mask
    num_documents = documents.length.shape[1]
    if x.shape[1] == num_documents == 1:
        inputs = torch.cat([tail, x], 1)
        return inputs, None, torch.where(mask[:, :, None], inputs[:, 1:], tail)
    # Every document, empty or not, takes `reach` slots for its tail in front of its tokens.
    place = documents.rank + reach * documents.index
    num_slots = x.shape[1] + reach * num_documents
    source = torch.full((x.shape[0], num_slots + 1), 2 * reach, device=x.device)
    tails = exclusive_cumsum(documents.length) + reach * torch.arange(num_documents, device=x.device)
    for j in range(reach):
        source.scatter_(1, tails + j, reach + j)
        source[:, j] = j
    columns = torch.arange(2 * reach + 1, 2 * reach + 1 + x.shape[1], device=x.device).expand_as(place)
    source.scatter_(1, (place + reach).masked_fill(~mask, num_slots), columns)
    if start_tail is None:
        start_tail = torch.zeros_like(tail[:1])
    parts = [tail, start_tail.expand(x.shape[0], -1, -1), torch.zeros_like(x[:, :1]), x]
    inputs = take(torch.cat(parts, 1), source[:, :num_slots])
    tail_begins = documents.length.sum(1) + reach * documents.index[:, -1]
    after = take(inputs, tail_begins[:, None] + torch.arange(reach, device=x.device))
    return inputs, torch.where(mask, place, 0), after


def take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values (B, S, ...), index (B, T) -> (B, T, ...)."""
    rows = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[rows, index]


def take_or_zero(parts: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """As `take`, of the parts (B, ., ...) behind one another; an index behind the last one gives zero."""
    shape = parts[0].shape
    if not index.shape[1]:
        return parts[0][:, :0]
    return take(torch.cat([*parts, parts[0].new_zeros(shape[0], 1, *shape[2:])], 1), index)


def columns_by_place(place: torch.Tensor, number: int) -> torch.Tensor:
    """place (B, T) of each column -> (B, number) the column at each place, T where there is none.

    A column that has no place says ``number``.
    """
    batch_size, num_columns = place.shape
    columns = torch.full((batch_size, number + 1), num_columns, device=place.device)
    columns.scatter_(1, place, torch.arange(num_columns, device=place.device).expand_as(place))
    return columns[:, :-1]


def exclusive_cumsum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1) - x


def round_up(x, multiple: int):
    return (x + multiple - 1) // multiple * multiple
