# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads of a scan as plain functions of PyTorch: what single kernels are held against, in float64.

Nothing here derives anything: gradients are autograd's, those of the inner loss as those of an outer one.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension. A tree is a tensor,
None, or a (named) tuple or list of trees.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from transformers_titans.chunk_coefficients import EndCoefficients, ReadCoefficients
from transformers_titans.chunk_scan import ScanInputs, ScanOptions
from transformers_titans.inner_network import InnerNetwork


def map_tree(function: Callable, tree):
    """The function on each tensor."""
    if tree is None or isinstance(tree, torch.Tensor):
        return tree if tree is None else function(tree)
    mapped = [map_tree(function, item) for item in tree]
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)


def new_leaves(tree):
    """Equal tensors to take gradients of."""
    return map_tree(lambda t: t.detach().clone().requires_grad_(), tree)


def gradients(results, bars, wanted):
    """Of each tensor in ``wanted``, given those of ``results``; all three are trees. Zero for one of no influence."""
    taken = torch.autograd.grad(
        _tensors(results), _tensors(wanted), _tensors(bars), allow_unused=True, materialize_grads=True
    )
    taken = iter(taken)
    return map_tree(lambda _: next(taken), wanted)


def _tensors(tree) -> list[torch.Tensor]:
    found = []
    map_tree(found.append, tree)
    return found


class Factors(NamedTuple):
    """The inner gradient of each token and what it was computed from, by layer.

    Attributes:
        a, z: inputs and results of the layers, for the key: z_l = a_l W_l.
        g: the inner loss's gradients by z.
        p: its gradients by a, but for the first layer.
    """

    a: tuple[torch.Tensor, ...]
    g: tuple[torch.Tensor, ...]
    z: tuple[torch.Tensor, ...]
    p: tuple[torch.Tensor, ...]


def inner_factors(network: InnerNetwork, weights, k: torch.Tensor, v: torch.Tensor) -> Factors:
    """Of the inner loss (Titans, eq. 12, or Memory Caching, eq. 30) at weights that require a gradient."""
    a, z = [k], [k @ weights[0]]
    for w in weights[1:]:
        a.append(_gelu(z[-1]))
        z.append(a[-1] @ w)
    output = _output(network, k, z[-1])
    loss = -(output * v).sum() if network.dot else (output - v).square().sum()
    errors = torch.autograd.grad(loss, [*z, *a[1:]], create_graph=True)
    return Factors(tuple(a), errors[: len(z)], tuple(z), errors[len(z) :])


def read(
    network: InnerNetwork, q: torch.Tensor, weights, momentum, a, g, coefficients: ReadCoefficients, forget_to
) -> torch.Tensor:
    """M_{W_t}(q_t) (Titans, eq. 15) for all chunks at once, (N, G, b_q, D).

    Args:
        weights, momentum: states at the chunks' starts, by layer (N, G, D_in, D_out).
        a, g: of the chunks' tokens, by layer (N, G, b, D_in) and (N, G, b, D_out).
        coefficients: c, d (N, G, b_q) and A (N, G, b_q, b).
        forget_to: by layer (G, D_in, D_out), or None.
    """
    c, d, A = coefficients.c.unsqueeze(-1), coefficients.d.unsqueeze(-1), coefficients.A
    x = q
    for layer in range(len(weights)):
        r = c * (x @ weights[layer]) + d * (x @ momentum[layer]) - (A * (x @ a[layer].mT)) @ g[layer]
        if forget_to is not None:
            r = r + (1 - c) * (x @ forget_to[layer])
        x = _gelu(r)
    return _output(network, q, r)


class Written(NamedTuple):
    """Of N chunks: states at their starts and factors, (N, G, ..), and the state behind the last one, (G, ..)."""

    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    factors: Factors
    last_weights: tuple[torch.Tensor, ...]
    last_momentum: tuple[torch.Tensor, ...]


def write(inputs: ScanInputs, options: ScanOptions, end: EndCoefficients) -> Written:
    """Restarts and writes one chunk after another (Titans, eq. 13, 14 and 16); weights require a gradient."""
    network, state, per_chunk = inputs.network(options), (inputs.weights, inputs.momentum), []
    for n in range(inputs.k.shape[0]):
        if inputs.restart is not None:
            starts = (inputs.start_weights, inputs.start_momentum)
            state = tuple(_where(inputs.restart[n], *group) for group in zip(starts, state, strict=True))
        factors = inner_factors(network, state[0], inputs.k[n], inputs.v[n])
        per_chunk.append((*state, *factors))
        state = write_chunk(*state, factors.a, factors.g, EndCoefficients(*(x[n] for x in end)), inputs.forget_to)
    weights, momentum, *factors = (
        tuple(torch.stack(chunks) for chunks in zip(*group, strict=True)) for group in zip(*per_chunk, strict=True)
    )
    return Written(weights, momentum, Factors(*factors), *state)


def _where(rows: torch.Tensor, these, others) -> tuple[torch.Tensor, ...]:
    return tuple(torch.where(rows[:, None, None], *pair) for pair in zip(these, others, strict=True))


def write_chunk(weights, momentum, a, g, end: EndCoefficients, forget_to) -> tuple[tuple, tuple]:
    """The state behind a chunk, given that before it, the chunk's factors, and c, d, m (G) and A, E (G, b)."""
    c, d, m = (x[:, None, None] for x in (end.c, end.d, end.m))
    A, E = end.A.unsqueeze(-1), end.E.unsqueeze(-1)
    new_weights, new_momentum = [], []
    for layer, (w, s) in enumerate(zip(weights, momentum, strict=True)):
        new_weights.append(c * w + d * s - a[layer].mT @ (A * g[layer]))
        new_momentum.append(m * s - a[layer].mT @ (E * g[layer]))
        if forget_to is not None:
            new_weights[-1] = new_weights[-1] + (1 - c) * forget_to[layer]
    return tuple(new_weights), tuple(new_momentum)


def _gelu(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def _output(network: InnerNetwork, x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """M(x) from the last layer's result f."""
    if network.norm_weight is not None:
        f = F.layer_norm(f, f.shape[-1:], eps=network.norm_eps) * network.norm_weight + network.norm_bias
    return x + f if network.residual else f
