# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory network M, the gradient of its inner loss, and the derivative of that gradient.

    M(x) = x + LN(gelu(... gelu(x W_1) ...) W_L)        residual and LN can be absent
    l(W; k, v) = |M(k) - v|^2                            Titans, eq. 12
    l(W; k, v) = -<M(k), v>                              Memory Caching, eq. 30

The gradient of l with respect to W_l is a sum over tokens of outer products a_l^T g_l, of the layer's input a_l and
the back-propagated error g_l; these *factors* are all that is ever computed, the gradient itself is not formed.

Shapes: G rows times heads, b tokens, D_l width of layer l's input; weights (G, D_l, D_{l+1}), tokens (G, b, D_l).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .state_pair import Products


# gelu(z) = z sigmoid(w), w = z (_LINEAR + _CUBIC z^2): the tanh form, with one sigmoid where tanh costs several.
_LINEAR = 2 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _LINEAR
# y s (1 - s) in one pass.
_sigmoid_backward = torch.ops.aten.sigmoid_backward


class InnerNetwork(NamedTuple):
    """What the weights do not say about M and its inner loss.

    Attributes:
        residual: whether M(x) contains x.
        norm_weight, norm_bias: LN's scale and shift, (G, 1, D), or None: no LN.
        norm_eps: LN's epsilon.
        products: how matrix products are taken.
        dot: whether the inner loss is -<M(k), v>, whose error -v depends on no weight.
    """

    residual: bool
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    norm_eps: float
    products: Products
    dot: bool = False

    def map_norm(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "InnerNetwork":
        """With ``fn`` applied to LN's scale and shift, where there are any."""
        if self.norm_weight is None:
            return self
        return self._replace(norm_weight=fn(self.norm_weight), norm_bias=fn(self.norm_bias))


class Normalized(NamedTuple):
    """A layer normalisation's values: x_hat (..., D) and 1 / sigma (..., 1)."""

    x_hat: torch.Tensor
    rstd: torch.Tensor

    @classmethod
    def of(cls, f: torch.Tensor, eps: float) -> "Normalized":
        x_hat, _, rstd = torch.native_layer_norm(f, f.shape[-1:], None, None, eps)
        return cls(x_hat, rstd)

    def jacobian(self, y: torch.Tensor) -> torch.Tensor:
        """d x_hat / d f applied to y: the matrix is symmetric, so forward and backward are this one operator."""
        # LN's own backward, told that x_hat is its input: half the rounding error of what it computes from f.
        mean, rstd, mask = torch.zeros_like(self.rstd), torch.ones_like(self.rstd), [True, False, False]
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(y, self.x_hat, y.shape[-1:], mean, rstd, None, None, mask)[0] * self.rstd


class Hidden(NamedTuple):
    """A hidden layer's activation gelu(z), its slope and its curvature, as far as they are needed."""

    value: torch.Tensor
    slope: torch.Tensor | None
    curvature: torch.Tensor | None


class Factors(NamedTuple):
    """The inner gradient of each token, with what its own derivative needs.

    Attributes:
        a: inputs of the layers, a[0] = k; a[l] (G, b, D_l).
        g: errors of the layers, d loss / d z_l, g[l] (G, b, D_{l+1}).
        hidden: the hidden layers' activations.
        p: errors of the hidden layers before the activation's slope, g[l] = p[l] * gelu'(z[l]).
        norm: LN's intermediate values, or None.
        error: d loss / d M(k), (G, b, D).
    """

    a: list[torch.Tensor]
    g: list[torch.Tensor]
    hidden: list[Hidden]
    p: list[torch.Tensor]
    norm: Normalized | None
    error: torch.Tensor


def gelu(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def gelu_alone(z: torch.Tensor) -> Hidden:
    """gelu(z); like the next two, not for autograd: written over its own intermediate values."""
    return Hidden(_gate(z).mul_(z), None, None)


def gelu_and_slope(z: torch.Tensor) -> Hidden:
    """gelu(z) and gelu'(z)."""
    s = _gate(z)
    s_slope = _sigmoid_backward(_gate_slope(z), s)
    return Hidden(z * s, torch.addcmul(s, z, s_slope), None)


def gelu_slope_and_curvature(z: torch.Tensor) -> Hidden:
    """gelu(z), gelu'(z) and gelu''(z)."""
    s, w_slope = _gate(z), _gate_slope(z)
    s_slope = _sigmoid_backward(w_slope, s)
    value, slope = z * s, torch.addcmul(s, z, s_slope)
    # gelu'' = 2 s' + z s'' with s'' = s' ((1 - 2 s) w' + w'' / w'), and z w'' = 2 (w' - _LINEAR).
    bend = torch.addcmul(w_slope, w_slope, s, value=-2).mul_(z)
    bend.add_(4).add_(w_slope.reciprocal_(), alpha=-2 * _LINEAR)
    return Hidden(value, slope, bend.mul_(s_slope))


def _gate(z: torch.Tensor) -> torch.Tensor:
    """sigmoid(w)."""
    return _parabola(z, _CUBIC).mul_(z).sigmoid_()


def _gate_slope(z: torch.Tensor) -> torch.Tensor:
    """w'."""
    return _parabola(z, 3 * _CUBIC)


def _parabola(z: torch.Tensor, square: float) -> torch.Tensor:
    """_LINEAR + square z^2, in one pass."""
    return torch.addcmul(z.new_full((), _LINEAR), z, z, value=square)


def output_of(network: InnerNetwork, x: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, Normalized | None]:
    """M(x) from the last layer's result f, and LN's intermediate values."""
    norm = None
    if network.norm_weight is not None:
        norm = Normalized.of(f, network.norm_eps)
        f = norm.x_hat
    return answer_of(network, x, f), norm


def answer_of(network: InnerNetwork, x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """M(x) from LN's x_hat, or without LN from the last layer's result."""
    if network.norm_weight is not None:
        f = f * network.norm_weight + network.norm_bias
    return x + f if network.residual else f


def inner_gradient(
    network: InnerNetwork,
    weights: list[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    activate: Callable[[torch.Tensor], Hidden] = gelu_and_slope,
) -> Factors:
    """The factors of u_t = grad_W l(W; k_t, v_t) for each token at the given weights.

    Args:
        weights: per layer, as products take them.
        activate: what a hidden layer does; the default serves where the factors are not differentiated.
    """
    mm, a, hidden = network.products.mm, [k], []
    for w in weights[:-1]:
        hidden.append(activate(mm(a[-1], w)))
        a.append(hidden[-1].value)
    error, norm = _error(network, weights[-1], a, v)
    g = [error if norm is None else norm.jacobian(error * network.norm_weight)]
    p = []
    for w, layer in zip(reversed(weights[1:]), reversed(hidden), strict=True):
        p.insert(0, mm(g[0], w.mT))
        g.insert(0, p[0] * layer.slope)
    return Factors(a, g, hidden, p, norm, error)


def _error(network: InnerNetwork, last: torch.Tensor, a: list[torch.Tensor], v: torch.Tensor):
    """d loss / d M(k), and LN's intermediate values: of M(k) itself no more than they need."""
    if network.dot and network.norm_weight is None:
        return -v, None
    f = network.products.mm(a[-1], last)
    if network.dot:
        return -v, Normalized.of(f, network.norm_eps)
    output, norm = output_of(network, a[0], f)
    return 2 * (output - v), norm


def inner_losses(network: InnerNetwork, last: torch.Tensor, factors: Factors, v: torch.Tensor) -> torch.Tensor:
    """l(W; k_t, v_t), (G, b), given the factors and the last layer's weights as products take them."""
    if not network.dot:
        return 0.25 * factors.error.square().sum(-1)
    output, _ = output_of(network, factors.a[0], network.products.mm(factors.a[-1], last))
    return -torch.linalg.vecdot(output, v)


class InnerAdjoint(NamedTuple):
    """Gradients of an outer loss through `inner_gradient`.

    Attributes:
        k, v: (G, b, D).
        weights: per layer the pairs (x, r) of whose x^T r the gradient of W is the sum; none where there is none.
        norm_weight, norm_bias: summed over tokens, (G, 1, D) or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    weights: list[list[tuple[torch.Tensor, torch.Tensor]]]
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None


def inner_gradient_adjoint(
    network: InnerNetwork,
    weights: list[torch.Tensor],
    factors: Factors,
    a_bar: list[torch.Tensor],
    g_bar: list[torch.Tensor],
) -> InnerAdjoint:
    """Back-propagates through the inner gradient (hence second derivatives of M).

    Args:
        factors: computed with `gelu_slope_and_curvature`.
        a_bar, g_bar: gradients of the outer loss with respect to the factors; they are overwritten.
    """
    add_ = network.products.add_
    updates: list[list] = [[] for _ in weights]
    z_bar = []
    # Upwards through g_l = (g_{l+1} W_{l+1}^T) * gelu'(z_l).
    for layer, (hidden, p) in enumerate(zip(factors.hidden, factors.p, strict=True)):
        z_bar.append(g_bar[layer] * (p * hidden.curvature))
        p_bar = g_bar[layer].mul_(hidden.slope)
        updates[layer + 1].append((p_bar, factors.g[layer + 1]))
        add_(g_bar[layer + 1], p_bar, weights[layer + 1])
    top = _error_adjoint(network, factors, g_bar[-1])
    # Downwards through z_l = a_l W_l, a_{l+1} = gelu(z_l).
    z_bar.append(top.f_bar)
    for layer in reversed(range(len(weights))):
        if z_bar[layer] is not None:
            updates[layer].append((factors.a[layer], z_bar[layer]))
            add_(a_bar[layer], z_bar[layer], weights[layer].mT)
        if layer:
            z_bar[layer - 1].addcmul_(a_bar[layer], factors.hidden[layer - 1].slope)
    k_bar = a_bar[0] + top.output_bar if network.residual and top.output_bar is not None else a_bar[0]
    return InnerAdjoint(k_bar, top.v_bar, updates, top.norm_weight, top.norm_bias)


class _ErrorAdjoint(NamedTuple):
    """``f_bar`` and ``output_bar`` are None where g_L does not depend on f, or only through LN's Jacobian."""

    v_bar: torch.Tensor
    f_bar: torch.Tensor | None
    output_bar: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None


def _error_adjoint(network: InnerNetwork, factors: Factors, g_bar: torch.Tensor) -> _ErrorAdjoint:
    """Through g_L = LN'(error) with the error 2 (M - v) or -v, M = k + LN(f), back to v, f and M."""
    norm = factors.norm
    if norm is None:
        output_bar = None if network.dot else 2 * g_bar
        return _ErrorAdjoint(-g_bar if network.dot else -output_bar, output_bar, output_bar, None, None)
    scaled = factors.error * network.norm_weight
    scaled_bar = norm.jacobian(g_bar)
    weight_bar, weight = scaled_bar * factors.error, norm.rstd / g_bar.shape[-1]
    # g_L depends on f directly through the error, and through x_hat and 1 / sigma in LN's Jacobian.
    along, output_bar, bias_bar = weight * _dot(scaled, norm.x_hat), None, None
    if network.dot:
        v_bar, x_hat_bar = -scaled_bar * network.norm_weight, -along * g_bar
    else:
        output_bar = 2 * scaled_bar * network.norm_weight
        weight_bar.addcmul_(output_bar, norm.x_hat)
        v_bar, bias_bar = -output_bar, output_bar.sum(-2, keepdim=True)
        x_hat_bar = (output_bar * network.norm_weight).addcmul_(g_bar, along, value=-1)
    x_hat_bar.addcmul_(scaled, weight * _dot(g_bar, norm.x_hat), value=-1)
    f_bar = norm.jacobian(x_hat_bar).addcmul_(norm.x_hat, weight * _dot(g_bar, factors.g[-1]), value=-1)
    return _ErrorAdjoint(v_bar, f_bar, output_bar, weight_bar.sum(-2, keepdim=True), bias_bar)


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(..., D) each -> (..., 1)."""
    return torch.linalg.vecdot(x, y).unsqueeze(-1)
