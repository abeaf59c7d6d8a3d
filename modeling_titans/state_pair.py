# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer's weights and momentum side by side in one tensor, so that one matrix product serves both.

What a chunk does to a layer is bilinear, in reading and in writing alike: tokens x at the layer's input and r at its
output meet W and S with two coefficients each,

    x_t (c_t W + d_t S) r_t^T

The coefficients multiply whichever of x and r is narrower: a memory's hidden width is a multiple of its head
dimension, and scaling is then cheap beside the products.

Shapes: G rows times heads, b tokens; a layer of D_in inputs and D_out outputs; coefficients (G, b, 2).
"""

from typing import NamedTuple

import torch


class Products(NamedTuple):
    """How matrix products are taken.

    Attributes:
        dtype: what operands are rounded to, or None: products in the operands' own dtype. Sums are returned in
            ``result`` either way.
        result: dtype of every result.
    """

    dtype: torch.dtype | None
    result: torch.dtype

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """x as products take it: made once where x enters several."""
        return x if self.dtype is None else x.to(self.dtype)

    def mm(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(G, m, k), (G, k, n) -> (G, m, n)."""
        if self.dtype is None:
            return torch.bmm(x, y)
        return torch.bmm(self.operand(x), self.operand(y)).to(self.result)

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """As `mm`, of any leading dimensions, for autograd."""
        if self.dtype is None:
            return x @ y
        return (self.operand(x) @ self.operand(y)).to(self.result)

    def add_(self, z: torch.Tensor, x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
        """z + alpha x y, in place of z."""
        if self.dtype is None:
            return z.baddbmm_(x, y, alpha=alpha)
        return z.add_(torch.bmm(self.operand(x), self.operand(y)), alpha=alpha)


def product_dtype(x: torch.Tensor, result: torch.dtype) -> torch.dtype | None:
    """What operands of products are rounded to where tokens x read weights without writing, for results in ``result``.

    On an accelerator tokens in 16 bits, as its kernels round them; on a processor what the user has allowed.
    """
    if result != torch.float32:
        return None
    if x.device.type != "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return x.dtype
    return torch.bfloat16 if float32_matmul_precision() == "medium" else None


# Compilers cannot trace torch's getter; the answer is settled before a model runs.
@torch.compiler.assume_constant_result
def float32_matmul_precision() -> str:
    return torch.get_float32_matmul_precision()


def scaled(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """[c x, d x, ...]: (..., b, D), (..., b, n) -> (..., b, n D)."""
    return (x.unsqueeze(-2) * coefficients.unsqueeze(-1)).flatten(-2)


def combined(y: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """c y_1 + d y_2 of y = [y_1, y_2]: (..., b, 2 D), (..., b, 2) -> (..., b, D)."""
    first, second = y.chunk(2, -1)
    return torch.mul(first, coefficients[..., :1]).addcmul_(second, coefficients[..., 1:])


class StatePair(NamedTuple):
    """The layout of one layer's pair X (G, 2 * narrow, wide): [W; S], or [W^T; S^T] if ``transposed``.

    Attributes:
        transposed: whether D_in > D_out.
    """

    transposed: bool

    def join(self, weights: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        """(G, D_in, D_out) each -> X, a new tensor."""
        return torch.cat([weights.mT, momentum.mT] if self.transposed else [weights, momentum], -2)

    def weights(self, pair: torch.Tensor) -> torch.Tensor:
        """X -> W (..., D_in, D_out), a view."""
        return self.oriented(pair.chunk(2, -2)[0])

    def momentum(self, pair: torch.Tensor) -> torch.Tensor:
        """X -> S (..., D_in, D_out), a view."""
        return self.oriented(pair.chunk(2, -2)[1])

    def oriented(self, x: torch.Tensor) -> torch.Tensor:
        """From (D_in, D_out) to a half of X, or back: a view."""
        return x.mT if self.transposed else x

    def apply(self, products: Products, x, coefficients, pair) -> tuple[torch.Tensor, torch.Tensor]:
        """x (c W + d S), and what `apply_adjoint` wants to know of it."""
        if self.transposed:
            y = products.mm(x, pair.mT)
            return combined(y, coefficients), y
        kept = scaled(x, coefficients)
        return products.mm(kept, pair), kept

    def apply_adjoint(self, products: Products, x, r, coefficients, pair, kept):
        """r (c W + d S)^T, the gradients of the coefficients (G, b, 2), and the factors of X's own: left^T right."""
        if self.transposed:
            left = scaled(r, coefficients)
            return products.mm(left, pair), _dot_halves(kept, r), (left, x)
        y = products.mm(r, pair.mT)
        return combined(y, coefficients), _dot_halves(y, x), (kept, r)

    def outer(self, x, r, coefficients) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of [x^T c r; x^T d r] as X holds it: left^T right."""
        return (scaled(r, coefficients), x) if self.transposed else (scaled(x, coefficients), r)

    def add_to_weights_(self, products: Products, pair: torch.Tensor, factors) -> None:
        """Adds the sum of x^T r over ``factors``, pairs (x, r), to W."""
        total = None
        for x, r in factors:
            left, right = (r, x) if self.transposed else (x, r)
            total = products.mm(left.mT, right) if total is None else products.add_(total, left.mT, right)
        if total is not None:
            pair.chunk(2, -2)[0].add_(total)


def _dot_halves(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[<y_1, x>, <y_2, x>] of y = [y_1, y_2]: (..., b, 2 D), (..., b, D) -> (..., b, 2)."""
    return torch.linalg.vecdot(y.unflatten(-1, (2, -1)), x.unsqueeze(-2))
