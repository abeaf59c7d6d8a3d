# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading kept memories: sums of their answers, and their gradients (Memory Caching, eq. 7, 9 and 17).

Where all memories are read the arguments alone are kept, and the answers computed again in the backward: what a long
text costs in memory does not grow with the number of memories that a token reads.

Shapes: G rows times heads, T tokens, D head dimension, K kept memories.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .inner_network import Hidden, InnerNetwork, Normalized, gelu_alone, gelu_and_slope, output_of
from .short_calls import is_short


# Elements of a hidden layer that are alive at once: on a CPU few enough to stay in a core's cache.
CPU_ELEMENTS, ACCELERATOR_ELEMENTS = 2**17, 2**26


class Answers(NamedTuple):
    """M(x) for tokens x (G, n, D), and what its adjoint needs: the layers' inputs, their activations, LN."""

    output: torch.Tensor
    inputs: list[torch.Tensor]
    hidden: list[Hidden]
    norm: Normalized | None


class AnswersAdjoint(NamedTuple):
    """Gradients of x, and of LN's scale and shift (G, 1, D) or None."""

    x: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None


def answers(
    network: InnerNetwork,
    weights: Sequence[torch.Tensor],
    x: torch.Tensor,
    activate: Callable[[torch.Tensor], Hidden] = gelu_and_slope,
) -> Answers:
    """M_W(x) at weights (G, D_in, D_out) per layer; where there is neither adjoint nor autograd, `gelu_alone` does."""
    inputs, hidden = hidden_layers(network, weights, x, activate)
    output, norm = output_of(network, x, network.products.mm(inputs[-1], weights[-1]))
    return Answers(output, inputs, hidden, norm)


def hidden_layers(
    network: InnerNetwork, weights: Sequence[torch.Tensor], x: torch.Tensor, activate: Callable[[torch.Tensor], Hidden]
) -> tuple[list[torch.Tensor], list[Hidden]]:
    """The inputs of all layers, and the hidden ones' activations."""
    inputs, hidden = [x], []
    for w in weights[:-1]:
        hidden.append(activate(network.products.mm(inputs[-1], w)))
        inputs.append(hidden[-1].value)
    return inputs, hidden


def answers_adjoint(
    network: InnerNetwork,
    weights: Sequence[torch.Tensor],
    given: Answers,
    output_bar: torch.Tensor,
    weights_bar: Sequence[torch.Tensor],
) -> AnswersAdjoint:
    """Back-propagates through `answers`; what the weights' gradients come to is added to ``weights_bar``."""
    products, z_bar, norm_weight, norm_bias = network.products, output_bar, None, None
    if given.norm is not None:
        norm_weight = (output_bar * given.norm.x_hat).sum(-2, keepdim=True)
        norm_bias = output_bar.sum(-2, keepdim=True)
        z_bar = given.norm.jacobian(output_bar * network.norm_weight)
    for layer in reversed(range(len(weights))):
        products.add_(weights_bar[layer], given.inputs[layer].mT, z_bar)
        z_bar = products.mm(z_bar, weights[layer].mT)
        if layer:
            z_bar.mul_(given.hidden[layer - 1].slope)
    x_bar = z_bar.add_(output_bar) if network.residual else z_bar
    return AnswersAdjoint(x_bar, norm_weight, norm_bias)


def read_kept(
    q: torch.Tensor,
    shares: torch.Tensor,
    weights: Sequence[torch.Tensor],
    network: InnerNetwork,
    spans: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """sum_i shares_i M^(i)(q), every memory for all the tokens that may read it.

    Args:
        q: (G, T, D).
        shares: (G, T, K).
        weights: per layer (B, K, H, D_in, D_out), on any device; G = B H.
        network: M for G rows.
        spans: for each memory the tokens outside of which all shares are zero.

    Returns:
        (G, T, D), differentiable in every tensor.
    """
    if is_short(q.shape[1]) and all(w.device == q.device for w in weights):
        return _read_side_by_side(q, shares, weights, network)
    return _KeptRead.apply(network, tuple(spans), q, shares, network.norm_weight, network.norm_bias, *weights)


def _read_side_by_side(q: torch.Tensor, shares: torch.Tensor, weights, network: InnerNetwork) -> torch.Tensor:
    """`read_kept` for a few tokens: all memories in the same few operations, their weights where they lie."""
    batch_size, places, num_heads = weights[0].shape[:3]

    def spread(t: torch.Tensor) -> torch.Tensor:
        """(B H, ...) -> (B K H, ...)."""
        t = t.unflatten(0, (batch_size, 1, num_heads))
        return t.expand(-1, places, *t.shape[2:]).flatten(0, 2)

    given = answers(network.map_norm(spread), [w.flatten(0, 2) for w in weights], spread(q), gelu_alone).output
    by_memory = given.unflatten(0, (batch_size, places, num_heads)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return (shares.unsqueeze(-2) @ by_memory).squeeze(-2)


class _KeptRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, network, spans, q, shares, norm_weight, norm_bias, *weights):
        ctx.save_for_backward(q, shares, norm_weight, norm_bias, *weights)
        ctx.facts = network._replace(norm_weight=None, norm_bias=None), spans
        output = torch.zeros_like(q)
        for i, layers, blocks in _visits(spans, weights, q):
            for at in blocks:
                output[:, at].addcmul_(answers(network, layers, q[:, at], gelu_alone).output, shares[:, at, i, None])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar):
        # Whoever calls it: a state in float32 is differentiated in float32.
        with torch.autocast(output_bar.device.type, enabled=False):
            return _gradients(ctx, output_bar)


def _gradients(ctx, output_bar: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, shares, norm_weight, norm_bias, *weights = ctx.saved_tensors
    network, spans = ctx.facts
    network = network._replace(norm_weight=norm_weight, norm_bias=norm_bias)
    q_bar, shares_bar = torch.zeros_like(q), torch.zeros_like(shares)
    weights_bar = [torch.zeros_like(w) for w in weights]
    norm_bar = [None if t is None else torch.zeros_like(t) for t in (norm_weight, norm_bias)]
    for i, layers, blocks in _visits(spans, weights, q):
        layers_bar = [torch.zeros_like(w) for w in layers]
        for at in blocks:
            given, bar = answers(network, layers, q[:, at]), output_bar[:, at]
            shares_bar[:, at, i] = torch.linalg.vecdot(given.output, bar)
            adjoint = answers_adjoint(network, layers, given, bar * shares[:, at, i, None], layers_bar)
            q_bar[:, at] += adjoint.x
            if norm_weight is not None:
                norm_bar[0] += adjoint.norm_weight
                norm_bar[1] += adjoint.norm_bias
        for total, part in zip(weights_bar, layers_bar, strict=True):
            total[:, i] = part.unflatten(0, (total.shape[0], -1))
    return None, None, q_bar, shares_bar, *norm_bar, *weights_bar


def _visits(spans, weights, q: torch.Tensor):
    """Yields memory by memory its number, its layers where q is, and the tokens that read it, in blocks."""
    width = max(w.shape[-1] for w in weights) * q.shape[0]
    size = max((CPU_ELEMENTS if q.device.type == "cpu" else ACCELERATOR_ELEMENTS) // width, 64)
    for i, (begin, stop) in enumerate(spans):
        if begin < stop:
            layers = [w[:, i].to(q.device).flatten(0, 1) for w in weights]
            yield i, layers, [slice(first, min(first + size, stop)) for first in range(begin, stop, size)]
