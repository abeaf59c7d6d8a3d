# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory caching around the op: what is kept of segments, and how answers come together (Memory Caching, section 3).

Shapes: B rows, T columns, H heads, D head dimension; K memories kept before a call, E segments that end in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .inner_network import InnerNetwork, gelu, output_of
from .kept_memories import (
    KeptMemories,
    Relevance,
    Shares,
    advance,
    compare,
    equal_shares,
    gated_shares,
    joined,
    relevance,
)
from .kept_plan import KeptOptions, KeptPlan, by_row, plan_kept
from .kept_read import read_kept
from .memory_ops_chunked import MemoryResult
from .memory_read import read_network
from .memory_state import MemoryState, in_dtype
from .selected_read import read_selected
from .token_layout import TokenLayout, take_or_zero


@dataclass(frozen=True)
class CachingOptions:
    """Memory caching as a config describes it.

    Attributes:
        kind: "residual", "average", "grm", "soup" or "ssc".
        kept: segmentation.
        top_k: memories that "ssc" reads.
    """

    kind: str
    kept: KeptOptions
    top_k: int

    @classmethod
    def of(cls, config) -> "CachingOptions | None":
        """None: no caching.

        Raises:
            ValueError: if the fields, which may have been assigned since the config was made, do not fit.
        """
        config.validate_caching()
        return cls.of_fields(config)

    @classmethod
    def of_fields(cls, config) -> "CachingOptions | None":
        """As `of`, of whatever has the fields, which are known to fit."""
        if config.memory_caching is None:
            return None
        kept = KeptOptions(
            config.cache_segment_length,
            config.memory_chunk_size,
            config.cache_segmentation == "logarithmic",
            config.cache_initialization == "independent",
            config.cache_max_segments,
        )
        return cls(config.memory_caching, kept, config.cache_top_k)

    @property
    def is_gated(self) -> bool:
        """Whether tokens weigh what they read."""
        return self.kind in ("grm", "soup", "ssc")

    def plan(self, layout: TokenLayout, counts, shape: tuple[int, int], device) -> TokenLayout:
        """The layout with what caching has to know of it."""
        return replace(layout, kept=plan_kept(self.kept, counts, layout, shape, device))

    def share(self, found: Relevance | None, allowed: torch.Tensor, runs: torch.Tensor, q: torch.Tensor) -> Shares:
        """What tokens with queries q (B, T, H, D) read of each memory; ``allowed``, ``runs``: see `equal_shares`."""
        if found is None:
            return equal_shares(self.kind, allowed, runs, q)
        top_k = self.top_k if self.kind == "ssc" else None
        return gated_shares(found, allowed, runs, top_k)


def read_with_caching(
    options: CachingOptions,
    write: Callable[..., MemoryResult],
    q: torch.Tensor,
    u: torch.Tensor | None,
    state: MemoryState,
    kept: KeptMemories,
    plan: KeptPlan,
    network: InnerNetwork,
) -> tuple[MemoryResult, KeptMemories]:
    """A call of the op whose answers also come from kept memories.

    Args:
        write: the op, to be called with a state, the segments' ends and what else it is to know.
        q: (B, T, H, D) in the state's dtype, zero at masked columns.
        u: the same of the connector, or None if reads are not gated.
        state, kept: before the call.
        plan: the call's.
        network: M for H heads: LN's parameters are (H, 1, D) or None.

    Returns:
        The op's result with the answers in its place, (B, T, H, D), and what is kept behind the call.
    """
    # A state may come from a model of a lower precision.
    kept = in_dtype(kept, q.dtype)
    found = None if u is None else relevance(u, kept, plan)
    shares = options.share(found, plan.allowed, torch.ones_like(plan.length, dtype=torch.bool), q)
    blocks, is_block, runners = _run_blocks(write, state, kept, plan)
    mix = {}
    if options.kind == "soup":
        mix = _mixture(shares, kept.weights, blocks, is_block, plan)
    result = write(state, plan.ends, **mix)
    new = _choose(result.kept, plan.chosen)
    if blocks is not None:
        at = is_block[:, :, None, None, None]
        new = tuple(torch.where(at, block, w) for block, w in zip(blocks, new, strict=True))
    if options.kind != "soup":
        weights = [joined(w, w_new) for w, w_new in zip(kept.weights, new, strict=True)]
        output = result.output.to(q.dtype) * shares.running.unsqueeze(-1)
        result = result._replace(output=output + _read(q, shares, weights, network, plan.spans))
    behind = advance(kept, plan, new, found)._replace(runners=runners)
    if options.kind == "soup":
        behind = behind._replace(weights=tuple(map(_head_by_head, behind.weights)))
    return result, behind


def _head_by_head(w: torch.Tensor) -> torch.Tensor:
    """(B, K, H, ...) with a head's memories side by side, as a mixture's products take them: otherwise each token
    that is decoded would copy them all."""
    return w.transpose(1, 2).contiguous().transpose(1, 2)


def _run_blocks(write, state: MemoryState, kept: KeptMemories, plan: KeptPlan):
    """The memories of blocks of several segments, each begun at its block's start.

    Returns their weights (B, E, H, D_in, D_out) by layer where a call's segment ends such a block, which ones do so,
    (B or 1, E), and the runners behind the call; None, None and () without runners.
    """
    blocks = is_block = None
    runners = []
    for number, level in enumerate(plan.levels):
        # Those that have not begun anew yet in their document are one and the same.
        begin = kept.runners or ((state.weights, state.momentum),)
        weights, momentum = begin[min(number, len(begin) - 1)]
        runner = write(state._replace(weights=weights, momentum=momentum, chunk=None), level.ends, read=False)
        runners.append((runner.state.weights, runner.state.momentum))
        chosen, at = _choose(runner.kept, level.chosen), level.is_kept[:, :, None, None, None]
        if blocks is None:
            blocks, is_block = tuple(torch.where(at, w, 0) for w in chosen), level.is_kept
        else:
            blocks = tuple(torch.where(at, w, block) for w, block in zip(chosen, blocks, strict=True))
            is_block = is_block | level.is_kept
    return blocks, is_block, tuple(runners)


def _mixture(shares: Shares, weights, blocks, is_block: torch.Tensor | None, plan: KeptPlan) -> dict:
    """The op's arguments for shares (B, T, H, K + E) of kept ``weights`` and of a call's own: of blocks, which are
    known beforehand, and of segments, as the op's ends."""
    places = weights[0].shape[1]
    old, new = shares.kept[..., :places], shares.kept[..., places:]
    parts, weights = [shares.running.unsqueeze(-1), old], [w.to(new.device) for w in weights]
    if blocks is not None:
        parts.append(torch.where(is_block[:, None, None], new, 0))
        new = torch.where(is_block[:, None, None], 0, new)
        weights = [joined(w, block) for w, block in zip(weights, blocks, strict=True)]
    if plan.chosen is not None:
        by_end = new.new_zeros(*new.shape[:3], len(plan.ends.chunks) + 1)
        new = by_end.scatter_add(3, plan.chosen[:, None, None].expand_as(new), new)[..., :-1]
    return {"kept_weights": tuple(weights), "mix": torch.cat([*parts, new], -1)}


def _choose(kept: Sequence[torch.Tensor], chosen: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """(B, J, ...) per layer -> (B, E, ...): those with the numbers ``chosen`` (B or 1, E), zero for J."""
    if chosen is None:
        return tuple(kept)
    return tuple(take_or_zero([w], chosen.expand(w.shape[0], -1)) for w in kept)


def read_segment(
    options: CachingOptions,
    q: torch.Tensor,
    u: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    kept: KeptMemories,
    network: InnerNetwork,
) -> torch.Tensor:
    """Answers of a memory that is not written meanwhile (Titans, eq. 21) and of those kept before.

    The running memory is read if its segment has a token, or nothing is kept.

    Args:
        q, u: as for `read_with_caching`.
        weights: the running memory's, per layer (B, H, D_in, D_out).
        kept: as it was when these were its weights.

    Returns:
        (B, T, H, D).
    """
    weights, kept = in_dtype((tuple(weights), kept), q.dtype)
    counts = kept.counts
    end = options.kept.kept_ends(counts.closed, counts.places, q.device)
    left = by_row(counts.left, q.device).view(-1, 1)
    allowed = (end > 0).unsqueeze(1).expand(-1, q.shape[1], -1)
    runs = ((left > 0) | ~(end > 0).any(1, keepdim=True)).expand(-1, q.shape[1])
    found = None
    if u is not None:
        mean = kept.total / left.clamp(min=1)[:, :, None]
        found = compare(u, kept.keys, mean.unsqueeze(1), kept.total)
    shares = options.share(found, allowed, runs, q)
    x = q.transpose(1, 2)
    if options.kind == "soup":
        return _read_mixture(x, shares, weights, kept.weights, network).transpose(1, 2)
    output = read_network(network, weights, x).transpose(1, 2) * shares.running.unsqueeze(-1)
    return output + _read(q, shares, kept.weights, network, [(0, q.shape[1])] * counts.places)


def _read(q: torch.Tensor, shares: Shares, weights, network: InnerNetwork, spans) -> torch.Tensor:
    """What kept memories (B, K, H, D_in, D_out) contribute, (B, T, H, D)."""
    if weights[0].shape[1] == 0:
        return torch.zeros_like(q)
    if shares.index is not None:
        return read_selected(q, shares.kept, shares.index, weights, network)
    x, parts = (t.transpose(1, 2).flatten(0, 1) for t in (q, shares.kept))
    network = network.map_norm(lambda t: t.repeat(q.shape[0], 1, 1))
    y = read_kept(x, parts, weights, network, spans)
    return y.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def _read_mixture(x: torch.Tensor, shares: Shares, weights, kept, network: InnerNetwork) -> torch.Tensor:
    """M with the weights sum_i shares_i W^(i), layer by layer (Memory Caching, eq. 14-15); x (B, H, T, D)."""
    running, parts = (t.transpose(1, 2) for t in (shares.running.unsqueeze(-1), shares.kept))
    z = inputs = x
    for layer, (w, w_kept) in enumerate(zip(weights, kept, strict=True)):
        inputs = gelu(z) if layer else z
        z = running * network.products.matmul(inputs, w)
        if w_kept.shape[1]:
            mixed = (inputs.unsqueeze(-2) * parts.unsqueeze(-1)).flatten(-2)
            z = z + network.products.matmul(mixed, w_kept.to(x.device).transpose(1, 2).flatten(2, 3))
    return output_of(network, x, z)[0]
