# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The scalars by which incoming weights, incoming momentum and inner gradients enter each weight inside a chunk.

    W_t = c_t W_in + d_t S_in - sum_{i<=t} A_{t,i} u_i          (+ (1 - c_t) W_0 where forgetting goes to the start)
    S_t = m_t S_in            - sum_{i<=t} E_{t,i} u_i

They follow from unrolling Titans, eq. 13-14, with u_i taken at the chunk's start (eq. 16). Products of gates are
formed as products over the segment itself: neither ratios nor logarithms, hence exact where a gate is 0, and so are
their gradients.

Where the write *slides* over the last two tokens (`swla`; Memory Caching, eq. 28) a token's weights take the pair
before it with eta_t, and S_t is its own pair: E_{t,i} = [i = t], m = 0, and with L_{t,s} = prod_{s<j<=t} (1 - alpha_j)

    A_{t,i} = L_{t,i} theta_i + L_{t,i+1} eta_{i+1}          d_t = L_{t,1} eta_1

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
        momentum: prod_{i<j<=t} eta_j at [t, i]; None where the write slides.
    """

    kept: torch.Tensor
    momentum: torch.Tensor | None


class ChunkCoefficients(NamedTuple):
    """The coefficients of a chunk, and the products they are made of."""

    read: ReadCoefficients
    end: EndCoefficients
    products: GateProducts


def chunk_coefficients(
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    num_queries: int,
    full: torch.Tensor | None,
    sliding: bool = False,
) -> ChunkCoefficients:
    """The coefficients of chunks of b tokens; their derivative is `chunk_coefficients_adjoint`.

    Args:
        theta, alpha, eta: step size, forgetting and momentum decay, (..., b); where the write slides, the weight of
            the token's own pair, forgetting, and the weight of the pair before it.
        num_queries: b_q, the last tokens of each chunk that are read.
        full: (...) bool, chunks whose update takes place; elsewhere the update is the identity. None: all of them.
        sliding: whether the write slides over the last two tokens.
    """
    kept = _segment_products(1 - alpha)
    c = kept[..., 0] * (1 - alpha[..., :1])
    if sliding:
        momentum, E, m = None, torch.zeros_like(theta), torch.zeros_like(c[..., 0])
        E[..., -1] = 1
        # At [t, s]: what W_t has of the pair in front of token s.
        before = kept * eta.unsqueeze(-2)
        A, d = torch.addcmul(F.pad(before[..., 1:], (0, 1)), kept, theta.unsqueeze(-2)), before[..., 0]
    else:
        momentum = _segment_products(eta)
        E, m = _past_coefficients(momentum, theta, eta)
        A, d = kept @ E, (kept @ m.unsqueeze(-1)).squeeze(-1)
        E, m = E[..., -1, :], m[..., -1]
    end, products = EndCoefficients(c[..., -1], d[..., -1], m, A[..., -1, :], E), GateProducts(kept, momentum)
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
        products: what it returned; they say whether the write slides.
        read_bar, end_bar: an outer loss's gradients by the coefficients; ``end_bar`` None: no update took place.

    Returns:
        The gradients of theta, alpha and eta, (..., b).
    """
    kept, momentum = products
    idle = theta.shape[-1] - read_bar.c.shape[-1]
    c_bar, d_bar = F.pad(read_bar.c, (idle, 0)), F.pad(read_bar.d, (idle, 0))
    A_bar = F.pad(read_bar.A, (0, 0, idle, 0))
    if end_bar is not None:
        if full is not None:
            end_bar = EndCoefficients(*(torch.where(_like(full, x), x, 0.0) for x in end_bar))
        c_bar[..., -1] += end_bar.c
        d_bar[..., -1] += end_bar.d
        A_bar[..., -1, :] += end_bar.A
    if momentum is None:
        before_bar = torch.cat([d_bar.unsqueeze(-1), A_bar[..., :-1]], -1)
        theta_bar, eta_bar = (A_bar * kept).sum(-2), (before_bar * kept).sum(-2)
        kept_bar = torch.addcmul(A_bar * theta.unsqueeze(-2), before_bar, eta.unsqueeze(-2))
        return theta_bar, _forgetting_adjoint(kept, kept_bar, c_bar, alpha), eta_bar
    E, m = _past_coefficients(momentum, theta, eta)
    # [d, A] = kept @ [m, E]
    E_bar, m_bar = kept.mT @ A_bar, (kept.mT @ d_bar.unsqueeze(-1)).squeeze(-1)
    if end_bar is not None:
        m_bar[..., -1] += end_bar.m
        E_bar[..., -1, :] += end_bar.E
    kept_bar = A_bar @ E.mT + d_bar.unsqueeze(-1) * m.unsqueeze(-2)
    # m is the first column times the first token's own gate, as c is; E the momentum times theta.
    momentum_bar, first_eta = E_bar * theta.unsqueeze(-2), (m_bar * momentum[..., 0]).sum(-1)
    momentum_bar[..., 0] += m_bar * eta[..., :1]
    theta_bar, alpha_bar = (E_bar * momentum).sum(-2), _forgetting_adjoint(kept, kept_bar, c_bar, alpha)
    return theta_bar, alpha_bar, _segment_products_adjoint(momentum, momentum_bar, first_eta)


def _past_coefficients(momentum: torch.Tensor, theta: torch.Tensor, eta: torch.Tensor):
    """E (..., b, b) and m (..., b) of momentum that decays."""
    return momentum * theta.unsqueeze(-2), momentum[..., 0] * eta[..., :1]


def _forgetting_adjoint(kept: torch.Tensor, kept_bar: torch.Tensor, c_bar: torch.Tensor, alpha: torch.Tensor):
    """The gradient of alpha, given those of ``kept``, which is overwritten, and of c."""
    first_kept = (c_bar * kept[..., 0]).sum(-1)
    kept_bar[..., 0] += c_bar * (1 - alpha[..., :1])
    return -_segment_products_adjoint(kept, kept_bar, first_kept)


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
