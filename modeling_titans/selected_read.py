# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading the few kept memories that each token has selected, and no others (Memory Caching, eq. 16-17).

Tokens are sorted by the memory they read. Where many of them read each memory, a CPU reads memory by memory; else
they are put into blocks of one memory each, which are read side by side: a weight is taken once for a block of tokens.
Memories that nobody selected are not touched, nor moved from where they lie.

Shapes: A answers asked for (a token, a head and a memory each), M memories times heads, P places in which answers are
sorted, N blocks of b places, D head dimension.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .inner_network import InnerNetwork, Normalized, answer_of, gelu_alone, gelu_and_slope
from .kept_read import Answers, answers_adjoint, hidden_layers
from .short_calls import is_short


# Elements of a hidden layer that a CPU has alive at once: most memories are then read in one part.
CPU_ELEMENTS = 2**18
# Tokens of a block: enough to make taking its weights cheap beside the products.
BLOCK = 128
# Blocks that an accelerator reads side by side.
ACCELERATOR_BLOCKS = 1024
# Answers of a memory for which a CPU reads it by itself: enough to make calls cheap beside the products.
ALONE = 48


class Selection(NamedTuple):
    """Who reads what.

    Attributes:
        place: (A,) the place of each answer; P: it is of no memory.
        token: (P,) the row of q that is asked at each place; the number of rows where there is none.
        memory: (N,) memory of each block; without a meaning if there are runs.
        size: b.
        runs: the memories and the places of their answers, (m, begin, end) each; None: there are blocks.
    """

    place: torch.Tensor
    token: torch.Tensor
    memory: torch.Tensor
    size: int
    runs: tuple[tuple[int, int, int], ...] | None

    @classmethod
    def build(cls, wanted: torch.Tensor, num_memories: int, answers_per_token: int) -> "Selection":
        """Arranges answers: ``wanted`` (A,) the memory of each, ``num_memories`` M for none; answer a is of token
        a // k."""
        count = torch.zeros(num_memories + 1, dtype=torch.long, device=wanted.device)
        count.scatter_add_(0, wanted, torch.ones_like(wanted))
        order = torch.argsort(wanted, stable=True)
        is_free = wanted.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_free:
            stops = count.cumsum(0).tolist()
            bounds = enumerate(zip([0, *stops], stops[:-1], strict=False))
            runs = tuple((memory, begin, stop) for memory, (begin, stop) in bounds if begin < stop)
            if stops[-2] >= ALONE * len(runs):
                return cls._in_runs(order, runs, stops[-2], answers_per_token)
        return cls._in_blocks(wanted, order, count, answers_per_token, is_free)

    @classmethod
    def one_by_one(cls, wanted: torch.Tensor, num_memories: int, answers_per_token: int) -> "Selection":
        """As `build`, for so few answers that to sort them costs more than to take a memory for each."""
        place = torch.arange(wanted.shape[0], device=wanted.device)
        return cls(place, place // answers_per_token, wanted.clamp(max=num_memories - 1), 1, None)

    @classmethod
    def _in_runs(cls, order: torch.Tensor, runs, num_places: int, answers_per_token: int) -> "Selection":
        rank = torch.arange(order.shape[0], device=order.device).clamp(max=num_places)
        place = torch.empty_like(order).scatter_(0, order, rank)
        return cls(place, order[:num_places] // answers_per_token, order[:0], 1, runs)

    @classmethod
    def _in_blocks(cls, wanted, order, count: torch.Tensor, answers_per_token: int, is_free: bool) -> "Selection":
        """``is_free``: whether it costs nothing to wait for numbers of tensors."""
        number, num_memories = wanted.shape[0], count.shape[0] - 1
        size = 1
        while size < BLOCK and size * num_memories < number:
            size *= 2
        blocks = (count[:-1] + size - 1) // size
        behind = blocks.cumsum(0)
        # At most this many blocks; to know how many would be to wait for the device.
        num_blocks = int(behind[-1]) if is_free else min(number // size + num_memories, number)
        sorted_memory = wanted[order]
        rank = torch.arange(number, device=wanted.device) - (count.cumsum(0) - count)[sorted_memory]
        first = torch.cat([behind - blocks, behind[-1:]])
        place_sorted = first[sorted_memory] * size + rank
        place_sorted = torch.where(sorted_memory < num_memories, place_sorted, num_blocks * size)
        place = torch.empty_like(place_sorted).scatter_(0, order, place_sorted)
        none = (number + answers_per_token - 1) // answers_per_token
        token = torch.full((num_blocks * size + 1,), none, device=wanted.device)
        token.scatter_(0, place_sorted, order // answers_per_token)
        memory = torch.searchsorted(behind, torch.arange(num_blocks, device=wanted.device), right=True)
        return cls(place, token[:-1], memory.clamp(max=num_memories - 1), size, None)


def read_selected(
    q: torch.Tensor,
    shares: torch.Tensor,
    wanted: torch.Tensor,
    weights: Sequence[torch.Tensor],
    network: InnerNetwork,
) -> torch.Tensor:
    """sum_j shares_j M^(wanted_j)(q), of the wanted memories alone.

    Args:
        q: (B, T, H, D).
        shares: (B, T, H, k).
        wanted: (B, T, H, k) numbers of kept memories, K for none, whose share must be zero.
        weights: per layer (B, K, H, D_in, D_out), on any device.
        network: M for H heads: LN's parameters are (H, 1, D) or None.

    Returns:
        (B, T, H, D), differentiable in every floating-point tensor.
    """
    batch_size, _, num_heads, number = shares.shape
    places = weights[0].shape[1]
    row, head = (torch.arange(n, device=q.device) for n in (batch_size, num_heads))
    memory = (row[:, None, None, None] * places + wanted) * num_heads + head[:, None]
    num_memories = batch_size * places * num_heads
    memory = torch.where(wanted < places, memory, num_memories).flatten()
    build = Selection.one_by_one if is_short(q.shape[1]) else Selection.build
    selection = build(memory, num_memories, number)
    flat = [w.flatten(0, 2) for w in weights]
    output = _SelectedRead.apply(
        network,
        num_heads,
        selection,
        q.reshape(-1, q.shape[-1]),
        shares.reshape(-1, number),
        network.norm_weight,
        network.norm_bias,
        *flat,
    )
    return output.view(q.shape)


class _SelectedRead(torch.autograd.Function):
    """q (A / k, D), shares (A / k, k), weights (M, D_in, D_out) per layer.

    Kept for the backward is, beside the arguments, LN's x_hat at each place, or without LN the last layer's result: a
    quarter or less of what a hidden layer takes, and it saves the last product and LN from being computed again.
    """

    @staticmethod
    def forward(ctx, network, num_heads, selection, q, shares, norm_weight, norm_bias, *weights):
        asked = _with_none(q, selection)
        last, rstd = _places(q, selection), None if norm_weight is None else _places(q[:, :1], selection)
        for part in _parts(network, num_heads, selection, weights, asked):
            x = asked.index_select(0, selection.token[part.at]).unflatten(0, (part.number, -1))
            inputs, _ = hidden_layers(part.network, part.layers, x, gelu_alone)
            f = network.products.mm(inputs[-1], part.layers[-1])
            if rstd is not None:
                f, rstd[part.at] = (t.flatten(0, 1) for t in Normalized.of(f, network.norm_eps))
            last[part.at] = f.view(-1, f.shape[-1])
        ctx.save_for_backward(q, shares, norm_weight, norm_bias, last, rstd, *selection[:3], *weights)
        ctx.facts = network._replace(norm_weight=None, norm_bias=None), num_heads, *selection[3:]
        return _answers_by_token(network, num_heads, q, shares, _by_token(last, selection, shares))

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar):
        # Whoever calls it: a state in float32 is differentiated in float32.
        with torch.autocast(output_bar.device.type, enabled=False):
            return _gradients(ctx, output_bar)


def _gradients(ctx, output_bar: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, shares, norm_weight, norm_bias, last, rstd, *rest = ctx.saved_tensors
    network, num_heads, *blocks = ctx.facts
    network = network._replace(norm_weight=norm_weight, norm_bias=norm_bias)
    selection, weights = Selection(*rest[:3], *blocks), rest[3:]
    q, output_bar = (_with_none(t, selection) for t in (q, output_bar))
    share = _by_place(shares, selection)
    x_bar, share_bar = _places(q, selection), _places(share, selection)
    weights_bar = [torch.zeros_like(w) for w in weights]
    norm_bar = [None if t is None else torch.zeros_like(t) for t in (norm_weight, norm_bias)]
    for part in _parts(network, num_heads, selection, weights, q):
        token = selection.token[part.at]
        x, bar = (t.index_select(0, token).unflatten(0, (part.number, -1)) for t in (q, output_bar))
        given = _answers_again(part, x, last, rstd)
        share_bar[part.at, 0] = torch.linalg.vecdot(given.output, bar).flatten()
        bar = bar.mul_(share[part.at].unflatten(0, (part.number, -1)))
        alone = isinstance(part.memory, slice)
        layers_bar = [t[part.memory] for t in weights_bar] if alone else [torch.zeros_like(w) for w in part.layers]
        adjoint = answers_adjoint(part.network, part.layers, given, bar, layers_bar)
        x_bar[part.at] = adjoint.x.flatten(0, 1)
        if not alone:
            for total, layer_bar in zip(weights_bar, layers_bar, strict=True):
                _add_to(total, part.memory, layer_bar)
        if norm_weight is not None:
            _add_to(norm_bar[0], part.head, adjoint.norm_weight)
            _add_to(norm_bar[1], part.head, adjoint.norm_bias)
    q_bar = _by_token(x_bar, selection, torch.ones_like(shares))
    return None, None, None, q_bar, share_bar[selection.place].view(shares.shape), *norm_bar, *weights_bar


def _answers_by_token(network: InnerNetwork, num_heads: int, q, shares: torch.Tensor, sums: torch.Tensor):
    """Each token's answers, (A / k, D), by their shares.

    Args:
        sums: (A / k, D) by the same shares LN's x_hat, or without LN the last layer's result.
    """
    share = shares.sum(1, keepdim=True)
    output = sums
    if network.norm_weight is not None:
        rows = sums.unflatten(0, (-1, num_heads)) * network.norm_weight[:, 0]
        output = rows.addcmul_(share.unflatten(0, (-1, num_heads)), network.norm_bias[:, 0]).flatten(0, 1)
    return output.addcmul_(q, share) if network.residual else output


def _answers_again(part: "_Part", x: torch.Tensor, last: torch.Tensor, rstd: torch.Tensor | None) -> Answers:
    """A part's answers for x (n, places, D), given what has been kept of them."""
    inputs, hidden = hidden_layers(part.network, part.layers, x, gelu_and_slope)
    f = last[part.at].view_as(x)
    norm = None if rstd is None else Normalized(f, rstd[part.at].view(*x.shape[:-1], 1))
    return Answers(answer_of(part.network, x, f), inputs, hidden, norm)


class _Part(NamedTuple):
    """What is read at once.

    Attributes:
        at: the places.
        number: of memories, which have as many places each.
        memory, head: their numbers, as an index of those.
        network, layers: M with their LN, and their weights where q is.
    """

    at: slice
    number: int
    memory: slice | torch.Tensor
    head: slice | torch.Tensor
    network: InnerNetwork
    layers: list[torch.Tensor]


def _parts(network: InnerNetwork, num_heads: int, selection: Selection, weights, q: torch.Tensor):
    """Yields the parts of all places."""
    elements = CPU_ELEMENTS // max(w.shape[-1] for w in weights)
    if selection.runs is not None:
        for m, begin, stop in selection.runs:
            memory, head = slice(m, m + 1), slice(m % num_heads, m % num_heads + 1)
            own, layers = network.map_norm(itemgetter(head)), [w[memory].to(q.device) for w in weights]
            size = -(-(stop - begin) // -(-(stop - begin) // elements))
            for first in range(begin, stop, size):
                yield _Part(slice(first, min(first + size, stop)), 1, memory, head, own, layers)
        return
    size = selection.size
    many = max(elements // size, 1) if q.device.type == "cpu" else ACCELERATOR_BLOCKS
    for first in range(0, selection.memory.shape[0], many):
        memory = selection.memory[first : first + many]
        head = memory % num_heads
        at = slice(first * size, (first + memory.shape[0]) * size)
        layers = [_taken(w, memory, q.device) for w in weights]
        yield _Part(at, memory.shape[0], memory, head, network.map_norm(itemgetter(head)), layers)


def _taken(weights: torch.Tensor, memory: torch.Tensor, device) -> torch.Tensor:
    """The weights (n, D_in, D_out) of memories (n,); if they lie elsewhere each one is moved once."""
    if weights.device == device:
        return weights[memory]
    used, back = memory.unique(return_inverse=True)
    return weights[used.to(weights.device)].to(device)[back]


def _add_to(total: torch.Tensor, index: slice | torch.Tensor, part: torch.Tensor) -> None:
    """Adds (n, ...) to the rows ``index`` of ``total``, which may be several times the same."""
    part = part.to(total.device)
    if isinstance(index, slice):
        total[index] += part
    else:
        total.index_add_(0, index.to(total.device), part)


def _with_none(t: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Rows (n, D), and, if any is asked for, behind them the one that no token is: zero."""
    return t if selection.runs is not None else torch.cat([t, torch.zeros_like(t[:1])])


def _places(like: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Room for rows like these at each place, (P + 1, ...), and a row of zeros for answers of no memory."""
    places = like.new_empty(selection.token.shape[0] + 1, like.shape[1])
    places[-1] = 0
    return places


def _by_place(shares: torch.Tensor, selection: Selection) -> torch.Tensor:
    """(A / k, k) -> (P + 1, 1), zero where there is no answer."""
    by_place = shares.new_zeros(selection.token.shape[0] + 1, 1)
    by_place[selection.place] = shares.reshape(-1, 1)
    return by_place


def _by_token(places: torch.Tensor, selection: Selection, shares: torch.Tensor) -> torch.Tensor:
    """Rows (P + 1, D) at places -> (A / k, D), the sum of a token's by their shares (A / k, k)."""
    return F.embedding_bag(selection.place.view(shares.shape), places, per_sample_weights=shares, mode="sum")
