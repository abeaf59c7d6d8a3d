# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading a mixture of memories: weights that were kept, and the running ones (Memory Caching, eq. 14-15).

A query's weights are gamma_0 W_t + sum_i gamma_i W^(i). They are linear in what they are mixed of, so no layer's
weights are ever built for a query; a layer with input x comes to

    gamma_0 (x W_t) + [gamma_1 x, ..., gamma_K x] [W^(1); ...; W^(K)]

and x W_t is itself linear in the chunk's coefficients, which is where gamma_0 goes.

Shapes: n chunks of a span, G rows times heads, b tokens in a chunk of which b_q are read, K kept weights.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .chunk_coefficients import ReadCoefficients
from .scan_inputs import ScanInputs
from .state_pair import Products, scaled


class Soup(NamedTuple):
    """Kept weights, and the shares that a span's queries have of them and of the running memory.

    Attributes:
        own: the running memory's share, (n * G, b_q, 1).
        shares: of the kept weights, a row's chunks one behind another, (G, n * b_q, K).
        weights: per layer (G, K * D_in, D_out), as products take them: one row's for all of its chunks.
    """

    own: torch.Tensor
    shares: torch.Tensor
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, inputs: ScanInputs, products: Products) -> "Soup":
        """Of a span whose ``mix`` is given."""
        shares = inputs.mix[..., 1:].transpose(0, 1).flatten(1, 2)
        weights = [products.operand(w.flatten(1, 2)) for w in inputs.kept]
        return cls(inputs.mix[..., :1].flatten(0, 1), shares, weights)

    @classmethod
    def of_tokens(cls, mix: torch.Tensor, kept: Sequence[torch.Tensor]) -> "Soup":
        """Of a call's tokens: shares (B, T, H, 1 + K) and weights (B, K, H, D_in, D_out)."""
        shares = mix.transpose(1, 2).flatten(0, 1)
        weights = [w.transpose(1, 2).flatten(0, 1).flatten(1, 2) for w in kept]
        return cls(shares[..., :1], shares[..., 1:], weights)

    def add_to_(self, products: Products, layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        """Adds sum_i gamma_i (x W^(i)) to z; x and z (n * G, b_q, .)."""
        mixed = products.mm(scaled(self._by_row(x), self.shares), self.weights[layer])
        self._add_by_row(z, mixed)

    def adjoint(self, products: Products, layer: int, x, r_bar, x_bar) -> tuple[torch.Tensor, torch.Tensor]:
        """The adjoint of `add_to_`, given the gradient of z: adds to x_bar.

        Returns:
            The gradients of the shares, (n, G, b_q, K), and of the layer's kept weights, (G, K * D_in, D_out).
        """
        num_kept = self.shares.shape[-1]
        x_rows, r_rows = self._by_row(x), self._by_row(r_bar)
        through = products.mm(r_rows, self.weights[layer].mT).unflatten(-1, (num_kept, x.shape[-1]))
        shares_bar = torch.linalg.vecdot(through, x_rows.unsqueeze(-2))
        self._add_by_row(x_bar, through.mul_(self.shares.unsqueeze(-1)).sum(-2))
        weights_bar = products.mm(scaled(x_rows, self.shares).mT, r_rows)
        return shares_bar.unflatten(1, (-1, x.shape[1])).transpose(0, 1), weights_bar

    def _by_row(self, t: torch.Tensor) -> torch.Tensor:
        """(n * G, b_q, D) -> (G, n * b_q, D)."""
        return t.unflatten(0, (-1, self.shares.shape[0])).transpose(0, 1).flatten(1, 2)

    def _add_by_row(self, t: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds (G, n * b_q, D) to t (n * G, b_q, D)."""
        t.unflatten(0, (-1, self.shares.shape[0])).add_(rows.unflatten(1, (-1, t.shape[1])).transpose(0, 1))


class KeptRoom:
    """The kept weights that the segments of a scan read, each a few more: all lie in one tensor per layer, of which
    what a segment reads is the front, since a copy for each segment would take memory quadratic in their number.

    Attributes:
        filled: per layer (G, K, D_in, D_out), what is kept by now.
    """

    def __init__(self, kept: tuple[torch.Tensor, ...], more: int):
        """For ``kept`` weights and those of ``more`` segments."""
        self.filled = kept
        self._rooms = []
        for w in kept:
            room = w.new_empty(w.shape[0], w.shape[1] + more, *w.shape[2:])
            room[:, : w.shape[1]] = w.detach()
            self._rooms.append(room)

    def put(self, new: tuple[torch.Tensor, ...]) -> None:
        """Adds the weights of one more segment, per layer (G, D_in, D_out)."""
        self.filled = tuple(map(_Put.apply, self._rooms, self.filled, new))


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, room: torch.Tensor, filled: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """(G, places, D_in, D_out), of which (G, K, ...) are filled, and (G, ...) -> (G, K + 1, ...), in the room."""
        room[:, filled.shape[1]] = new
        # Scans keep these fronts for their backward. What is written behind them changes none, which a tensor with a
        # version of its own says.
        return room[:, : filled.shape[1] + 1].data

    @staticmethod
    def backward(ctx, bar: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        return None, bar[:, :-1], bar[:, -1]


def own_part(read: ReadCoefficients, own: torch.Tensor) -> ReadCoefficients:
    """The coefficients of a memory that is read with the share ``own`` (n, G, b_q)."""
    return ReadCoefficients(own * read.c, own * read.d, own.unsqueeze(-1) * read.A)


def own_part_adjoint(
    read: ReadCoefficients, own: torch.Tensor, bar: ReadCoefficients
) -> tuple[ReadCoefficients, torch.Tensor]:
    """The gradients of the coefficients and of ``own``, given those of `own_part`."""
    own_bar = (read.c * bar.c).addcmul_(read.d, bar.d).add_(torch.linalg.vecdot(read.A, bar.A))
    return own_part(bar, own), own_bar
