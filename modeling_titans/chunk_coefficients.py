# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The scalars by which incoming weights, incoming momentum and inner gradients enter each weight inside a chunk.

    W_t = c_t W_in + d_t S_in - sum_{i<=t} A_{t,i} u_i          (+ (1 - c_t) W_0 where forgetting goes to the start)
    S_t = m_t S_in            - sum_{i<=t} E_{t,i} u_i

They follow from unrolling Titans, eq. 13-14, with u_i taken at the chunk's start (eq. 16). Products of gates are
formed as products over the segment itself: neither ratios nor logarithms, hence exact where a gate is 0, and so are
their gradients.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable


class ChunkCoefficients(NamedTuple):
    """Coefficients for reading inside a chunk and for the update at its end (b tokens in a chunk, b_q of them read).

    Attributes:
        c, d: (..., b_q) at the tokens that are read.
        A: (..., b_q, b) likewise.
        c_end, d_end, m_end: (...) at the chunk's last token.
        A_end, E_end: (..., b) likewise.
    """

    c: torch.Tensor
    d: torch.Tensor
    A: torch.Tensor
    c_end: torch.Tensor
    d_end: torch.Tensor
    m_end: torch.Tensor
    A_end: torch.Tensor
    E_end: torch.Tensor


class _SegmentProducts(torch.autograd.Function):
    """P_{t,s} = prod_{s<j<=t} f_j for s <= t, else 0."""

    @staticmethod
    def forward(ctx, f: torch.Tensor) -> torch.Tensor:
        b = f.shape[-1]
        later = torch.ones(b, b, dtype=torch.bool, device=f.device).tril(-1)
        products = torch.where(later, f.unsqueeze(-1), 1.0).cumprod(-2).tril()
        ctx.save_for_backward(products)
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        # dP_{t',s} / df_t = P_{t',t} P_{t-1,s} for s < t <= t': no division, so f_t = 0 is no exception.
        (products,) = ctx.saved_tensors
        reached = products.mT @ grad.tril()
        return torch.cat(
            [torch.zeros_like(grad[..., :1, 0]), (reached[..., 1:, :] * products[..., :-1, :]).sum(-1)], -1
        )


def chunk_coefficients(
    theta: torch.Tensor, alpha: torch.Tensor, eta: torch.Tensor, num_queries: int, full: torch.Tensor | None
) -> ChunkCoefficients:
    """The coefficients of chunks of b tokens, differentiable in the gates.

    Args:
        theta, alpha, eta: step size, forgetting and momentum decay, (..., b).
        num_queries: b_q, the last tokens of each chunk that are read.
        full: (...) bool, chunks whose update takes place; elsewhere the update is the identity. None: all of them.
    """
    momentum = _SegmentProducts.apply(eta)
    kept = _SegmentProducts.apply(1 - alpha)
    E = momentum * theta.unsqueeze(-2)
    A = kept @ E
    m = momentum[..., 0] * eta[..., :1]
    c = kept[..., 0] * (1 - alpha[..., :1])
    d = (kept @ m.unsqueeze(-1)).squeeze(-1)
    end = [c[..., -1], d[..., -1], m[..., -1], A[..., -1, :], E[..., -1, :]]
    if full is not None:
        identity = (1.0, 0.0, 1.0, 0.0, 0.0)
        masks = (full, full, full, full.unsqueeze(-1), full.unsqueeze(-1))
        end = [torch.where(mask, x, other) for mask, x, other in zip(masks, end, identity, strict=True)]
    first = theta.shape[-1] - num_queries
    return ChunkCoefficients(c[..., first:], d[..., first:], A[..., first:, :], *end)
