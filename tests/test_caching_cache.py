# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache with memory caching: what grows and what does not, what is moved, and models that are switched to it."""

import copy

import pytest
import torch

from stream_testing import EXACT, F64, assert_same_state, feed, positions_of
from titans_testing import assert_close, logits_of, random_ids, tiny_config, tiny_model
from transformers_titans import TitansCache, TitansForCausalLM, selected_read
from transformers_titans.kept_memories import KeptMemories
from variant_oracle import CACHING_VARIANTS, VARIANTS, variant_model


every_caching_variant = pytest.mark.parametrize("variant", CACHING_VARIANTS)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
SEGMENT = 4
GRM = {"memory_caching": "grm", "cache_segment_length": SEGMENT}
# Bytes of a memory of two layers and of its key, in both layers of the model: two heads of 16, hidden width 32.
KEPT = 2 * 4 * (2 * 16 * 32 + 2 * 32 * 16 + 2 * 16)

# How many memories are kept behind so many segments.
GROWTH = {
    "constant": ({}, lambda segments: segments),
    "bounded": ({"cache_max_segments": 3}, lambda segments: min(segments, 3)),
    "logarithmic": ({"cache_segmentation": "logarithmic"}, int.bit_count),
}


@pytest.mark.parametrize(("fields", "number"), GROWTH.values(), ids=GROWTH)
@pytest.mark.parametrize("variant", ["lmm", "mal", "mag"])
def test_a_cache_grows_by_what_is_kept_and_by_nothing_else(variant, fields, number):
    model = variant_model(variant, **GRM, **fields)
    cache, kept, others = TitansCache(model.config), [], []
    for part in random_ids(1, 12 * SEGMENT).split(SEGMENT, 1):
        feed(model, cache, part)
        kept.append(cache.kept_nbytes)
        others.append(cache.nbytes - cache.kept_nbytes)
    sums = kept[0] - KEPT
    assert kept == [sums + number(n) * KEPT for n in range(1, 13)]
    # From the second call on attention's window is full.
    assert len(set(others[1:])) == 1


def test_mac_keeps_what_its_segment_reads_once():
    """Where both segments end, the memories that h asks are those that y asks, and lie in one place."""
    model = variant_model("mac", memory_caching="grm", cache_segment_length=8)
    cache, sizes = TitansCache(model.config), []
    for part in random_ids(1, 64).split(8, 1):
        feed(model, cache, part)
        sizes.append(cache.nbytes)
    assert {later - earlier for earlier, later in zip(sizes, sizes[1:], strict=False)} == {KEPT}


def test_without_caching_nothing_is_kept():
    model = variant_model("mac")
    cache = TitansCache(model.config)
    feed(model, cache, random_ids(1, 19))
    assert cache.nbytes > 0 and cache.kept_nbytes == 0


@every_caching_variant
def test_where_kept_memories_lie_changes_no_number(variant, monkeypatch):
    model, ids = variant_model(variant), random_ids(2, 29)
    moved, weights_to = [], KeptMemories.weights_to

    def counting(self, device):
        moved.append(device)
        return weights_to(self, device)

    monkeypatch.setattr(KeptMemories, "weights_to", counting)
    plain, placed = TitansCache(model.config), TitansCache(model.config, kept_device="cpu")
    expected = feed(model, plain, ids, 5)
    assert not moved
    assert torch.equal(feed(model, placed, ids, 5), expected)
    # After each of six calls, in two layers, in `mac` for both of its readers.
    assert moved == [torch.device("cpu")] * (6 * 2 * (2 if model.config.variant == "mac" else 1))
    assert_same_state(placed, plain, 0)


@pytest.mark.parametrize("top_k", [1, 3])
def test_of_the_kept_memories_only_the_selected_are_taken(top_k, monkeypatch):
    model = variant_model("lmm", memory_caching="ssc", cache_segment_length=SEGMENT, cache_top_k=top_k)
    cache, ids = TitansCache(model.config, kept_device="cpu"), random_ids(1, 10 * SEGMENT + 3)
    feed(model, cache, ids[:, :-2])
    taken, original = [], selected_read._taken

    def counting(weights, memory, device):
        taken.append((len(memory), len(weights)))
        return original(weights, memory, device)

    monkeypatch.setattr(selected_read, "_taken", counting)
    feed(model, cache, ids[:, -2:], 1)
    # One row of two heads, each with 10 kept memories; two tokens, two layers, two matrices each.
    assert taken == [(2 * top_k, 20)] * 8


class Elsewhere:
    """Weights on another device, which notes what it is asked for."""

    device = torch.device("cpu")

    def __init__(self, weights: torch.Tensor):
        self.weights, self.asked = weights, []

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        self.asked.append(index.tolist())
        return self.weights[index]


def test_a_memory_that_lies_elsewhere_is_moved_once_for_all_who_ask():
    weights, memory = torch.randn(9, 3, 2), torch.tensor([5, 1, 5, 5, 8])
    elsewhere = Elsewhere(weights)
    # Another device than "cpu" by its name alone.
    taken = selected_read._taken(elsewhere, memory, torch.device("cpu:0"))
    assert torch.equal(taken, weights[memory])
    assert elsewhere.asked == [[1, 5, 8]]


@every_caching_variant
def test_offloaded_layers_go_on(variant):
    model, ids = variant_model(variant), random_ids(2, 29)
    cache, expected = TitansCache(model.config), logits_of(model, ids)
    logits = [feed(model, cache, ids[:, :17])]
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    logits.append(feed(model, cache, ids[:, 17:]))
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["constant", "logarithmic"])
@pytest.mark.parametrize("initialization", ["checkpoint", "independent"])
@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_a_long_document_in_front_of_a_short_one(variant, initialization, way):
    """What a document keeps is a matter of its own length, not of the length of the one with which the call ends."""
    model = variant_model(
        variant, dtype=F64, **GRM, cache_segmentation=way, cache_initialization=initialization, num_hidden_layers=1
    )
    documents = [25, 3, 18, 2]
    ids = random_ids(2, sum(documents))
    alone = torch.cat([logits_of(model, document) for document in ids.split(documents, 1)], 1)
    for sizes in (None, [31, 17]):
        cache = TitansCache(model.config)
        packed = feed(model, cache, ids, sizes, position_ids=positions_of(documents))
        assert_close(f"calls {sizes}", packed, alone, EXACT)


# Switching caching on in a model that was trained without.


def test_a_plain_checkpoint_is_loaded_with_caching(tmp_path):
    ids, plain = random_ids(2, 29), tiny_model()
    plain.save_pretrained(tmp_path)
    loaded, info = TitansForCausalLM.from_pretrained(
        tmp_path, memory_caching="average", cache_segment_length=8, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    logits, expected = logits_of(loaded, ids), logits_of(plain, ids)
    torch.testing.assert_close(logits[:, :8], expected[:, :8], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[:, 8:], expected[:, 8:], rtol=1e-2, atol=1e-2)
    cache = TitansCache(loaded.config)
    torch.testing.assert_close(feed(loaded, cache, ids, 5), logits, rtol=1e-4, atol=1e-4)


@every_variant
def test_a_model_is_switched_by_its_config(variant):
    ids = random_ids(2, 29)
    model = variant_model(variant, cache_segment_length=8)
    plain = logits_of(model, ids)
    model.config.memory_caching = "average"
    switched = logits_of(model, ids)
    assert torch.equal(
        switched, logits_of(variant_model(variant, memory_caching="average", cache_segment_length=8), ids)
    )
    assert not torch.allclose(switched, plain)
    model.config.memory_caching = None
    assert torch.equal(logits_of(model, ids), plain)


def test_what_needs_a_projection_says_so():
    model, ids = tiny_model(cache_segment_length=8), random_ids(1, 9)
    model.config.memory_caching = "grm"
    with pytest.raises(ValueError, match="memory_caching='grm' with connector='projection' needs u_proj"):
        logits_of(model, ids)
    model.config.connector = "query"
    assert torch.isfinite(logits_of(model, ids)).all()


def test_a_cache_from_before_the_switch_is_refused():
    model, ids = tiny_model(cache_segment_length=8), random_ids(1, 9)
    cache = TitansCache(model.config)
    feed(model, cache, ids)
    model.config.memory_caching = "average"
    with pytest.raises(ValueError, match="cache was made by a model with memory_caching=None"):
        feed(model, cache, ids)


def test_top_k_may_change_between_calls():
    """It decides what is read, not what is kept."""
    model = variant_model("lmm", memory_caching="ssc", cache_segment_length=SEGMENT, cache_top_k=1)
    ids, cache = random_ids(1, 30), TitansCache(model.config)
    feed(model, cache, ids)
    other = copy.deepcopy(cache)
    first = feed(model, cache, random_ids(1, 3, seed=1))
    model.config.cache_top_k = 5
    assert not torch.equal(feed(model, other, random_ids(1, 3, seed=1)), first)


def test_caching_belongs_to_the_geometry_of_a_cache():
    assert TitansCache(tiny_config(**GRM)).geometry["memory_caching"] == "grm"
    for field, value in (("cache_segment_length", 8), ("connector", "query"), ("cache_max_segments", 2)):
        with pytest.raises(ValueError, match=f"cache was made by a model with {field}="):
            TitansCache(tiny_config(**GRM)).check(tiny_config(**{**GRM, field: value}))
