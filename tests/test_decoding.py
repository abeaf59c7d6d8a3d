# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding token by token: what it may cost, and that what it keeps of an open chunk changes no number."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stream_testing import EXACT, feed
from titans_testing import MATRIX_MEMORY, TOLERANCE, assert_close, logits_of, random_ids
from transformers_titans import TitansCache
from transformers_titans.memory_state import iterate_tensors
from transformers_titans.short_calls import TitansConvolution
from variant_oracle import CACHING_VARIANTS, EVERY_VARIANT, variant_model


F64 = torch.float64
CHUNK = 8
OPERATORS = {"lmm": 110, "mal": 150, "mag": 150, "mac": 185, "lmm_grm": 145, "mac_ssc": 330, "mag_soup": 185}
every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
MEMORIES = {
    "default": {},
    "other_options": {"memory_gate_granularity": "chunk", "memory_forget_to": "start", "memory_depth": 3},
    "dla": {"memory_rule": "dla"},
    "swla": {"memory_rule": "swla", "memory_forget_to": "start"} | MATRIX_MEMORY,
}
memories = pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES)


def decoder(variant, **options):
    fields = {"memory_chunk_size": CHUNK, "segment_length": 2 * CHUNK, "sliding_window": 11}
    if variant in CACHING_VARIANTS:
        fields["cache_segment_length"] = CHUNK
    return variant_model(variant, **(fields | options))


def open_chunks(cache: TitansCache) -> list:
    return [layer.state.memory.memory.chunk for layer in cache.layers]


def without_open_chunks(cache: TitansCache) -> TitansCache:
    """A cache that knows the open chunk's tokens alone."""
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        memory = layer.state.memory
        memory = memory._replace(memory=memory.memory._replace(chunk=None))
        layer.state = layer.state._replace(memory=memory)
    return cache


class Operators(TorchDispatchMode):
    """Notes each operator that computes something, and the sizes of what it makes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        given, made = ([t for t in tree_leaves(x) if torch.is_tensor(t)] for x in (arguments, result))
        given = {t.untyped_storage().data_ptr() for t in given}
        made = [t for t in made if t.untyped_storage().data_ptr() not in given]
        if made:
            self.names.append(str(operator))
            self.largest = max(self.largest, *(t.untyped_storage().nbytes() for t in made))
        return result


@every_variant
def test_a_token_takes_a_bounded_number_of_operators_per_layer(variant):
    counts = []
    for layers in (1, 3):
        model = decoder(variant, dtype=torch.float32, num_hidden_layers=layers)
        cache = TitansCache(model.config)
        feed(model, cache, random_ids(1, CHUNK + 3), sizes=[CHUNK + 2, 1])
        with Operators() as operators:
            feed(model, cache, random_ids(1, 1))
        counts.append(len(operators.names))
    assert (counts[1] - counts[0]) / 2 <= OPERATORS[variant]


@pytest.mark.parametrize("padded", [False, True], ids=["alike", "ragged"])
# `ssc` puts the few memories that its tokens ask side by side.
@pytest.mark.parametrize("variant", sorted(EVERY_VARIANT.keys() - {"mac_ssc"}))
def test_a_token_that_closes_no_chunk_makes_nothing_of_the_size_of_the_weights(variant, padded):
    model = decoder(variant, memory_expansion=8)
    cache, ids = TitansCache(model.config), random_ids(2, 2 * CHUNK + 4)
    mask = torch.ones_like(ids)
    mask[0, : 1 if padded else 0] = 0
    feed(model, cache, ids, sizes=[2 * CHUNK + 2, 1, 1], attention_mask=mask)
    with Operators() as operators:
        feed(model, cache, random_ids(2, 1))
    weights = cache.layers[0].state.memory.memory.weights
    assert operators.largest < min(w.untyped_storage().nbytes() for w in weights)


@memories
@every_variant
def test_tokens_one_by_one_equal_one_call(variant, options):
    model, ids = decoder(variant, dtype=F64, **options), random_ids(2, 3 * CHUNK + 3)
    cache = TitansCache(model.config)
    decoded = feed(model, cache, ids, sizes=[1] * ids.shape[1])
    assert all(chunk is not None for chunk in open_chunks(cache))
    assert_close("logits", decoded, logits_of(model, ids, use_cache=False), EXACT)


@memories
@every_variant
def test_padded_tokens_one_by_one_equal_each_row_alone(variant, options):
    model, ids = decoder(variant, dtype=F64, **options), random_ids(3, 3 * CHUNK)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 20:23] = mask[2, 12] = 0
    cache = TitansCache(model.config)
    sizes = [CHUNK - 1] + [1] * (ids.shape[1] - CHUNK + 1)
    decoded, kept, begin = [], 0, 0
    for size in sizes:
        at = slice(begin, begin + size)
        decoded.append(feed(model, cache, ids[:, at], attention_mask=mask[:, at]))
        kept += open_chunks(cache)[0] is not None
        begin += size
    assert kept > len(sizes) / 2
    for row, real in enumerate(mask.bool()):
        alone = logits_of(model, ids[row : row + 1, real], use_cache=False)
        assert_close(f"row {row}", torch.cat(decoded, 1)[row : row + 1, real], alone, EXACT)


@memories
@pytest.mark.parametrize("padded", [False, True], ids=["alike", "ragged"])
@every_variant
def test_what_is_kept_of_an_open_chunk_is_what_its_tokens_come_to(variant, padded, options):
    model, ids = decoder(variant, dtype=F64, **options), random_ids(2, CHUNK + 5)
    mask = torch.ones_like(ids)
    mask[0, : 3 if padded else 0] = 0
    cache = TitansCache(model.config)
    feed(model, cache, ids, sizes=[CHUNK + 1, 1, 1, 1, 1], attention_mask=mask)
    rebuilt, token = without_open_chunks(cache), random_ids(2, 1, seed=1)
    assert_close("logits", feed(model, rebuilt, token), feed(model, cache, token), EXACT)
    for actual, expected in zip(open_chunks(rebuilt), open_chunks(cache), strict=True):
        # Errors are those of their tokens; at places without one there may be anything.
        for name in ("kept", "mixed", "past"):
            assert_close(name, getattr(actual, name), getattr(expected, name), EXACT)


@pytest.mark.parametrize("channels", [12, 4])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_convolution_of_few_tokens_or_channels_is_one(tokens, channels):
    layer = TitansConvolution(12, 12, 4, groups=12, bias=False, dtype=F64)
    x = torch.randn(2, channels, tokens + 3, dtype=F64)
    expected = F.conv1d(x, layer.weight[:channels], groups=channels)
    with torch.no_grad():
        assert_close("without a graph", layer(x), expected, TOLERANCE[F64])
    assert_close("with a graph", layer(x), expected, TOLERANCE[F64])


@memories
@every_variant
def test_an_open_chunk_is_in_the_file(variant, options, tmp_path):
    model = decoder(variant, **options)
    cache = TitansCache(model.config)
    feed(model, cache, random_ids(2, CHUNK + 3), sizes=[CHUNK + 2, 1])
    cache.save_pretrained(tmp_path)
    loaded = TitansCache.from_pretrained(tmp_path, model.config)
    expected = dict(iterate_tensors(tuple(open_chunks(cache))))
    assert expected and all(
        torch.equal(tensor, expected[name]) for name, tensor in iterate_tensors(tuple(open_chunks(loaded)))
    )
    assert torch.equal(feed(model, loaded, random_ids(2, 1)), feed(model, cache, random_ids(2, 1)))
