# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The tensors and options of a scan over chunks, and what comes of it: what every implementation of a scan takes.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension, K kept weights.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .inner_network import InnerNetwork
from .state_pair import Products


class Rule(NamedTuple):
    """How a memory learns.

    Attributes:
        dot: whether the inner loss is -<M(k), v>, not |M(k) - v|^2.
        sliding: whether the write slides over the last two tokens (`chunk_coefficients`), not carries on momentum.
        linear: whether it is of a matrix memory alone: one layer, no residual, no norm.
    """

    dot: bool = False
    sliding: bool = False
    linear: bool = False


RULES = {
    "titans": Rule(),
    "dla": Rule(dot=True),
    "linear_attention": Rule(dot=True, linear=True),
    "swla": Rule(dot=True, sliding=True, linear=True),
}


class ScanOptions(NamedTuple):
    """Static facts of a scan: see `chunk_scan`.

    ``products``: what operands of matrix products are rounded to, or None for not at all; ``compiled``: whether spans
    of whole chunks go through torch.compile; ``rule``: inner loss and coefficients; ``ends``: the chunks, in order,
    behind which the weights are handed out.
    """

    depth: int
    residual: bool
    norm_eps: float
    write: bool
    restart_at: frozenset[int]
    surprise: bool
    products: torch.dtype | None = None
    compiled: bool = False
    rule: Rule = RULES["titans"]
    ends: tuple[int, ...] = ()

    def of_chunks(self, begin: int, end: int) -> "ScanOptions":
        """Of a scan of the chunks begin..end - 1 alone, which hands out no weights."""
        return self._replace(restart_at=frozenset(n - begin for n in self.restart_at if begin <= n < end), ends=())


class ScanInputs(NamedTuple):
    """The tensors of a scan; see `chunk_scan`. Optional ones are None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    theta: torch.Tensor
    alpha: torch.Tensor
    eta: torch.Tensor
    full: torch.Tensor | None
    restart: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    forget_to: tuple[torch.Tensor, ...] | None
    start_weights: tuple[torch.Tensor, ...] | None
    start_momentum: tuple[torch.Tensor, ...] | None
    kept: tuple[torch.Tensor, ...] | None = None
    mix: torch.Tensor | None = None

    def flatten(self) -> list[torch.Tensor | None]:
        # A list first: older compilers cannot slice a named tuple.
        fields = list(self)
        flat = fields[:10]
        for group in fields[10:-1]:
            flat.extend(group if group is not None else [None] * len(self.weights))
        return [*flat, self.mix]

    @classmethod
    def unflatten(cls, flat, depth: int) -> "ScanInputs":
        groups = [tuple(flat[10 + i * depth : 10 + (i + 1) * depth]) for i in range(6)]
        return cls(*flat[:10], *(None if group[0] is None else group for group in groups), flat[10 + 6 * depth])

    def network(self, options: ScanOptions) -> InnerNetwork:
        """The memory network for the tokens of one chunk."""
        products = Products(options.products, self.theta.dtype)
        norm = (self.norm_weight, self.norm_bias, options.norm_eps)
        return InnerNetwork(options.residual, *norm, products, options.rule.dot)

    @staticmethod
    def num_tensors(depth: int) -> int:
        """The length of `flatten()`."""
        return 11 + 6 * depth

    def slice_chunks(self, begin: int, end: int) -> "ScanInputs":
        """Chunks begin..end - 1."""
        return self._with_chunks([t if t is None else t[begin:end] for t in self._by_chunk()])

    def split_chunks(self, lengths: list[int]) -> "list[ScanInputs]":
        """Pieces of so many chunks each, all of which a gradient flows back through at once: that of a slice is as
        long as what it was cut from."""
        parts = [[None] * len(lengths) if t is None else t.split(lengths) for t in self._by_chunk()]
        return [self._with_chunks(part) for part in zip(*parts, strict=True)]

    def _by_chunk(self) -> list[torch.Tensor | None]:
        return [*list(self)[:8], self.mix]

    def _with_chunks(self, by_chunk) -> "ScanInputs":
        *first, mix = by_chunk
        return ScanInputs(*first, *list(self)[8:-1], mix)


class ScanResult(NamedTuple):
    """Output (N, G, b_q, D), the state behind the last chunk, the inner losses (N, G, b) or None, and the weights
    that are handed out on the way, per layer (J, G, D_in, D_out), or () for none."""

    output: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    surprise: torch.Tensor | None
    kept: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, results: Sequence[torch.Tensor], inputs: "ScanInputs", options: "ScanOptions") -> "ScanResult":
        """From [output, weights and momentum (if written), weights handed out, surprise (if asked for)]."""
        output, *state = results
        surprise = state.pop() if options.surprise else None
        if not options.write:
            state = [*inputs.weights, *inputs.momentum]
        depth = options.depth
        return cls(output, tuple(state[:depth]), tuple(state[depth : 2 * depth]), surprise, tuple(state[2 * depth :]))
