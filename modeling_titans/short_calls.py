# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A depthwise convolution that also knows fast forms for a CPU and for a traced token, and how few tokens are few.

It is the layer that it derives from, with its parameters, so adapters, quantizers and hooks find what they look for.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .blockwise import depthwise_convolution, takes_blocks


# Tokens of which operations cost more than their elements.
FEW = 8


def is_short(num_tokens: int) -> bool:
    """Whether a call is one of those by which text is decoded: few tokens, and no gradients."""
    return num_tokens <= FEW and not torch.is_grad_enabled()


class TitansConvolution(nn.Conv1d):
    """`nn.Conv1d`; a depthwise one without padding and bias also takes its first channels alone.

    Adapters make further layers of an adapted one's class, with arguments of their own.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, S) -> (B, C_out, S - K + 1) for K taps; C_out is C if only the first C channels are given."""
        if self.groups != self.out_channels or self.groups != self.in_channels or self.bias is not None:
            return super().forward(x)
        weight = self.weight[: x.shape[1]]
        if torch.compiler.is_compiling() and x.shape[-1] == weight.shape[-1]:
            # One token: a compiler fuses this with its neighbours, where a convolution is a call of its own.
            return (x * weight.squeeze(1)).sum(-1, keepdim=True)
        if takes_blocks(x, weight):
            return depthwise_convolution(x.mT, weight).mT
        return F.conv1d(x, weight, groups=x.shape[1])
