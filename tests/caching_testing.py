# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of memory caching share: its cases, small layers, and how a layer is held against the oracle."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from caching_oracle import oracle_layer
from titans_testing import SHORT_TEXT, TOLERANCE, assert_close, fill_with_noise, tiny_config
from transformers_titans.memory_layer import TitansNeuralMemory


F64 = torch.float64
CHUNK, SEGMENT, WIDTH = 2, 4, 12
# Three complete segments (in blocks of 2 + 1) and an open chunk of the fourth; six (in blocks of 4 + 2) and one of the
# seventh.
LENGTH, LONG = 3 * SEGMENT + CHUNK + 1, 6 * SEGMENT + CHUNK + 1
SMALL = {
    "hidden_size": WIDTH,
    "memory_head_dim": WIDTH // 2,
    "memory_chunk_size": CHUNK,
    "cache_segment_length": SEGMENT,
}

AGGREGATIONS = {
    "residual": {"memory_caching": "residual"},
    "average": {"memory_caching": "average"},
    **{
        f"{name}_{connector}": {"memory_caching": name, "connector": connector}
        for name in ("grm", "soup", "ssc")
        for connector in ("projection", "query")
    },
}
WAYS = {
    f"{segmentation}_{initialization}": {
        "cache_segmentation": segmentation,
        "cache_initialization": initialization,
    }
    for segmentation in ("constant", "logarithmic")
    for initialization in ("checkpoint", "independent")
}
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def small_layer(*cases: dict[str, Any], dtype: torch.dtype = F64, **fields: Any) -> TitansNeuralMemory:
    """A layer of two heads of 6, chunks of 2 and segments of 4, every parameter filled with noise."""
    merged = SHORT_TEXT | SMALL
    for case in (*cases, fields):
        merged |= case
    layer = TitansNeuralMemory(tiny_config(**merged)).to(dtype)
    fill_with_noise(layer)
    return layer


def like(layer: TitansNeuralMemory, **fields: Any) -> TitansNeuralMemory:
    """A layer of the same numbers with other fields; it may lack some of the parameters, or have more of them."""
    config = type(layer.config)(**(layer.config.to_dict() | fields))
    other = TitansNeuralMemory(config).to(layer.q_proj.weight.dtype)
    fill_with_noise(other)
    other.load_state_dict(layer.state_dict(), strict=False)
    return other


def random_states(*shape: int, seed: int = 0) -> torch.Tensor:
    """Embeddings (*shape, WIDTH)."""
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=F64)


def outputs(layer, hidden_states: torch.Tensor, state=None, **kwargs: Any) -> torch.Tensor:
    """(B, T, C) without a graph."""
    with torch.no_grad():
        return layer(hidden_states, state, **kwargs).hidden_states


def feed(layer, hidden_states: torch.Tensor, sizes, mask: torch.Tensor | None = None, prefix=None) -> torch.Tensor:
    """The outputs (B, T, C) of calls of these sizes, each of which goes on with the state behind the one before."""
    parts, state, begin = [], None, 0
    for part in hidden_states.split(sizes, 1):
        end = begin + part.shape[1]
        piece = None if mask is None else mask[:, begin:end]
        result = layer(part, state, attention_mask=piece, prefix_states=prefix)
        parts.append(result.hidden_states)
        state, begin = result.state, end
    return torch.cat(parts, 1)


def weights_of(shape: torch.Size) -> torch.Tensor:
    """What makes a loss to which every output matters, differently."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=F64)


def gradients_of(layer, loss: torch.Tensor, **leaves: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients in every parameter and in ``leaves``; zero where the loss does not depend on one."""
    named = dict(layer.named_parameters()) | leaves
    values = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, values, strict=True))


def assert_equals_oracle(
    layer,
    hidden_states: torch.Tensor,
    *,
    calls: Sequence = (None,),
    mask: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    ratio: float = TOLERANCE[F64],
) -> None:
    """Outputs, and the gradients of parameters, inputs and prefix, against each row's real tokens through the oracle.

    ``calls``: one or several ways to give the layer the tokens, each the sizes of its calls; None: one call.
    """
    hidden_states = hidden_states.clone().requires_grad_()
    leaves = {"hidden_states": hidden_states}
    if prefix is not None:
        leaves["prefix"] = prefix = prefix.clone().requires_grad_()
    real = torch.ones(hidden_states.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    rows = [(row, one) for row, one in enumerate(real) if one.any()]
    expected = {row: oracle_layer(layer, hidden_states[row, one], prefix) for row, one in rows}
    weights = weights_of(hidden_states.shape)
    loss = sum((weights[row, one] * expected[row]).sum() for row, one in rows)
    reference = gradients_of(layer, loss, **leaves)
    for sizes in calls:
        actual = feed(layer, hidden_states, sizes or hidden_states.shape[1], mask, prefix)
        for row, one in rows:
            assert_close(f"{sizes}, row {row}", actual[row, one], expected[row], ratio)
        assert not actual[~real].any()
        gradients = gradients_of(layer, (weights * actual)[real].sum(), **leaves)
        for name, gradient in reference.items():
            assert_close(f"{sizes}, gradient of {name}", gradients[name], gradient, ratio)
