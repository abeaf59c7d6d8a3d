# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading the few kept memories that each token has selected, and no others (Memory Caching, eq. 16-17).

Tokens are sorted by the memory they read and put into blocks of one memory each, which are read side by side: a
weight is taken once for a block of tokens, and memories that nobody selected are not touched, nor moved from where
they lie.

Shapes: A answers asked for (a token, a head and a memory each), M memories times heads, N blocks of b tokens, D head
dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .inner_network import InnerNetwork
from .kept_read import answers, answers_adjoint


# Tokens of a block: enough to make taking its weights cheap beside the products.
BLOCK = 128
# Blocks that are read side by side.
CPU_BLOCKS, ACCELERATOR_BLOCKS = 16, 1024


class Selection(NamedTuple):
    """Who reads what, in blocks.

    Attributes:
        memory: (N,) memory of each block.
        head: (N,) its head.
        place: (A,) the place of each answer among the N * b of the blocks; N * b: it is of no memory.
        token: (N * b,) the row of q that is asked at each place; the number of rows where there is none.
        size: b.
    """

    memory: torch.Tensor
    head: torch.Tensor
    place: torch.Tensor
    token: torch.Tensor
    size: int

    @classmethod
    def build(cls, wanted: torch.Tensor, num_memories: int, num_heads: int, answers_per_token: int) -> "Selection":
        """Arranges answers: ``wanted`` (A,) the memory of each, ``num_memories`` M for none; memory m is of head
        m % H, and answer a of token a // k."""
        number = wanted.shape[0]
        size = 1
        while size < BLOCK and size * num_memories < number:
            size *= 2
        count = torch.zeros(num_memories + 1, dtype=torch.long, device=wanted.device)
        count.scatter_add_(0, wanted, torch.ones_like(wanted))
        blocks = (count[:-1] + size - 1) // size
        behind = blocks.cumsum(0)
        # At most this many blocks; to know how many would be to wait for the device.
        num_blocks = min(number // size + num_memories, number)
        if wanted.device.type == "cpu" and not torch.compiler.is_compiling():
            num_blocks = int(behind[-1])
        order = torch.argsort(wanted, stable=True)
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
        memory = memory.clamp(max=num_memories - 1)
        return cls(memory, memory % num_heads, place, token[:-1], size)


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
        wanted: (B, T, H, k) numbers of kept memories, K for none.
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
    selection = Selection.build(memory, num_memories, num_heads, number)
    flat = [w.flatten(0, 2) for w in weights]
    output = _SelectedRead.apply(
        network,
        selection,
        q.reshape(-1, q.shape[-1]),
        shares.reshape(-1, number),
        network.norm_weight,
        network.norm_bias,
        *flat,
    )
    return output.view(q.shape)


class _SelectedRead(torch.autograd.Function):
    """q (A / k, D), shares (A / k, k), weights (M, D_in, D_out) per layer."""

    @staticmethod
    def forward(ctx, network, selection, q, shares, norm_weight, norm_bias, *weights):
        ctx.save_for_backward(q, shares, norm_weight, norm_bias, *selection[:4], *weights)
        ctx.facts = network._replace(norm_weight=None, norm_bias=None), selection.size
        found = [answers(*block[:2], block[2]).output for block in _blocks(network, selection, q, weights)]
        ordered = _answers_in_order(found, selection, shares, torch.zeros_like(q[:1]))
        return (ordered * shares.unsqueeze(-1)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar):
        q, shares, norm_weight, norm_bias, *rest = ctx.saved_tensors
        network, size = ctx.facts
        network = network._replace(norm_weight=norm_weight, norm_bias=norm_bias)
        selection, weights = Selection(*rest[:4], size), rest[4:]
        wanted_bar = (output_bar.unsqueeze(1) * shares.unsqueeze(-1)).flatten(0, 1)
        none = torch.zeros_like(wanted_bar[:1])
        by_place = torch.zeros(selection.token.shape[0] + 1, q.shape[-1], dtype=q.dtype, device=q.device)
        by_place[selection.place] = wanted_bar
        by_place = by_place[:-1].unflatten(0, (-1, size))
        q_bar = torch.cat([torch.zeros_like(q), none])
        weights_bar = [torch.zeros_like(w) for w in weights]
        norm_bar = [None if t is None else torch.zeros_like(t) for t in (norm_weight, norm_bias)]
        found = []
        for own, layers, x, at in _blocks(network, selection, q, weights):
            given = answers(own, layers, x)
            adjoint = answers_adjoint(own, layers, given, by_place[at])
            found.append(given.output)
            q_bar.index_add_(0, selection.token.unflatten(0, (-1, size))[at].flatten(), adjoint.x.flatten(0, 1))
            memory = selection.memory[at]
            for total, part in zip(weights_bar, adjoint.weights, strict=True):
                total.index_add_(0, memory.to(total.device), part.to(total.device))
            if norm_weight is not None:
                norm_bar[0].index_add_(0, selection.head[at], adjoint.norm_weight)
                norm_bar[1].index_add_(0, selection.head[at], adjoint.norm_bias)
        shares_bar = (_answers_in_order(found, selection, shares, none) * output_bar.unsqueeze(1)).sum(-1)
        return None, None, q_bar[:-1], shares_bar, *norm_bar, *weights_bar


def _blocks(network: InnerNetwork, selection: Selection, q: torch.Tensor, weights):
    """Yields, for some blocks at a time, M with their LN, their layers, their tokens (n, b, D), and which they are."""
    many = CPU_BLOCKS * max(BLOCK // selection.size, 1) if q.device.type == "cpu" else ACCELERATOR_BLOCKS
    tokens = torch.cat([q, torch.zeros_like(q[:1])])[selection.token].unflatten(0, (-1, selection.size))
    for first in range(0, tokens.shape[0], many):
        at = slice(first, first + many)
        own = network
        if network.norm_weight is not None:
            norm = [t[selection.head[at]] for t in (network.norm_weight, network.norm_bias)]
            own = network._replace(norm_weight=norm[0], norm_bias=norm[1])
        yield own, [_taken(w, selection.memory[at], q.device) for w in weights], tokens[at], at


def _taken(weights: torch.Tensor, memory: torch.Tensor, device) -> torch.Tensor:
    """The weights (n, D_in, D_out) of memories (n,); if they lie elsewhere each one is moved once."""
    if weights.device == device:
        return weights[memory]
    used, back = memory.unique(return_inverse=True)
    return weights[used.to(weights.device)].to(device)[back]


def _answers_in_order(
    found: list[torch.Tensor], selection: Selection, shares: torch.Tensor, none: torch.Tensor
) -> torch.Tensor:
    """Blocks' answers (n, b, D) -> (A / k, k, D), for those of no memory ``none`` (1, D)."""
    flat = torch.cat([*(y.flatten(0, 1) for y in found), none])
    return flat[selection.place].unflatten(0, shares.shape)
