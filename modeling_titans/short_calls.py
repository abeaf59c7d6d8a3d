# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""torch's linear layer and depthwise convolution, which also know a fast form for a few tokens on a CPU.

They are what they derive from, with the same parameters, so adapters, quantizers and hooks find what they look for.
Decoding is bound by reading the parameters. A product of one row and a matrix takes twice as long in torch as one of a
row and a batch of two halves of the matrix: 74 us against 34 for 384 x 384 out of a cache, on one core of an EPYC.

Shapes: "..." any leading dimensions, which hold the tokens.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .blockwise import depthwise_convolution, takes_blocks


# Tokens for which the products of halves are faster than one product.
FEW = 8


def is_short(x: torch.Tensor, num_tokens: int) -> bool:
    """Whether a short form may stand in: few tokens in full precision on a CPU, without gradient, trace, autocast."""
    return (
        num_tokens <= FEW
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a weight is no quantized, sharded or otherwise special one."""
    return type(weight) is nn.Parameter and weight.dtype == x.dtype


class TitansLinear(nn.Linear):
    """`nn.Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.out_features % 2 or not (is_short(x, x.numel() // self.in_features) and _is_plain(self.weight, x)):
            return F.linear(x, self.weight, self.bias)
        x, shape = x.contiguous(), (*x.shape[:-1], self.out_features)
        number = x.numel() // self.in_features
        # The tokens as columns, once for each half.
        columns = x.as_strided((2, self.in_features, number), (0, 1, self.in_features))
        y = torch.bmm(self.weight.view(2, -1, self.in_features), columns)
        y = y.view(shape) if number == 1 else y.view(self.out_features, number).mT.contiguous().view(shape)
        return y if self.bias is None else y + self.bias


class TitansConvolution(nn.Conv1d):
    """`nn.Conv1d`; a depthwise one without padding and bias also takes its first channels alone.

    Adapters make further layers of an adapted one's class, with arguments of their own.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, S) -> (B, C_out, S - K + 1) for K taps; C_out is C if only the first C channels are given."""
        if self.groups != self.out_channels or self.groups != self.in_channels or self.bias is not None:
            return super().forward(x)
        channels, taps = x.shape[1], self.weight.shape[2]
        weight = self.weight[:channels]
        if is_short(x, x.shape[0] * (x.shape[2] - taps + 1)) and _is_plain(self.weight, x):
            return (x.unfold(2, taps, 1) * weight).sum(-1)
        if takes_blocks(x, weight):
            return depthwise_convolution(x.mT, weight).mT
        return F.conv1d(x, weight, groups=channels)
