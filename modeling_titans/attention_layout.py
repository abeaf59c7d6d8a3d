# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Which keys each token of a call may see: the sliding window, or the open segment, of its own document.

Distances are counted in real tokens of one document, whatever padding lies between them, and whichever call a key
came with. Keys of earlier calls are *kept*, the last ones of a row's document, right-aligned in front of the call's
columns; a row that has kept fewer has empty places on the left.

Shapes: B rows, T columns of the call, K places for kept keys, W keys in a window, P persistent tokens.
"""

from dataclasses import dataclass

import torch

from .token_layout import TensorTable, TokenDocuments, columns_by_place, take, take_or_zero


FLASH = ("flash_attention_2", "flash_attention_3")
# Implementations that take a mask of numbers to add to the scores; the others take True for visible.
ADDITIVE = ("eager", "flex_attention")
# Queries of a segment that sdpa is given at once: no key behind them need be read.
QUERIES = 128


@dataclass(frozen=True)
class Blocks(TensorTable):
    """A long call cut into blocks of W tokens, each of which sees its own and the previous block's keys only.

    Attributes:
        size: W.
        number: N blocks.
        source: (B, N * W) column of each real token in order, T where there is none; None: columns as they stand.
        place: (B, T) each column's place among them; None likewise.
    """

    size: int
    number: int
    source: torch.Tensor | None
    place: torch.Tensor | None


@dataclass(frozen=True)
class Sequences(TensorTable):
    """A call as the flat sequences that flash-attn takes, one per row and document.

    Attributes:
        queries, keys: indices of the real ones among B * T and B * (K + T); None: all of them.
        cu_queries, cu_keys: (sequences + 1,) int32 borders.
        max_queries, max_keys: length of the longest.
        total: (2,) int32, 0 and the number of queries: one sequence of them all.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int
    total: torch.Tensor


@dataclass(frozen=True)
class AttentionLayout(TensorTable):
    """The attention of one call, shared by all layers.

    Attributes:
        window: W keys that a token sees, its own included.
        count: kept keys: an int if it is the same in every row (then K == count), else (B,).
        mask: (B, T) real tokens, or None if all are.
        attention_mask: what the implementation is given: (B or 1, 1, T, keys), or with blocks (B * N, 1, W, keys), for
            rows that are alike (N, 1, W, keys), or None for flash-attn. The keys are persistent tokens, then kept and
            new keys; where there are retrieved tokens beside them each of ``parts`` is there twice. None also for sdpa
            where all keys are visible: to a single token of rows that are alike.
        blocks, sequences: for the implementations that need them.
        parts: lengths, of K + T in all. With several, kept keys are in the first one, and the new ones of each part
            are read by its own and later parts' queries only.
        num_kept: K.
        kept_source: (B, K') places in [kept, columns, one of zeros] of the keys to keep; None: the last ones.
        kept_count: their number, as ``count``.
    """

    window: int
    count: int | torch.Tensor
    num_kept: int
    mask: torch.Tensor | None
    attention_mask: torch.Tensor | None
    blocks: Blocks | None
    sequences: Sequences | None
    parts: tuple[int, ...]
    kept_source: torch.Tensor | None
    kept_count: int | torch.Tensor

    @classmethod
    def build(
        cls,
        shape: tuple[int, int],
        device,
        *,
        window: int,
        implementation: str,
        num_persistent: int,
        count: int | torch.Tensor = 0,
        num_kept: int = 0,
        kept_later: int = 0,
        mask: torch.Tensor | None = None,
        documents: TokenDocuments | None = None,
        is_segment: bool = False,
    ) -> "AttentionLayout":
        """Lays out a call.

        Args:
            shape: (B, T).
            device: where to put what is made here.
            window: W >= 1.
            implementation: name of the attention implementation that will use the layout.
            num_persistent: P persistent tokens in front of the keys.
            count: kept keys of each row.
            num_kept: K places for them.
            kept_later: places for the keys kept behind the call, if rows differ.
            mask: (B, T) bool real tokens; needed, with their ``documents``, if ``count`` differs between rows.
            documents: document of each token.
            is_segment: whether W tokens are a segment, at whose end everything kept is dropped. Then T tokens, at most
                W with the kept ones, are all of one document, and the keys are there twice.
        """
        sees_all = implementation == "sdpa" and mask is None and shape[1] == 1
        if mask is not None:
            rows = _Rows.of(mask, documents, window, count, num_kept)
        elif not sees_all:
            rows = _Rows.alike(shape, device, window, count)
        blocks, sequences, attention_mask = None, None, None
        parts = (num_kept + shape[1],)
        if is_segment and implementation == "sdpa" and not torch.compiler.is_compiling():
            parts = _parts(num_kept, shape[1])
        if implementation in FLASH:
            sequences = rows.sequences()
        elif not sees_all:
            if implementation != "eager" and shape[1] > window:
                blocks = rows.blocks()
            visible = rows.visible() if blocks is None else rows.visible_in(blocks)
            if is_segment:
                visible = torch.cat(interleave(visible, visible, parts, -1), -1)
            prefix = visible.new_ones(*visible.shape[:-1], num_persistent)
            attention_mask = torch.cat([prefix, visible], -1).unsqueeze(1)
            if implementation in ADDITIVE:
                attention_mask = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(
                    ~attention_mask, float("-inf")
                )
                if blocks is None:
                    attention_mask = attention_mask.expand(shape[0], -1, -1, -1)
        if mask is None:
            total = num_kept + shape[1]
            source, kept = None, total % window if is_segment else min(total, window - 1)
        else:
            source, kept = rows.kept(is_segment, kept_later)
        return cls(window, count, num_kept, mask, attention_mask, blocks, sequences, parts, source, kept)

    def keep(self, keys: torch.Tensor) -> torch.Tensor:
        """(B, heads, K + T, D) kept and new keys or values -> (B, heads, K', D): those that later calls need."""
        if self.kept_source is None:
            return keys[:, :, keys.shape[2] - self.kept_count :]
        return take_or_zero([keys.transpose(1, 2)], self.kept_source).transpose(1, 2)


@dataclass(frozen=True)
class _Rows:
    """Kept keys and columns of all rows: for each its document, place in its row, and whether it is there.

    Attributes:
        shape: (B, T).
        window, num_kept: W, K.
        rank: (B or 1, K + T) real tokens before this one in the row, negative for kept ones.
        index: (B or 1, K + T) document of each; 0 is the one that the kept keys belong to.
        real: (B or 1, K + T).
        documents, count: as given, None for rows that are alike.
    """

    shape: tuple[int, int]
    window: int
    num_kept: int
    rank: torch.Tensor
    index: torch.Tensor
    real: torch.Tensor
    documents: TokenDocuments | None
    count: int | torch.Tensor

    @classmethod
    def alike(cls, shape, device, window: int, count: int) -> "_Rows":
        rank = torch.arange(-count, shape[1], device=device)[None]
        return cls(shape, window, count, rank, torch.zeros_like(rank), torch.ones_like(rank).bool(), None, count)

    @classmethod
    def of(cls, mask, documents: TokenDocuments, window: int, count, num_kept: int) -> "_Rows":
        count = torch.full_like(documents.rank[:, 0], count) if isinstance(count, int) else count
        kept = torch.arange(-num_kept, 0, device=mask.device).expand(mask.shape[0], -1)
        rank = torch.cat([kept, documents.rank], 1)
        index = torch.cat([torch.zeros_like(kept), documents.index], 1)
        real = torch.cat([kept >= -count[:, None], mask], 1)
        return cls(tuple(mask.shape), window, num_kept, rank, index, real, documents, count)

    def visible(self) -> torch.Tensor:
        """(B or 1, T, K + T)."""
        queries = slice(self.num_kept, None)
        return self._sees(self.rank[:, queries], self.index[:, queries], self.rank, self.index, self.real)

    def _sees(self, rank, index, key_rank, key_index, key_real) -> torch.Tensor:
        # In 32 bits, since this is the largest table of a long call.
        rank, key_rank, index, key_index = (t.to(torch.int32) for t in (rank, key_rank, index, key_index))
        distance = rank[..., :, None] - key_rank[..., None, :]
        same = (index[..., :, None] == key_index[..., None, :]) & key_real[..., None, :]
        # A column without a token sees itself: a softmax over nothing is not a number.
        width, length = rank.shape[-1], key_rank.shape[-1]
        itself = torch.ones(width, length, dtype=torch.bool, device=rank.device)
        itself = itself.tril(length - width).triu(length - width)
        return ((distance >= 0) & (distance < self.window) & same) | itself

    def blocks(self) -> Blocks:
        size = self.window
        number = -(-self.shape[1] // size)
        if self.documents is None:
            return Blocks(size, number, None, None)
        place = torch.where(self.real[:, self.num_kept :], self.documents.rank, number * size)
        return Blocks(size, number, columns_by_place(place, number * size), place)

    def visible_in(self, blocks: Blocks) -> torch.Tensor:
        """(B * N, W, 2 W), or (N, W, 2 W) for rows that are alike."""
        rank, index, real = (
            self._in_blocks(t, blocks, fill) for t, fill in ((self.rank, -1), (self.index, -1), (self.real, False))
        )
        own = slice(blocks.size, None)
        return self._sees(rank[..., own], index[..., own], rank, index, real).flatten(0, 1)

    def _in_blocks(self, t: torch.Tensor, blocks: Blocks, fill) -> torch.Tensor:
        """(B or 1, K + T) -> (B or 1, N, 2 W): each block's own keys behind the previous block's."""
        kept, columns = t[:, : self.num_kept], t[:, self.num_kept :]
        left = t.new_full((t.shape[0], blocks.size - self.num_kept), fill)
        right = t.new_full((t.shape[0], blocks.number * blocks.size - self.shape[1]), fill)
        if blocks.source is not None:
            columns = take(torch.cat([columns, t.new_full((t.shape[0], 1), fill)], 1), blocks.source)
            right = right[:, :0]
        return torch.cat([left, kept, columns, right], 1).unfold(1, 2 * blocks.size, blocks.size)

    def sequences(self) -> Sequences:
        batch_size, num_columns = self.shape
        device = self.rank.device
        if self.documents is None:
            length = torch.full((batch_size,), num_columns, device=device)
            keys = length + self.num_kept
            longest, queries, places = (num_columns, num_columns + self.num_kept), None, None
        else:
            first = torch.arange(self.documents.length.shape[1], device=device) == 0
            length = self.documents.length
            keys = (length + first * self.count[:, None]).flatten()
            length = length.flatten()
            longest = (int(length.max()), int(keys.max()))
            queries = self.real[:, self.num_kept :].flatten().nonzero().squeeze(1)
            places = self.real.flatten().nonzero().squeeze(1)
        cu_queries, cu_keys = (_borders(t) for t in (length, keys))
        return Sequences(queries, places, cu_queries, cu_keys, *longest, cu_queries[[0, -1]])

    def kept(self, is_segment: bool, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows that differ: where the keys to keep stand, in ``width`` places, and how many they are."""
        last = self.documents.index[:, -1:]
        total = self.documents.length.gather(1, last).squeeze(1) + torch.where(last[:, 0] == 0, self.count, 0)
        count = total % self.window if is_segment else total.clamp(max=self.window - 1)
        num_columns, device = self.shape[1], self.rank.device
        # The k-th from last real token of the row is a column of this call, or a key kept before it.
        rank = self.documents.length.sum(1, keepdim=True) - torch.arange(width, 0, -1, device=device)
        place = torch.where(self.real[:, self.num_kept :], self.documents.rank, num_columns)
        new = self.num_kept + columns_by_place(place, num_columns).gather(1, rank.clamp(0, num_columns - 1))
        source = torch.where(rank >= 0, new, self.num_kept + rank)
        exists = torch.arange(width, 0, -1, device=device) <= count[:, None]
        return torch.where(exists, source, self.num_kept + num_columns), count


def interleave(one: torch.Tensor, other: torch.Tensor, parts: tuple[int, ...], dim: int) -> list[torch.Tensor]:
    """The first ``parts[0]`` places of ``one`` along ``dim``, those of ``other``, the next ``parts[1]``, and so on."""
    pairs = zip(one.split(parts, dim), other.split(parts, dim), strict=True)
    return [part for pair in pairs for part in pair]


def _parts(num_kept: int, num_columns: int) -> tuple[int, ...]:
    """K kept and T new keys, cut at every `QUERIES` of the latter."""
    begins = range(0, num_columns, QUERIES)
    lengths = [min(QUERIES, num_columns - begin) for begin in begins]
    return num_kept + lengths[0], *lengths[1:]


def _borders(length: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(length.cumsum(0), (1, 0)).to(torch.int32)
