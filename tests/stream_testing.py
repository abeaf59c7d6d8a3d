# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of texts in pieces share: feeding a cache, comparing what it knows, and where the pieces end."""

import copy

import pytest
import torch

from titans_testing import assert_close, logits_of, random_ids
from transformers_titans import TitansCache
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import EVERY_VARIANT, VARIANTS


F64 = torch.float64
# Those of `variant_oracle.VARIANTS`; segments of memory caching end at some of these, or one chunk later.
CHUNK, WINDOW, SEGMENT = 4, 5, 8
# Relative error allowed between two ways to feed one text in float64.
EXACT = 1e-9
DOCUMENTS = [5, 9, 1, 17, 3]

every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
every_variant_of_constant_size = pytest.mark.parametrize("variant", VARIANTS)


def feed(model, cache: TitansCache, ids: torch.Tensor, sizes=None, **kwargs) -> torch.Tensor:
    """Logits of ids fed in pieces of these sizes; masks and positions are split alike."""
    sizes = ids.shape[1] if sizes is None else sizes
    logits, begin = [], 0
    for part in ids.split(sizes, 1):
        end = begin + part.shape[1]
        logits.append(logits_of(model, part, cache=cache, **{k: v[:, begin:end] for k, v in kwargs.items()}))
        begin = end
    return torch.cat(logits, 1)


def random_sizes(length: int, longest: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sizes = []
    while sum(sizes) < length:
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        sizes.append(min(size, length - sum(sizes)))
    return sizes


def positions_of(documents: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in documents])[None]


def state_tensors(cache: TitansCache) -> dict[str, torch.Tensor]:
    return dict(iterate_tensors((tuple(layer.state for layer in cache.layers), cache.progress)))


def assert_same_state(actual: TitansCache, expected: TitansCache, ratio: float) -> None:
    """Except for what is kept of open chunks: that follows from their tokens, and is kept by calls of few tokens."""
    a, e = (
        {name: t for name, t in state_tensors(cache).items() if ".memory.chunk." not in name}
        for cache in (actual, expected)
    )
    assert a.keys() == e.keys()
    for name, tensor in e.items():
        assert_close(name, a[name].double(), tensor.double(), ratio)


def assert_same_future(model, actual: TitansCache, expected: TitansCache, ratio: float = EXACT) -> None:
    """Both caches go on alike for more than a segment; they themselves are left alone."""
    later = random_ids(actual.batch_size, SEGMENT + 3, seed=99)
    assert_close(
        "later", feed(model, copy.deepcopy(actual), later), feed(model, copy.deepcopy(expected), later), ratio
    )
