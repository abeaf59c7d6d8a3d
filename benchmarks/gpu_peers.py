# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Other sequence operators on as many tokens, heads and features, for `gpu.py`. None of them computes the same.

Each takes the shape (B, T, H, D), a chunk length and whether a backward is wanted, and returns a call; it raises
ImportError where its package is not there.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def _call(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], backward: bool) -> Callable[[], Any]:
    if not backward:
        return torch.no_grad()(lambda: function(*tensors))
    for tensor in tensors:
        tensor.requires_grad_()
    with torch.no_grad():
        bar = torch.randn_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, bar)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _unit(*shape: int) -> torch.Tensor:
    return F.normalize(_normal(*shape), dim=-1)


def ttt_linear(shape: tuple[int, int, int, int], chunk_size: int, backward: bool) -> Callable[[], Any]:
    """flash-linear-attention's test-time training of a linear memory (with LN, without momentum and forgetting)."""
    from fla.ops.ttt import chunk_ttt_linear

    batch_size, length, heads, head_dim = shape
    eta = 0.1 * torch.rand(batch_size, length, heads, 1, device="cuda", dtype=torch.bfloat16)
    norm = [torch.ones(heads, head_dim, device="cuda"), torch.zeros(heads, head_dim, device="cuda")]

    def function(q, k, v, w, b, eta):
        return chunk_ttt_linear(q, k, v, w, b, eta, chunk_size=chunk_size)[0]

    return _call(function, [_unit(*shape), _unit(*shape), _normal(*shape), *norm, eta], backward)


def gated_delta_rule(shape: tuple[int, int, int, int], chunk_size: int, backward: bool) -> Callable[[], Any]:
    """flash-linear-attention's gated delta rule: a linear memory with forgetting, in chunks of its own choice."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    forgetting = F.logsigmoid(4 + torch.randn(*shape[:3], device="cuda"))
    beta = torch.rand(*shape[:3], device="cuda", dtype=torch.bfloat16)

    def function(q, k, v, g, beta):
        return chunk_gated_delta_rule(q, k, v, g, beta)[0]

    return _call(function, [_unit(*shape), _unit(*shape), _normal(*shape), forgetting, beta], backward)


def flash_attention(shape: tuple[int, int, int, int], chunk_size: int, backward: bool) -> Callable[[], Any]:
    """Causal softmax attention by flash-attn."""
    from flash_attn import flash_attn_func

    return _call(lambda q, k, v: flash_attn_func(q, k, v, causal=True), [_normal(*shape) for _ in range(3)], backward)


def sdpa(shape: tuple[int, int, int, int], chunk_size: int, backward: bool) -> Callable[[], Any]:
    """Causal softmax attention by torch's own fastest kernel."""
    batch_size, length, heads, head_dim = shape

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _call(function, [_normal(batch_size, heads, length, head_dim) for _ in range(3)], backward)


PEERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "fla chunk_ttt_linear": ttt_linear,
    "fla chunk_gated_delta_rule": gated_delta_rule,
    "flash_attn, causal": flash_attention,
    "torch SDPA, causal": sdpa,
}
