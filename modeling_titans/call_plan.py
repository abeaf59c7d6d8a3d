# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the columns of one forward call are: which are real tokens, where documents begin, at which position."""

from typing import NamedTuple

import torch


class Progress(NamedTuple):
    """How far each row has been read.

    Attributes:
        seen: (B,) real tokens read.
        position: (B,) position of the last one, -1 before any.
    """

    seen: torch.Tensor
    position: torch.Tensor

    @classmethod
    def start(cls, batch_size: int, device) -> "Progress":
        seen = torch.zeros(batch_size, dtype=torch.long, device=device)
        return cls(seen, seen - 1)


class Columns(NamedTuple):
    """What a call's columns are.

    Attributes:
        mask: (B, T) real tokens.
        document_starts: (B, T) those of them that begin a document in a row that has read another one.
        position: (B, T).
        may_restart: whether anything was given by which a document can start.
        may_pad: whether anything was given by which a column can be padding.
    """

    mask: torch.Tensor
    document_starts: torch.Tensor
    position: torch.Tensor
    may_restart: bool = True
    may_pad: bool = True

    @property
    def are_plain(self) -> bool:
        """Whether it is known, without a look at any tensor, that all are tokens and none begins a document."""
        return not (self.may_restart or self.may_pad)

    def part(self, at: slice) -> "Columns":
        """The columns at ``at`` alone."""
        return self._replace(
            mask=self.mask[:, at], document_starts=self.document_starts[:, at], position=self.position[:, at]
        )

    def followed_by(self, later: "Columns") -> "Columns":
        """These columns and those of the next call as one."""
        mask, starts, position = (torch.cat(pair, 1) for pair in zip(self[:3], later[:3], strict=True))
        may = (one or other for one, other in zip(self[3:], later[3:], strict=True))
        return Columns(mask, starts, position, *may)

    def advance(self, progress: Progress) -> Progress:
        """The rows' progress behind these columns."""
        if not self.may_pad:
            return Progress(progress.seen + self.mask.shape[1], self.position[:, -1].clone())
        last = _last_real(self.mask)[:, -1]
        position = self.position.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
        return Progress(progress.seen + self.mask.sum(1), torch.where(last >= 0, position, progress.position))

    def exceptions(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(mask, document_starts), each None if there is no padding, or no document's start.

        Whether all columns are plain decides which code runs, hence one wait for the device. A traced graph cannot
        wait: it takes the code for padding, in which nothing depends on how full a chunk or segment is, and the code
        for documents if one can start at all.
        """
        mask, starts = self.mask, self.document_starts
        if torch.compiler.is_compiling():
            return mask, starts if self.may_restart else None
        if self.are_plain:
            return None, None
        starts_exist, pads_exist = torch.stack([starts.any(), ~mask.all()]).tolist()
        return (mask if pads_exist else None), (starts if starts_exist else None)


def plan_columns(
    shape: tuple[int, int],
    device,
    progress: Progress | None,
    num_past: int = 0,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> Columns | None:
    """Reads a call's arguments.

    A document begins at a real token whose position is not its predecessor's + 1, or where ``cu_seq_lens`` or
    ``seq_idx`` say so; padding is passed over. A row's very first token needs no mark: the row is at its start state.

    Args:
        shape: (B, T) of this call.
        device: where to put what is made here.
        progress: the rows' progress before the call; None: nothing read.
        num_past: columns read before the call.
        attention_mask: (B, T) or, with the earlier columns in front, (B, num_past + T).
        position_ids: (B, T) or (1, T).
        cu_seq_lens: (documents + 1,) borders of the documents in a single row.
        seq_idx: (B, T) number of each token's document.

    Returns:
        The columns, or None if nothing was given and nothing read: T real tokens of one document in each row.

    Raises:
        ValueError: naming the argument whose shape does not fit.
    """
    if all(x is None for x in (attention_mask, position_ids, cu_seq_lens, seq_idx)) and progress is None:
        return None
    progress = Progress.start(shape[0], device) if progress is None else progress
    mask = _real_columns(attention_mask, shape, num_past, device)
    if attention_mask is None:
        rank = torch.arange(1, shape[1] + 1, device=device)[None]
    else:
        rank = mask.long().cumsum(1)
    position = progress.position[:, None] + rank
    may_restart = any(x is not None for x in (position_ids, cu_seq_lens, seq_idx))
    if not may_restart:
        return Columns(mask, torch.zeros_like(mask), position, False, attention_mask is not None)
    last_before, starts = _previous_real(mask), torch.zeros_like(mask)
    if position_ids is not None:
        position = _check_shape("position_ids", position_ids, shape, device)
        previous = position.gather(1, last_before.clamp(min=0))
        previous = torch.where(last_before >= 0, previous, progress.position[:, None])
        starts = position != previous + 1
    if seq_idx is not None:
        index = _check_shape("seq_idx", seq_idx, shape, device)
        starts = starts | ((index != index.gather(1, last_before.clamp(min=0))) & (last_before >= 0))
    if cu_seq_lens is not None:
        starts = starts | _packed_starts(cu_seq_lens, shape, device)
    has_predecessor = (progress.seen[:, None] + rank) > 1
    return Columns(mask, starts & mask & has_predecessor, position, True, attention_mask is not None)


def _real_columns(attention_mask, shape: tuple[int, int], num_past: int, device) -> torch.Tensor:
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    _check_is_tensor("attention_mask", attention_mask)
    allowed = (shape, (shape[0], num_past + shape[1]))
    if tuple(attention_mask.shape) not in allowed:
        raise ValueError(
            f"attention_mask must be {_either(*allowed)}, the new columns alone or behind those of the cache, "
            f"got {tuple(attention_mask.shape)}"
        )
    return attention_mask[:, attention_mask.shape[1] - shape[1] :].to(device=device, dtype=torch.bool)


def _check_is_tensor(name: str, value) -> None:
    if not torch.is_tensor(value):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def _either(*shapes: tuple) -> str:
    return " or ".join(map(str, dict.fromkeys(shapes)))


def _check_shape(name: str, value: torch.Tensor, shape: tuple[int, int], device) -> torch.Tensor:
    _check_is_tensor(name, value)
    if value.dim() != 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        raise ValueError(f"{name} must be {_either(shape, (1, shape[1]))}, got {tuple(value.shape)}")
    if value.is_floating_point():
        raise ValueError(f"{name} must be a tensor of integers, got {value.dtype}")
    return value.to(device).expand(shape)


def _packed_starts(cu_seq_lens: torch.Tensor, shape: tuple[int, int], device) -> torch.Tensor:
    _check_is_tensor("cu_seq_lens_q", cu_seq_lens)
    if shape[0] != 1 or cu_seq_lens.dim() != 1:
        raise ValueError(
            f"cu_seq_lens_q describes one flattened row: it must be 1-dimensional with batch size 1, "
            f"got {tuple(cu_seq_lens.shape)} with batch size {shape[0]}"
        )
    columns = torch.arange(shape[1], device=device)
    return torch.isin(columns, cu_seq_lens.to(device)).expand(shape)


def _last_real(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) index of the last real column up to each column, -1 if there is none."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, -1).cummax(1).values


def _previous_real(mask: torch.Tensor) -> torch.Tensor:
    """(B, T) index of the last real column before each column, -1 if there is none."""
    last = _last_real(mask)
    return torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
