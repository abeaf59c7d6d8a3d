# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading tokens of a chunk that stays open, without gradients: what decoding does at almost every token.

Weights and momentum are read where they lie and not written. What the open chunk's tokens come to is kept in
`OpenChunk`, so that a token costs its own products and the scores with the others, not theirs again. The recurrence
of the coefficients is linear in what came before, so tokens that follow P others are a chunk of their own whose
incoming W and S have the coefficients of the P others inside (c, d, A, m and E as in `chunk_coefficients`):

    S_t = m_t S_P + ...   =>   [m, E]_t = [m_t [m, E]_P, E_t]
    W_t = c_t W_P + d_t S_P + ...   =>   [d, A]_t = [c_t [d, A]_P + d_t [m, E]_P, A_t]

Where the write slides, S is the last token's pair whatever came before: [m, E]_t = [0, ..., 0, 1].

Shapes: B rows, H heads, D head dimension, P tokens open before the call, n new ones, of which the last n_q are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .chunk_coefficients import chunk_coefficients
from .inner_network import Hidden, InnerNetwork, gelu, inner_gradient, inner_losses, output_of
from .memory_soup import Soup
from .memory_state import OpenChunk


class NewTokens(NamedTuple):
    """The tokens of a call.

    Attributes:
        q: (B, n_q, H, D) queries of the last ones.
        keys: (B, P + n, H, D), those of the open tokens in front.
        v: (B, n, H, D).
        theta, alpha, eta: (B, n, H), as the chunk has them.
    """

    q: torch.Tensor
    keys: torch.Tensor
    v: torch.Tensor
    theta: torch.Tensor
    alpha: torch.Tensor
    eta: torch.Tensor


class OpenRead(NamedTuple):
    """Answers (B, n_q, H, D), inner losses (B, n, H) or None, and what is open behind the call."""

    output: torch.Tensor
    surprise: torch.Tensor | None
    chunk: OpenChunk


class _Coefficients(NamedTuple):
    """c, d (B, H, n_q, 1) and A (B, H, n_q, P + n) where tokens are read; what `OpenChunk` keeps of the last one."""

    c: torch.Tensor
    d: torch.Tensor
    A: torch.Tensor
    kept: torch.Tensor
    mixed: torch.Tensor
    past: torch.Tensor


def empty_chunk(weights: Sequence[torch.Tensor]) -> OpenChunk:
    """The chunk of no token, before weights (B, H, D_in, D_out) per layer."""
    shape = weights[0].shape[:2]
    one, none = weights[0].new_ones(*shape, 1), weights[0].new_zeros(*shape, 1)
    widths = [w.shape[-1] for w in weights]
    inputs = tuple(none.new_zeros(*shape, 0, width) for width in widths[:-1])
    return OpenChunk(inputs, tuple(none.new_zeros(*shape, 0, width) for width in widths), one, none, one)


def read_open_chunk(
    network: InnerNetwork,
    weights: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
    chunk: OpenChunk,
    tokens: NewTokens,
    forget_to: Sequence[torch.Tensor] | None = None,
    real: torch.Tensor | None = None,
    soup: Soup | None = None,
    *,
    sliding: bool = False,
    surprise: bool = False,
) -> OpenRead:
    """Reads new tokens behind the open ones (Titans, eq. 13-16), in the state's dtype; not for autograd.

    Args:
        network: M, with the norm's parameters by row and head, (B * H, 1, D).
        weights, momentum: at the chunk's start, (B, H, D_in, D_out) per layer.
        chunk: the open tokens.
        tokens: the new ones.
        forget_to: (B * H, D_in, D_out) per layer to which forgetting leads; None: to zero.
        real: (B,) rows whose token is one, if there is a single new token; None: all are.
        soup: the kept weights, and the shares, of the mixture of memories that is read; None: no mixture.
        sliding: whether the write slides over the last two tokens.
        surprise: whether to return the inner losses.
    """
    rows, shape = weights[0].shape[0], weights[0].shape[:2]
    layers = [w.flatten(0, 1) for w in weights]
    keys, v, q = (_by_head(t) for t in (tokens.keys, tokens.v, tokens.q))
    factors = inner_gradient(network, layers, keys[:, keys.shape[1] - v.shape[1] :], v, _gelu_and_slope)
    new = [t.unflatten(0, shape) for t in (*factors.a[1:], *factors.g)]
    old = (*chunk.inputs, *chunk.errors)
    if old[0].shape[2]:
        new = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
    inputs, errors = new[: len(layers) - 1], new[len(layers) - 1 :]
    at = _coefficients(chunk, tokens, q.shape[1], real, sliding)
    c, d, A = (t.flatten(0, 1) for t in at[:3])
    own = 1
    if soup is not None:
        own = soup.own
        c, d, A = (own * t for t in (c, d, A))
    x, z = q, q
    for layer, (w, s, g) in enumerate(zip(layers, momentum, errors, strict=True)):
        if layer:
            x = gelu(z)
        a = inputs[layer - 1].flatten(0, 1) if layer else keys
        z = torch.bmm(x, w).mul_(c).addcmul_(torch.bmm(x, s.flatten(0, 1)), d)
        z.baddbmm_(torch.bmm(x, a.mT).mul_(A), g.flatten(0, 1), alpha=-1)
        if forget_to is not None:
            z.baddbmm_((own - c) * x, forget_to[layer])
        if soup is not None:
            soup.add_to_(network.products, layer, x, z)
    output = output_of(network, q, z)[0].unflatten(0, (rows, -1)).transpose(1, 2)
    losses = None
    if surprise:
        losses = inner_losses(network, layers[-1], factors, v).unflatten(0, (rows, -1)).transpose(1, 2)
    return OpenRead(output, losses, OpenChunk(tuple(inputs), tuple(errors), *at[3:]))


def known_chunk(
    network: InnerNetwork,
    weights: Sequence[torch.Tensor],
    tokens: NewTokens,
    real: torch.Tensor,
    sliding: bool = False,
) -> OpenChunk:
    """What pending tokens come to where rows have different numbers of them.

    Args:
        network, weights, sliding: as for `read_open_chunk`.
        tokens: the pending ones in n places; the queries do not matter.
        real: (B, n) places that are taken, in each row the first ones.
    """
    shape, present = weights[0].shape[:2], real[:, None]
    keys, v = _by_head(tokens.keys), _by_head(tokens.v)
    factors = inner_gradient(network, [w.flatten(0, 1) for w in weights], keys, v)
    gates = zip(tokens[3:], (0.0, 0.0, 0.0 if sliding else 1.0), strict=True)
    theta, alpha, eta = (torch.where(present, t.mT, neutral) for t, neutral in gates)
    read, end, _ = chunk_coefficients(theta, alpha, eta, theta.shape[-1], None, sliding)
    # Places behind the last token leave c, m and E as they are, but would add the momentum to the weights once more;
    # where the write slides, it is E that they move.
    count = real.sum(1)[:, None, None]
    mixed = torch.cat([read.d.unsqueeze(-1), read.A], -1)
    mixed = torch.take_along_dim(mixed, (count - 1).clamp(min=0).unsqueeze(-1), 2).squeeze(2)
    a, g = ([t.unflatten(0, shape) for t in group] for group in (factors.a[1:], factors.g))
    if sliding:
        past = (torch.arange(mixed.shape[-1], device=mixed.device) == count).to(mixed.dtype).expand_as(mixed)
    else:
        past = torch.cat([end.m.unsqueeze(-1), end.E], -1)
    return OpenChunk(tuple(a), tuple(g), end.c.unsqueeze(-1), torch.where(count > 0, mixed, 0.0), past)


def in_place_of(chunk: OpenChunk, at: torch.Tensor) -> OpenChunk:
    """A chunk of P + 1 tokens with the last one moved to the place ``at`` (B, P) of its row, or dropped."""

    def put(t: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return torch.where(place, t[:, :, -1:], t[:, :, :-1])

    inputs, errors = (tuple(put(t, at[:, None, :, None]) for t in group) for group in chunk[:2])
    behind = torch.nn.functional.pad(at, (1, 0))[:, None]
    return OpenChunk(inputs, errors, chunk.kept, put(chunk.mixed, behind), put(chunk.past, behind))


def _gelu_and_slope(z: torch.Tensor) -> Hidden:
    """As `gelu_and_slope`, in few operations, each of which costs more than its elements where tokens are few."""
    return Hidden(gelu(z), torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate="tanh"), None)


def _by_head(t: torch.Tensor) -> torch.Tensor:
    """(B, n, H, D) -> (B * H, n, D)."""
    return t.transpose(1, 2).flatten(0, 1)


def _coefficients(
    chunk: OpenChunk, tokens: NewTokens, num_queries: int, real: torch.Tensor | None, sliding: bool
) -> _Coefficients:
    theta, alpha, eta = (t.mT for t in tokens[3:])
    if theta.shape[-1] > 1:
        read, end, _ = chunk_coefficients(theta, alpha, eta, num_queries, None, sliding)
        c, d, m = (t.unsqueeze(-1) for t in end[:3])
        mixed = torch.cat([c * chunk.mixed + d * chunk.past, end.A], -1)
        past = torch.cat([m * chunk.past, end.E], -1)
        c_read, d_read = read.c.unsqueeze(-1), read.d.unsqueeze(-1)
        before = c_read * chunk.mixed.unsqueeze(2) + d_read * chunk.past.unsqueeze(2)
        A = torch.cat([before[..., 1:], read.A], -1)
        return _Coefficients(c_read * chunk.kept.unsqueeze(2), before[..., :1], A, c * chunk.kept, mixed, past)
    c, d, m, own = 1 - alpha, eta, eta, theta
    if sliding:
        m, own = torch.zeros_like(eta), torch.ones_like(theta)
    if real is not None:
        neutral = ((c, 1.0), (d, 0.0), (m, 1.0), (theta, 0.0), (own, 0.0))
        c, d, m, theta, own = (torch.where(real[:, None, None], t, other) for t, other in neutral)
    kept, past = c * chunk.kept, d * chunk.past
    mixed = torch.cat([torch.addcmul(past, c, chunk.mixed), theta], -1)
    past = torch.cat([past if m is d else m * chunk.past, own], -1)
    at = mixed.unsqueeze(2)
    return _Coefficients(kept.unsqueeze(2), at[..., :1], at[..., 1:], kept, mixed, past)
