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
# Elements that each thread has of a block of vectors.
ELEMENTS = 1 << 18


def takes_blocks(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether the forms below may stand in: on a CPU, and in a dtype in which they do not round more than torch's.

    Under autocast that is a 16-bit one, which they round to once, behind sums in float32.
    """
    if not x.is_cpu or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled("cpu"):
        return x.dtype in (torch.bfloat16, torch.float16) and (weight is None or weight.dtype == torch.float32)
    return x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)


def depthwise_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (B, S, C), weight (C, 1, K) -> (B, T, C): y_t = sum_k w_k x_{t+k}, with nothing added in front."""
    return _DepthwiseConvolution.apply(x, weight.squeeze(1).mT.contiguous())


def silu_and_unit(x: torch.Tensor) -> torch.Tensor:
    """silu(x) of x (B, T, parts, H, D), of which the first two, queries and keys, are brought to length 1 over D."""
    return _SiluAndUnit.apply(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`F.rms_norm` of x (..., C) over its last dimension, with weight (C,) of the same dtype."""
    if torch.is_grad_enabled() and takes_blocks(x, weight):
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _DepthwiseConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, taps)
        y = x.new_empty(x.shape[0], x.shape[1] - len(taps) + 1, x.shape[2])
        for begin, part in _blocks(y):
            inputs = x[:, begin : begin + part.shape[1] + len(taps) - 1].to(taps.dtype)
            total = part if part.dtype == taps.dtype else torch.empty_like(part, dtype=taps.dtype)
            torch.mul(_shifted(inputs, 0, part), taps[0], out=total)
            for k in range(1, len(taps)):
                total.addcmul_(_shifted(inputs, k, part), taps[k])
            if total is not part:
                part.copy_(total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, y_bar: torch.Tensor):
        x, taps = ctx.saved_tensors
        x_bar, taps_bar = torch.zeros_like(x, dtype=taps.dtype), torch.zeros_like(taps)
        for begin, part in _blocks(y_bar):
            inputs = x[:, begin : begin + part.shape[1] + len(taps) - 1].to(taps.dtype)
            bar = part.to(taps.dtype)
            for k in range(len(taps)):
                _shifted(x_bar, begin + k, part).addcmul_(bar, taps[k])
                taps_bar[k] += (bar * _shifted(inputs, k, part)).sum((0, 1))
        return x_bar.to(x.dtype), taps_bar


class _SiluAndUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for begin, part in _blocks(y):
            values = F.silu(_widened(_shifted(x, begin, part)))
            vectors = values[:, :, :2]
            vectors.div_(_length(vectors))
            part.copy_(values)
        return y

    @staticmethod
    @once_differentiable
    # Autocast would round the operands of a scalar product.
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, y_bar: torch.Tensor):
        (x,) = ctx.saved_tensors
        x_bar = torch.empty_like(x)
        for begin, part in _blocks(x_bar):
            inputs, bar = _widened(_shifted(x, begin, part)), _widened(_shifted(y_bar, begin, part), copy=True)
            vectors, vectors_bar = F.silu(inputs[:, :, :2]), bar[:, :, :2]
            length = _length(vectors)
            unit = vectors / length
            # A vector that is shorter than EPS is divided by EPS, a constant.
            along = torch.linalg.vecdot(vectors_bar, unit).unsqueeze(-1) * (length > EPS)
            vectors_bar.addcmul_(unit, along, value=-1).div_(length)
            part.copy_(torch.ops.aten.silu_backward(bar, inputs))
        return x_bar


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = x.new_empty(x.numel() // x.shape[-1], 1)
        for inputs, part, factor in _vectors(x, y, scale):
            torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, out=factor)
            factor.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            torch.mul(inputs, factor, out=part).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, y_bar: torch.Tensor):
        x, weight, scale = ctx.saved_tensors
        x_bar, weight_bar = torch.empty_like(x, memory_format=torch.contiguous_format), torch.zeros_like(weight)
        for inputs, factor, bar, part in _vectors(x, scale, y_bar, x_bar):
            unit = inputs * factor
            product = bar * unit
            weight_bar += product.sum(0)
            along = product.mul_(weight).mean(-1, keepdim=True)
            torch.mul(bar, weight, out=part).addcmul_(unit, along, value=-1).mul_(factor)
        return x_bar, weight_bar, None


def _vectors(*tensors: torch.Tensor):
    """(N, .) of each tensor (..., .), as many vectors as fit into cache."""
    rows = [t.reshape(-1, t.shape[-1]) for t in tensors]
    number = max(ELEMENTS * torch.get_num_threads() // rows[0].shape[-1], 1)
    return zip(*(t.split(number) for t in rows), strict=True)


def _widened(x: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def _length(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(EPS)


def _blocks(y: torch.Tensor):
    """(first token, view of the block's tokens) of each block."""
    for begin in range(0, y.shape[1], BLOCK):
        yield begin, y[:, begin : begin + BLOCK]


def _shifted(x: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return x[:, begin : begin + like.shape[1]]
