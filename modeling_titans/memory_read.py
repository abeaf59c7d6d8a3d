# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading a memory without writing into it (Titans, eq. 21)."""

from collections.abc import Sequence

import torch

from .inner_network import InnerNetwork, gelu, output_of
from .state_pair import Products, product_dtype


def read_memory(
    q: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: bool = True,
) -> torch.Tensor:
    """M_W(q) at given weights.

    Args:
        q: (B, T, H, D) queries, floating point.
        weights: (B, H, D_in, D_out) per layer, float32 or float64.
        norm_weight, norm_bias: (H, D) or None; norm_eps, residual: as in `neural_memory`.

    Returns:
        (B, T, H, D) in q's dtype; computed in the wider one of the weights' and q's.
    """
    dtype = torch.promote_types(q.dtype, weights[0].dtype)
    norm = [None if t is None else t.to(dtype).unsqueeze(1) for t in (norm_weight, norm_bias)]
    network = InnerNetwork(residual, *norm, norm_eps, Products(product_dtype(q, dtype), dtype))
    # As in the op: products with a state in float32 are not to be taken in a lower precision.
    with torch.autocast(q.device.type, enabled=False):
        output = read_network(network, [w.to(dtype) for w in weights], q.to(dtype).transpose(1, 2))
    return output.transpose(1, 2).to(q.dtype)


def read_network(network: InnerNetwork, weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """M_W(x) of x (B, H, T, D) in the weights' dtype; M is of H heads: LN's parameters are (H, 1, D) or None."""
    z = x
    for layer, w in enumerate(weights):
        z = network.products.matmul(gelu(z) if layer else z, w)
    return output_of(network, x, z)[0]
