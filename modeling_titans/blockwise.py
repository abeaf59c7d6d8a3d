# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands around the memory, for a CPU: computed in blocks of tokens that stay in a core's cache, channels last.

Of 1,152 channels and 4 taps, torch's convolution takes nine times as long forward and backward (39 against 4 us a
token on one core of an EPYC), most of it in reordering; SiLU and normalisation of a whole sequence wait for memory.

Shapes: B rows, T tokens, S = T + K - 1 inputs of a convolution, C channels, K taps, H heads, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


BLOCK, EPS = 128, 1e-6


def takes_blocks(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether the forms below may stand in: on a CPU, and in a dtype in which they do not round more than torch's."""
    exact = x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)
    return exact and x.is_cpu and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")


def depthwise_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (B, S, C), weight (C, 1, K) -> (B, T, C): y_t = sum_k w_k x_{t+k}, with nothing added in front."""
    return _DepthwiseConvolution.apply(x, weight.squeeze(1).mT.contiguous())


def silu_and_unit(x: torch.Tensor) -> torch.Tensor:
    """silu(x) of x (B, T, 3, H, D), and of its first two parts, queries and keys, brought to length 1 over D."""
    return _SiluAndUnit.apply(x)


class _DepthwiseConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, taps)
        y = x.new_empty(x.shape[0], x.shape[1] - len(taps) + 1, x.shape[2])
        for begin, part in _blocks(y):
            torch.mul(_shifted(x, begin, part), taps[0], out=part)
            for k in range(1, len(taps)):
                part.addcmul_(_shifted(x, begin + k, part), taps[k])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, y_bar: torch.Tensor):
        x, taps = ctx.saved_tensors
        x_bar, taps_bar = torch.zeros_like(x), torch.zeros_like(taps)
        for begin, part in _blocks(y_bar):
            for k in range(len(taps)):
                _shifted(x_bar, begin + k, part).addcmul_(part, taps[k])
                taps_bar[k] += (part * _shifted(x, begin + k, part)).sum((0, 1))
        return x_bar, taps_bar


class _SiluAndUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for begin, part in _blocks(y):
            part.copy_(F.silu(_shifted(x, begin, part)))
            vectors = part[:, :, :2]
            vectors.div_(_length(vectors))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, y_bar: torch.Tensor):
        (x,) = ctx.saved_tensors
        x_bar = torch.empty_like(x)
        for begin, part in _blocks(x_bar):
            inputs, bar = _shifted(x, begin, part), _shifted(y_bar, begin, part).clone()
            vectors, vectors_bar = F.silu(inputs[:, :, :2]), bar[:, :, :2]
            length = _length(vectors)
            unit = vectors / length
            # A vector that is shorter than EPS is divided by EPS, a constant.
            along = torch.linalg.vecdot(vectors_bar, unit).unsqueeze(-1) * (length > EPS)
            vectors_bar.addcmul_(unit, along, value=-1).div_(length)
            part.copy_(torch.ops.aten.silu_backward(bar, inputs))
        return x_bar


def _length(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(EPS)


def _blocks(y: torch.Tensor):
    """(first token, view of the block's tokens) of each block."""
    for begin in range(0, y.shape[1], BLOCK):
        yield begin, y[:, begin : begin + BLOCK]


def _shifted(x: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return x[:, begin : begin + like.shape[1]]
