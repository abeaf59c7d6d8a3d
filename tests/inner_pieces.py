# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory network M, the gradient of its inner loss, and the derivative of that gradient.

    M(x) = x + LN(gelu(... gelu(x W_1) ...) W_L)        residual and LN can be absent
    l(W; k, v) = |M(k) - v|^2                            Titans, eq. 12

The gradient of l with respect to W_l is a sum over tokens of outer products a_l^T g_l, of the layer's input a_l and
the back-propagated error g_l; these *factors* are all that is ever computed, the gradient itself is not formed.

Shapes: G rows times heads, b tokens, D_l width of layer l's input; weights (G, D_l, D_{l+1}), tokens (G, b, D_l).
Every function also takes a leading chunk dimension on all its tensors.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


class InnerNetwork(NamedTuple):
    """What the weights do not say about M.

    Attributes:
        residual: whether M(x) contains x.
        norm_weight, norm_bias: LN's scale and shift, (G, 1, D), or None: no LN.
        norm_eps: LN's epsilon.
    """

    residual: bool
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    norm_eps: float


class Normalized(NamedTuple):
    """A layer normalisation's intermediate values: x_hat (..., D) and 1 / sigma (..., 1)."""

    x_hat: torch.Tensor
    rstd: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, eps: float) -> "Normalized":
        centered = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        return cls(centered * rstd, rstd)

    def jacobian(self, y: torch.Tensor) -> torch.Tensor:
        """d x_hat / d x applied to y: the matrix is symmetric, so forward and backward are this one operator."""
        projected = y - y.mean(-1, keepdim=True) - self.x_hat * (y * self.x_hat).mean(-1, keepdim=True)
        return self.rstd * projected


class Factors(NamedTuple):
    """The inner gradient of each token, with what its own derivative needs.

    Attributes:
        a: inputs of the layers, a[0] = k; a[l] (G, b, D_l).
        g: errors of the layers, d loss / d z_l, g[l] (G, b, D_{l+1}).
        z: pre-activations of the hidden layers.
        p: errors of the hidden layers before the activation's slope, g[l] = p[l] * gelu'(z[l]).
        norm: LN's intermediate values, or None.
        error: d loss / d M(k), (G, b, D).
    """

    a: list[torch.Tensor]
    g: list[torch.Tensor]
    z: list[torch.Tensor]
    p: list[torch.Tensor]
    norm: Normalized | None
    error: torch.Tensor


def gelu(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def gelu_slope(z: torch.Tensor) -> torch.Tensor:
    """gelu'(z)."""
    tanh = torch.tanh(_SQRT_2_OVER_PI * (z + _CUBIC * z * z * z))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * z * z)
    return 0.5 * (1 + tanh + z * (1 - tanh * tanh) * inner)


def gelu_slope_and_curvature(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gelu'(z) and gelu''(z)."""
    tanh = torch.tanh(_SQRT_2_OVER_PI * (z + _CUBIC * z * z * z))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * z * z)
    sech2 = 1 - tanh * tanh
    slope = 0.5 * (1 + tanh + z * sech2 * inner)
    curvature = sech2 * (inner + 0.5 * z * (6 * _SQRT_2_OVER_PI * _CUBIC * z - 2 * tanh * inner * inner))
    return slope, curvature


def output_of(network: InnerNetwork, x: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, Normalized | None]:
    """M(x) from the last layer's result f, and LN's intermediate values."""
    norm = None
    if network.norm_weight is not None:
        norm = Normalized.of(f, network.norm_eps)
        f = norm.x_hat * network.norm_weight + network.norm_bias
    return (x + f if network.residual else f), norm


def inner_gradient(network: InnerNetwork, weights: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> Factors:
    """The factors of u_t = grad_W |M_W(k_t) - v_t|^2 for each token at the given weights."""
    a, z = [k], []
    for layer, w in enumerate(weights):
        z.append(a[-1] @ w)
        if layer + 1 < len(weights):
            a.append(gelu(z[-1]))
    output, norm = output_of(network, k, z.pop())
    error = 2 * (output - v)
    g = [error if norm is None else norm.jacobian(error * network.norm_weight)]
    p = []
    for w, z_l in zip(reversed(weights[1:]), reversed(z), strict=True):
        p.insert(0, g[0] @ w.mT)
        g.insert(0, p[0] * gelu_slope(z_l))
    return Factors(a, g, z, p, norm, error)


class InnerAdjoint(NamedTuple):
    """Gradients of an outer loss through `inner_gradient`; the norm's are summed over tokens, (G, 1, D) or None."""

    k: torch.Tensor
    v: torch.Tensor
    weights: list[torch.Tensor]
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
        a_bar, g_bar: gradients of the outer loss with respect to the factors.
    """
    a_bar, g_bar = list(a_bar), list(g_bar)
    w_bar: list[torch.Tensor] = [None] * len(weights)
    z_bar, slopes = [], []
    # Upwards through g_l = (g_{l+1} W_{l+1}^T) * gelu'(z_l).
    for layer, (z_l, p_l) in enumerate(zip(factors.z, factors.p, strict=True)):
        slope, curvature = gelu_slope_and_curvature(z_l)
        slopes.append(slope)
        z_bar.append(g_bar[layer] * p_l * curvature)
        p_bar = g_bar[layer] * slope
        w_bar[layer + 1] = p_bar.mT @ factors.g[layer + 1]
        g_bar[layer + 1] = g_bar[layer + 1] + p_bar @ weights[layer + 1]
    top = _error_adjoint(network, factors, g_bar[-1])
    # Downwards through z_l = a_l W_l, a_{l+1} = gelu(z_l).
    z_bar.append(top.f_bar)
    for layer in reversed(range(len(weights))):
        update = factors.a[layer].mT @ z_bar[layer]
        w_bar[layer] = update if w_bar[layer] is None else w_bar[layer] + update
        a_bar[layer] = a_bar[layer] + z_bar[layer] @ weights[layer].mT
        if layer:
            z_bar[layer - 1] = z_bar[layer - 1] + a_bar[layer] * slopes[layer - 1]
    k_bar = a_bar[0] + top.output_bar if network.residual else a_bar[0]
    return InnerAdjoint(k_bar, -top.output_bar, w_bar, top.norm_weight, top.norm_bias)


class _ErrorAdjoint(NamedTuple):
    f_bar: torch.Tensor
    output_bar: torch.Tensor
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None


def _error_adjoint(network: InnerNetwork, factors: Factors, g_bar: torch.Tensor) -> _ErrorAdjoint:
    """Through g_L = LN'(2 (M - v)), M = k + LN(f), back to f and M."""
    norm = factors.norm
    if norm is None:
        return _ErrorAdjoint(2 * g_bar, 2 * g_bar, None, None)
    scaled = factors.error * network.norm_weight
    scaled_bar = norm.jacobian(g_bar)
    output_bar = 2 * scaled_bar * network.norm_weight
    # g_L depends on f directly through the error, and through x_hat and 1 / sigma in LN's Jacobian.
    x_hat_bar = output_bar * network.norm_weight - norm.rstd * (
        g_bar * (scaled * norm.x_hat).mean(-1, keepdim=True) + scaled * (g_bar * norm.x_hat).mean(-1, keepdim=True)
    )
    rstd_bar = (g_bar * factors.g[-1]).mean(-1, keepdim=True)
    f_bar = norm.jacobian(x_hat_bar) - rstd_bar * norm.rstd * norm.x_hat
    weight_bar = (scaled_bar * factors.error + output_bar * norm.x_hat).sum(-2, keepdim=True)
    return _ErrorAdjoint(f_bar, output_bar, weight_bar, output_bar.sum(-2, keepdim=True))
