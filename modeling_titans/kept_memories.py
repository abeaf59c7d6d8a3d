# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memories that a layer has kept of finished segments, and how a token weighs them (Memory Caching, section 3).

Shapes: B rows, T columns, H heads, D head dimension; K memories kept before a call, E segments that end in it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .kept_plan import KeptCounts, KeptPlan, by_row
from .token_layout import take, take_or_zero


class KeptMemories(NamedTuple):
    """What a memory with caching carries from call to call beside its own state.

    Attributes:
        weights: of each kept memory, per layer (B, K, H, D_in, D_out), in the order in which they were kept; zeros
            behind a row's last one.
        keys: (B, K, H, D) mean of u over the tokens of what each was kept of; None where reads weigh all alike.
        total: (B, H, D) sum of u over the running segment's tokens; None likewise.
        closed: segments complete in the row's document, an int if all rows are alike, else a LongTensor (B,).
        left: tokens of the running segment, likewise.
        runners: with independent logarithmic segments, the (weights, momentum) of the memories that began at the
            last multiple of 2, 4, ... segments; pending tokens are those of the running memory.
    """

    weights: tuple[torch.Tensor, ...]
    keys: torch.Tensor | None
    total: torch.Tensor | None
    closed: int | torch.Tensor
    left: int | torch.Tensor
    runners: tuple[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], ...] = ()

    @classmethod
    def initial(cls, weights: Sequence[torch.Tensor], has_keys: bool) -> "KeptMemories":
        """Nothing kept, for the rows of ``weights`` (B, H, D_in, D_out)."""
        none = tuple(w.new_zeros(w.shape[0], 0, *w.shape[1:]) for w in weights)
        batch_size, num_heads, head_dim = weights[0].shape[:3]
        keys = weights[0].new_zeros(batch_size, 0, num_heads, head_dim) if has_keys else None
        total = weights[0].new_zeros(batch_size, num_heads, head_dim) if has_keys else None
        return cls(none, keys, total, 0, 0)

    def restart(self, rows: torch.Tensor, weights, momentum) -> "KeptMemories":
        """Rows (B,) bool begin a document, at start weights and momentum (B or 1, H, D_in, D_out) by layer.

        What they have kept stays where it is: counts say what is read.
        """
        at = rows.view(-1, 1, 1, 1)

        def begin(group, start) -> tuple[torch.Tensor, ...]:
            return tuple(torch.where(at, s, t) for t, s in zip(group, start, strict=True))

        counts = self.counts.restart(rows)
        total = None if self.total is None else torch.where(at[..., 0], 0, self.total)
        runners = tuple((begin(runner[0], weights), begin(runner[1], momentum)) for runner in self.runners)
        return self._replace(total=total, closed=counts.closed, left=counts.left, runners=runners)

    def where(self, rows: torch.Tensor, other: "KeptMemories") -> "KeptMemories":
        """These in the rows (B,) bool, ``other``'s elsewhere, for reading: without the runners."""
        places = max(self.weights[0].shape[1], other.weights[0].shape[1])

        def choose(one, two):
            if one is None:
                return None
            if isinstance(one, tuple):
                return tuple(choose(*pair) for pair in zip(one, two, strict=True))
            return torch.where(rows.view(-1, *(1,) * (one.dim() - 1)).to(one.device), one, two)

        one, two = (k._with_places(places) for k in (self, other))
        closed, left = (torch.where(rows, *pair) for pair in zip(self[3:5], other[3:5], strict=True))
        return KeptMemories(*choose(one, two), closed, left)

    def _with_places(self, places: int) -> tuple:
        """Weights, keys and total, with zeros behind the kept memories up to ``places``."""

        def pad(t: torch.Tensor) -> torch.Tensor:
            return F.pad(t, (0, 0) * (t.dim() - 2) + (0, places - t.shape[1]))

        return tuple(map(pad, self.weights)), None if self.keys is None else pad(self.keys), self.total

    def weights_to(self, device: torch.device) -> "KeptMemories":
        """With the kept weights on ``device``; keys, of which every token needs all, stay."""
        return self._replace(weights=tuple(w.to(device) for w in self.weights))

    @property
    def counts(self) -> KeptCounts:
        return KeptCounts(self.closed, self.left, self.weights[0].shape[1])


class Relevance(NamedTuple):
    """How well a token's segments fit it, and what of them later calls need.

    Attributes:
        kept: r (B, T, H, K + E), the memories kept before and the call's own.
        running: r (B, T, H) of the running segment, up to the token itself.
        keys: (B, K + E, H, D), in the order of time.
        total: (B, H, D) behind the call.
        u: (B, T, H, D) what was compared.
    """

    kept: torch.Tensor
    running: torch.Tensor
    keys: torch.Tensor
    total: torch.Tensor
    u: torch.Tensor

    @torch.no_grad()
    def choice(self, allowed: torch.Tensor, number: int) -> torch.Tensor:
        """(B, T, H, number) the memories of the largest r among those that a token may read, (B or 1, T, 1, K + E).

        Of several whose r differ by no more than rounding, the latest ones: in a text that repeats itself whole
        segments are alike, and how a text is split over calls, which says how sums are rounded, must not decide what
        is read.
        """
        places, width = self.keys.shape[1], self.keys.shape[3]
        step = torch.finfo(self.keys.dtype).eps ** 0.75 / math.sqrt(width)
        order = torch.arange(places, device=self.keys.device).unsqueeze(1) * step
        ahead = (torch.linalg.vector_norm(self.keys, dim=-1) * order).transpose(1, 2).unsqueeze(1)
        length = torch.linalg.vector_norm(self.u, dim=-1, keepdim=True)
        scores = torch.addcmul(self.kept, length, ahead).masked_fill(~allowed, -math.inf)
        return scores.topk(number, sorted=False).indices


def relevance(u: torch.Tensor, kept: KeptMemories, plan: KeptPlan) -> Relevance:
    """Compares tokens with segments: <u_t, mean of u over the segment> / sqrt(D) (Memory Caching, eq. 10).

    Args:
        u: (B, T, H, D) in the state's dtype, zero at masked columns.
        kept: before the call.
        plan: the call's.
    """
    running = _running_sums(u, kept, plan)
    ends = plan.last.expand(u.shape[0], -1)
    new = take(running, ends.clamp(max=u.shape[1] - 1)) * (ends < u.shape[1])[:, :, None, None]
    keys = torch.cat([kept.keys, _means(new, kept, plan)], 1)
    left = by_row(plan.left, u.device).view(-1, 1, 1)
    found = compare(u, keys, running, torch.where(left > 0, running[:, -1], 0))
    return found._replace(running=found.running / plan.length.unsqueeze(-1))


def _running_sums(u: torch.Tensor, kept: KeptMemories, plan: KeptPlan) -> torch.Tensor:
    """The sum of u over each token's segment up to the token, (B, T, H, D)."""
    num_columns = u.shape[1]
    if not isinstance(plan.closed, int):
        # Where rows differ they are differences of sums over rows, which single precision would not bear.
        sums = u.double().cumsum(1)
        before = torch.cat([-kept.total.double().unsqueeze(1), torch.zeros_like(sums[:, :1]), sums], 1)
        return (sums - take(before, (plan.first + 1).expand(u.shape[0], -1))).to(u.dtype)
    length, left = plan.options.segment_length, kept.left
    if left + num_columns <= length:
        return u.cumsum(1) + kept.total.unsqueeze(1)
    parts = [u, u.new_zeros(u.shape[0], -(left + num_columns) % length, *u.shape[2:])]
    if left:
        parts.insert(0, F.pad(kept.total.unsqueeze(1), (0, 0, 0, 0, left - 1, 0)))
    sums = torch.cat(parts, 1).unflatten(1, (-1, length)).cumsum(2)
    return sums.flatten(1, 2)[:, left : left + num_columns]


def compare(u: torch.Tensor, keys: torch.Tensor, mean: torch.Tensor, total: torch.Tensor) -> Relevance:
    """Scores of u (B, T, H, D) with ``keys`` (B, K, H, D) and with the running segments' means (B, T or 1, H, D)."""
    scale = 1 / math.sqrt(u.shape[-1])
    running = torch.linalg.vecdot(u, mean) * scale
    return Relevance(torch.einsum("bthd,bkhd->bthk", u, keys * scale), running, keys, total, u)


def _means(sums: torch.Tensor, kept: KeptMemories, plan: KeptPlan) -> torch.Tensor:
    """From the sums of the segments that end (B, E, H, D), the means of what is kept at their ends."""
    length = plan.options.segment_length
    if plan.blocks is None:
        return sums / length
    segments = (plan.end & -plan.end)[:, :, None, None]
    places = kept.keys.shape[1]
    known = torch.cat([kept.keys * (segments[:, :places] * length), sums], 1)
    blocks = torch.einsum("bek,bkhd->behd", plan.blocks.to(sums.dtype).expand(sums.shape[0], -1, -1), known)
    return blocks / (segments[:, places:] * length).clamp(min=1)


class Shares(NamedTuple):
    """What of each memory a token's answer consists of.

    Attributes:
        running: (B, T, H) of the running memory.
        kept: (B, T, H, K) of the kept ones; where a token reads few of them, of those that ``index`` names.
        index: (B, T, H, k) which ones, K for none; None: all.
    """

    running: torch.Tensor
    kept: torch.Tensor
    index: torch.Tensor | None = None


def equal_shares(kind: str, allowed: torch.Tensor, runs: torch.Tensor, like: torch.Tensor) -> Shares:
    """The shares of `residual` (1 each) and `average` (1 / number), in the shape (B, T, H, ...) of ``like``.

    Args:
        allowed: (B or 1, T, K) memories that a token reads.
        runs: (B or 1, T) whether it reads the running one.
    """
    kept, running = allowed.to(like.dtype), runs.to(like.dtype)
    if kind == "average":
        number = (kept.sum(-1) + running).clamp(min=1)
        kept, running = kept / number.unsqueeze(-1), running / number
    shape = like.shape[:3]
    return Shares(running.unsqueeze(-1).expand(shape), kept.unsqueeze(2).expand(*shape, -1))


def gated_shares(found: Relevance, allowed: torch.Tensor, runs: torch.Tensor, top_k: int | None) -> Shares:
    """Softmax over the memories that a token reads (Memory Caching, eq. 9 and 17).

    Args:
        found: r of all of them.
        allowed, runs: as for `equal_shares`.
        top_k: how many of the kept ones are read, those of the largest r; None: all.
    """
    scores, allowed, index = found.kept, allowed.unsqueeze(2), None
    if top_k is not None:
        number = scores.shape[-1]
        chosen = found.choice(allowed, min(top_k, number))
        allowed = allowed.expand_as(scores).gather(3, chosen)
        scores, index = scores.gather(3, chosen), torch.where(allowed, chosen, number)
    scores = scores.masked_fill(~allowed, -math.inf)
    running = found.running.masked_fill(~runs.unsqueeze(-1), -math.inf)
    shares = torch.cat([running.unsqueeze(-1), scores], -1).softmax(-1)
    return Shares(shares[..., 0], shares[..., 1:], index)


def advance(kept: KeptMemories, plan: KeptPlan, new: Sequence[torch.Tensor], found: Relevance | None) -> KeptMemories:
    """What is kept behind a call.

    Args:
        new: per layer (B, E, H, D_in, D_out) the memories at the segments' ends.
        found: of the call, or None where there are no keys.
    """
    weights = tuple(_carry(w, w_new, plan) for w, w_new in zip(kept.weights, new, strict=True))
    keys = total = None
    if found is not None:
        places = kept.weights[0].shape[1]
        keys, total = _carry(found.keys[:, :places], found.keys[:, places:], plan), found.total
    return KeptMemories(weights, keys, total, plan.closed, plan.left, kept.runners)


def joined(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """(B, K, ...) and (B, E, ...) -> (B, K + E, ...), where ``old`` lies; not copied where one of them is empty."""
    if 0 in (old.shape[1], new.shape[1]):
        return new.to(old.device) if new.shape[1] else old
    return torch.cat([old, new.to(old.device)], 1)


def _carry(old: torch.Tensor, new: torch.Tensor, plan: KeptPlan) -> torch.Tensor:
    """(B, K, ...) and (B, E, ...) -> (B, K', ...)."""
    both, number = joined(old, new), plan.carried.shape[1]
    if number == both.shape[1] and (isinstance(plan.closed, int) or new.shape[1] == 0):
        # All of them, in order. What a row that has begun a document no longer reads may stay.
        return both
    return take_or_zero([both], plan.carried.expand(both.shape[0], -1).to(old.device))
