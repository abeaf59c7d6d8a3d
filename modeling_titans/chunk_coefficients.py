# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The scalars by which incoming weights, incoming momentum and inner gradients enter each weight inside a chunk.

    W_t = c_t W_in + d_t S_in - sum_{i<=t} A_{t,i} u_i          (+ (1 - c_t) W_0 where forgetting goes to the start)
    S_t = m_t S_in            - sum_{i<=t} E_{t,i} u_i

They follow from unrolling Titans, eq. 13-14, with u_i taken at the chunk's start (eq. 16). Products of gates are
formed as products over the segment itself: neither ratios nor logarithms, hence exact where a gate is 0, and so are
their gradients.

Shapes: b tokens in a chunk, of which the last b_q are read; "..." are any leading dimensions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class ReadCoefficients(NamedTuple):
    """Coefficients at the tokens that are read: c, d (..., b_q) and A (..., b_q, b)."""

    c: torch.Tensor
    d: torch.Tensor
    A: torch.Tensor


class EndCoefficients(NamedTuple):
    """Coefficients at the chunk's last token: c, d, m (...) and A, E (..., b)."""

    c: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor
    A: torch.Tensor
    E: torch.Tensor


class GateProducts(NamedTuple):
    """Products of gates between two tokens, (..., b, b), zero above the diagonal.

    Attributes:
        kept: prod_{s<j<=t} (1 - alpha_j) at [t, s].
        momentum: prod_{i<j<=t} eta_j at [t, i].
    """

    kept: torch.Tensor
    momentum: torch.Tensor


class ChunkCoefficients(NamedTuple):
    """The coefficients of a chunk, and the products they are made of."""

    read: ReadCoefficients
    end: EndCoefficients
    products: GateProducts


def chunk_coefficients(
    theta: torch.Tensor, alpha: torch.Tensor, eta: torch.Tensor, num_queries: int, full: torch.Tensor | None
) -> ChunkCoefficients:
    """The coefficients of chunks of b tokens; their derivative is `chunk_coefficients_adjoint`.

    Args:
        theta, alpha, eta: step size, forgetting and momentum decay, (..., b).
        num_queries: b_q, the last tokens of each chunk that are read.
        full: (...) bool, chunks whose update takes place; elsewhere the update is the identity. None: all of them.
    """
    products = GateProducts(_segment_products(1 - alpha), _segment_products(eta))
    E, m, c = _outer_coefficients(products, theta, alpha, eta)
    A, d = products.kept @ E, (products.kept @ m.unsqueeze(-1)).squeeze(-1)
    end = EndCoefficients(c[..., -1], d[..., -1], m[..., -1], A[..., -1, :], E[..., -1, :])
    if full is not None:
        identity = EndCoefficients(1.0, 0.0, 1.0, 0.0, 0.0)
        end = EndCoefficients(*(torch.where(_like(full, x), x, i) for x, i in zip(end, identity, strict=True)))
    first = theta.shape[-1] - num_queries
    return ChunkCoefficients(ReadCoefficients(c[..., first:], d[..., first:], A[..., first:, :]), end, products)


def chunk_coefficients_adjoint(
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    full: torch.Tensor | None,
    products: GateProducts,
    read_bar: ReadCoefficients,
    end_bar: EndCoefficients | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the gates, given those of the coefficients.

    Args:
        theta, alpha, eta, full: what `chunk_coefficients` was given.
        products: what it returned.
        read_bar, end_bar: an outer loss's gradients by the coefficients; ``end_bar`` None: no update took place.

    Returns:
        The gradients of theta, alpha and eta, (..., b).
    """
    kept, momentum = products
    E, m, _ = _outer_coefficients(products, theta, alpha, eta)
    idle = theta.shape[-1] - read_bar.c.shape[-1]
    c_bar, d_bar = F.pad(read_bar.c, (idle, 0)), F.pad(read_bar.d, (idle, 0))
    A_bar = F.pad(read_bar.A, (0, 0, idle, 0))
    if end_bar is not None:
        if full is not None:
            end_bar = EndCoefficients(*(torch.where(_like(full, x), x, 0.0) for x in end_bar))
        c_bar[..., -1] += end_bar.c
        d_bar[..., -1] += end_bar.d
        A_bar[..., -1, :] += end_bar.A
    # [d, A] = kept @ [m, E]
    E_bar, m_bar = kept.mT @ A_bar, (kept.mT @ d_bar.unsqueeze(-1)).squeeze(-1)
    if end_bar is not None:
        m_bar[..., -1] += end_bar.m
        E_bar[..., -1, :] += end_bar.E
    kept_bar = A_bar @ E.mT + d_bar.unsqueeze(-1) * m.unsqueeze(-2)
    # c and m are the first column times the first token's own gate, E the momentum times theta.
    momentum_bar = E_bar * theta.unsqueeze(-2)
    first_kept, first_eta = (c_bar * kept[..., 0]).sum(-1), (m_bar * momentum[..., 0]).sum(-1)
    kept_bar[..., 0] += c_bar * (1 - alpha[..., :1])
    momentum_bar[..., 0] += m_bar * eta[..., :1]
    theta_bar = (E_bar * momentum).sum(-2)
    alpha_bar = -_segment_products_adjoint(kept, kept_bar, first_kept)
    return theta_bar, alpha_bar, _segment_products_adjoint(momentum, momentum_bar, first_eta)


def _outer_coefficients(products: GateProducts, theta: torch.Tensor, alpha: torch.Tensor, eta: torch.Tensor):
    """E (..., b, b), m and c (..., b)."""
    kept, momentum = products
    return momentum * theta.unsqueeze(-2), momentum[..., 0] * eta[..., :1], kept[..., 0] * (1 - alpha[..., :1])


def _segment_products(f: torch.Tensor) -> torch.Tensor:
    """P_{t,s} = prod_{s<j<=t} f_j for s <= t, else 0: (..., b) -> (..., b, b)."""
    b = f.shape[-1]
    later = torch.ones(b, b, dtype=torch.bool, device=f.device).tril(-1)
    return torch.where(later, f.unsqueeze(-1), 1.0).cumprod(-2).tril()


def _segment_products_adjoint(products: torch.Tensor, bar: torch.Tensor, first_bar: torch.Tensor) -> torch.Tensor:
    """The gradient of f (..., b); no product contains f_0, which has ``first_bar`` (...) from elsewhere."""
    # dP_{t',s} / df_t = P_{t',t} P_{t-1,s} for s < t <= t': no division, so f_t = 0 is no exception.
    reached = products.mT @ bar.tril()
    later = (reached[..., 1:, :] * products[..., :-1, :]).sum(-1)
    return torch.cat([first_bar.unsqueeze(-1), later], -1)


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mask if mask.dim() == x.dim() else mask.unsqueeze(-1)
