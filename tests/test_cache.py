# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""TitansCache: any split of a text equals one call, and every operation on it takes all of its parts along."""

import copy

import pytest
import torch

from stream_testing import assert_same_state, every_variant, random_sizes, state_tensors
from titans_testing import (
    LONG_TEXT,
    OPTIONS,
    assert_close,
    iterate_floats,
    logits_of,
    random_ids,
    relative_error,
    tiny_model,
)
from transformers_titans import TitansCache
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import CACHING_VARIANTS, EVERY_VARIANT, variant_model


F64 = torch.float64
CHUNK = 4
LATER = random_ids(1, 11, seed=99)


def feed(model, cache: TitansCache, ids: torch.Tensor, sizes=None, **kwargs) -> torch.Tensor:
    """Logits of ids fed in pieces of these sizes."""
    parts = [ids] if sizes is None else ids.split(sizes, 1)
    return torch.cat([logits_of(model, part, cache=cache, **kwargs) for part in parts], 1)


def cache_after(model, ids: torch.Tensor, **kwargs) -> TitansCache:
    cache = TitansCache(model.config)
    feed(model, cache, ids, **kwargs)
    return cache


@pytest.mark.parametrize("option", [*OPTIONS, "mal", "mag", "mac", *CACHING_VARIANTS])
def test_split_at_every_length(option):
    model = tiny_model(dtype=F64, **(OPTIONS | EVERY_VARIANT)[option])
    ids = random_ids(2, 2 * CHUNK + 8)
    whole = logits_of(model, ids)
    for length in range(1, 2 * CHUNK + 2):
        cache = cache_after(model, ids[:, :length])
        assert cache.get_seq_length() == length
        # Several tokens, then single ones and some more, on the filled cache.
        left = ids.shape[1] - length
        rest = feed(model, cache, ids[:, length:], [5, 1, 1, left - 7] if left > 7 else [5, 1, left - 6])
        assert_close(f"length {length}", rest, whole[:, length:], 1e-11)
        assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("longest", [3, 9, 40, 300], ids=lambda n: f"pieces_up_to_{n}")
def test_random_splits_of_a_long_text_equal_one_call(longest):
    model = tiny_model(dtype=F64, **LONG_TEXT)
    length = 1024 if longest > 9 else 256
    ids = random_ids(1, length)
    whole_cache = TitansCache(model.config)
    whole = feed(model, whole_cache, ids)
    cache = TitansCache(model.config)
    assert_close("outputs", feed(model, cache, ids, random_sizes(length, longest, longest)), whole, 1e-9)
    assert_same_state(cache, whole_cache, 1e-9)
    assert_close("later", feed(model, cache, LATER), feed(model, whole_cache, LATER), 1e-9)


def test_float32_split_is_as_accurate_as_one_call():
    exact, model = tiny_model(dtype=F64, **LONG_TEXT), tiny_model(**LONG_TEXT)
    for parameter, stored in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(stored.data)
    ids = random_ids(1, 1024)
    reference = logits_of(exact, ids)
    allowed = 4 * relative_error(logits_of(model, ids), reference)
    assert allowed < 1e-3
    for sizes in ([1000, 24], random_sizes(1024, 50, 1), [512, 512]):
        assert relative_error(feed(model, TitansCache(model.config), ids, sizes), reference) <= allowed


@pytest.mark.parametrize(
    "fields",
    [{}, {"variant": "mag", "sliding_window": 40}, {"variant": "mac", "segment_length": 64}],
    ids=["lmm", "mag", "mac"],
)
def test_short_calls_are_buffered(fields):
    model = tiny_model(dtype=F64, memory_chunk_size=64, **fields)
    ids = random_ids(1, 100)
    whole, pieces = TitansCache(model.config), TitansCache(model.config)
    assert_close("outputs", feed(model, pieces, ids, 5), feed(model, whole, ids), 1e-11)
    assert_same_state(pieces, whole, 1e-11)


@pytest.mark.parametrize("kernel_size", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("prompt", ["1", "kernel-1", "kernel", "kernel+1", "60"])
@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_convolution_reaches_across_calls(variant, kernel_size, prompt):
    model = variant_model(variant, dtype=F64, memory_conv_kernel_size=kernel_size)
    kernel = max(kernel_size, 2)
    length = {"1": 1, "kernel-1": kernel - 1, "kernel": kernel, "kernel+1": kernel + 1, "60": 60}[prompt]
    ids = random_ids(1, length + 9)
    cache = TitansCache(model.config)
    logits = feed(model, cache, ids, [length, 1, 2, 6])
    assert_close("logits", logits, logits_of(model, ids), 1e-11)
    if kernel_size:
        state = cache.layers[0].state
        assert state.memory.conv_tail.shape == (1, kernel_size - 1, 96)
        # Reading at a segment's start has a convolution of its own, over what attention has not seen yet.
        assert variant == "lmm" or state.segment.conv_tail.shape == (1, kernel_size - 1, 32)


def test_get_seq_length_counts_columns():
    model = tiny_model()
    cache = TitansCache(model.config)
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and len(cache) == 2
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    logits_of(model, random_ids(2, 5), cache=cache, attention_mask=mask)
    assert [cache.get_seq_length(), cache.get_seq_length(1), cache.batch_size] == [5, 5, 2]
    assert cache.progress.seen.tolist() == [3, 1]
    logits_of(model, random_ids(2, 3), cache=cache)
    assert cache.get_seq_length() == 8
    assert cache.progress.seen.tolist() == [6, 4]


def ragged_cache(model, ids: torch.Tensor, mask: torch.Tensor) -> TitansCache:
    return cache_after(model, ids, attention_mask=mask)


RAGGED_MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0]])
RAGGED_IDS = random_ids(3, 7, seed=5)


OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select 1": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select 2": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "to": (lambda cache: cache.to("cpu"), [0, 1, 2]),
    "detach": (lambda cache: cache.detach(), [0, 1, 2]),
    "offload": (lambda cache: [layer.offload() for layer in cache.layers], [0, 1, 2]),
}


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "ragged"])
@pytest.mark.parametrize("option", ["default", "no_conv", "depth_3", "mal", "mag", "mac", *CACHING_VARIANTS])
@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
def test_row_operations_take_everything_along(recording, option, alike):
    model = tiny_model(dtype=F64, **(OPTIONS | EVERY_VARIANT)[option])
    ids, later = random_ids(3, 13, seed=5), random_ids(3, 6, seed=8)
    mask = torch.ones_like(ids)
    if not alike:
        mask[:, : RAGGED_MASK.shape[1]] = RAGGED_MASK
    cache = cache_after(model, ids, attention_mask=mask)
    if recording:
        cache.activate_past_recording()
        feed(model, cache, RAGGED_IDS[:, :5])
        cache.crop(-2)
    expected = []
    for row in range(3):
        alone = cache_after(model, ids[[row]][:, mask[row].bool()])
        if recording:
            feed(model, alone, RAGGED_IDS[[row], :3])
        expected.append(logits_of(model, later[[row]], cache=alone))
    for name, (operation, rows) in OPERATIONS.items():
        changed = copy.deepcopy(cache)
        operation(changed)
        assert changed.batch_size == len(rows)
        logits = logits_of(model, later[rows], cache=changed)
        assert_close(name, logits, torch.cat([expected[row] for row in rows]), 1e-11)


@every_variant
def test_reset_goes_back_to_the_start(variant):
    model = variant_model(variant)
    cache = ragged_cache(model, RAGGED_IDS, RAGGED_MASK)
    cache.activate_past_recording()
    feed(model, cache, RAGGED_IDS)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and cache.nbytes == 0
    ids = random_ids(2, 9)
    assert torch.equal(feed(model, cache, ids), feed(model, TitansCache(model.config), ids))


def test_deepcopy_is_equal_and_independent():
    model = tiny_model()
    cache = ragged_cache(model, RAGGED_IDS, RAGGED_MASK)
    copied = copy.deepcopy(cache)
    ids = random_ids(3, 9)
    expected = feed(model, copy.deepcopy(copied), ids)
    assert torch.equal(feed(model, cache, ids), expected)
    assert copied.get_seq_length() == 7
    assert torch.equal(feed(model, copied, ids), expected)


@every_variant
def test_a_cache_made_with_gradients_can_be_copied_once_detached(variant):
    model = variant_model(variant)
    cache = model(random_ids(1, 6), use_cache=True).cache
    copied = copy.deepcopy(cache.detach())
    assert torch.equal(feed(model, copied, LATER), feed(model, cache, LATER))


def test_a_call_never_changes_tensors_in_place():
    model = tiny_model()
    cache = cache_after(model, random_ids(2, 6))
    before = {name: (t, t.clone()) for name, t in state_tensors(cache).items()}
    feed(model, cache, random_ids(2, 9))
    for name, (tensor, value) in before.items():
        assert torch.equal(tensor, value), name


@every_variant
def test_token_that_closes_no_chunk_copies_no_weights(variant):
    model = variant_model(variant)
    cache = cache_after(model, random_ids(1, CHUNK))
    before = [w.data_ptr() for layer in cache.layers for w in layer.state.memory.memory.weights]
    for token in random_ids(1, CHUNK - 1).split(1, 1):
        feed(model, cache, token)
        assert [w.data_ptr() for layer in cache.layers for w in layer.state.memory.memory.weights] == before
    feed(model, cache, random_ids(1, 1))
    assert before[0] != cache.layers[0].state.memory.memory.weights[0].data_ptr()


@pytest.mark.parametrize("option", ["default", "no_conv", "persistent_0"])
def test_size_is_constant_in_the_number_of_tokens(option):
    model = tiny_model(num_hidden_layers=1, memory_chunk_size=64, **OPTIONS[option])
    cache = TitansCache(model.config)
    sizes, stored = [], []
    for end in (1024, 16384):
        for _ in range(cache.get_seq_length(), end, 4096 if cache.get_seq_length() else 1024):
            logits_of(model, random_ids(1, min(4096, end - cache.get_seq_length())), cache=cache, logits_to_keep=1)
        sizes.append(cache.nbytes)
        tensors = [t for _, t in iterate_tensors(tuple(layer.tree() for layer in cache.layers))]
        stored.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
    assert cache.get_seq_length() == 16384
    assert sizes[0] == sizes[1] and stored[0] == stored[1]
    assert sizes[0] == pytest.approx(stored[0], rel=0.05)


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "ragged"])
@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
@every_variant
def test_cache_keeps_no_larger_tensor_alive(variant, recording, alike):
    model = variant_model(variant)
    cache = TitansCache(model.config)
    if recording:
        cache.activate_past_recording()
    ids = random_ids(2, 203)
    mask = torch.ones_like(ids)
    if not alike:
        mask[0, :50] = 0
    logits_of(model, ids, cache=cache, attention_mask=mask)
    tensors = [t for _, t in iterate_tensors((tuple(layer.tree() for layer in cache.layers), cache.progress))]
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    if not recording:
        # In `mac` also the weights at the segment's start, and the segment's keys.
        is_mac = cache.geometry["variant"] == "mac"
        assert cache.nbytes - cache.kept_nbytes < (130_000 if is_mac else 80_000)


def memory_dtypes(cache: TitansCache) -> set[torch.dtype]:
    """Of all that a memory has learned, also of what `mac` keeps of it for its segment."""
    states = [layer.state for layer in cache.layers]
    learned = [(state.memory.memory, state.segment and state.segment.segment_weights) for state in states]
    return {t.dtype for t in iterate_floats(tuple(learned))}


@every_variant
def test_state_is_float32_in_a_16_bit_model_and_stays_so(variant):
    model = variant_model(variant, dtype=torch.bfloat16)
    cache = cache_after(model, random_ids(1, 10))
    assert memory_dtypes(cache) == {torch.float32}
    assert model.config.variant == "lmm" or {layer.state.attention.keys.dtype for layer in cache.layers} == {
        torch.bfloat16
    }

    model = variant_model(variant)
    cache = cache_after(model, random_ids(1, 10))
    before = {name: t.clone() for name, t in state_tensors(cache).items()}
    for convert in (model.half, model.bfloat16, lambda: model.to(torch.bfloat16)):
        convert()
        for name, tensor in state_tensors(cache).items():
            assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype, name
    feed(model, cache, LATER)
    assert memory_dtypes(cache) == {torch.float32}


def test_moving_a_cache_never_narrows_it():
    model = tiny_model()
    cache = cache_after(model, random_ids(1, 10))
    with pytest.raises((TypeError, ValueError), match="dtype|device"):
        cache.to(torch.bfloat16)
    assert {t.dtype for t in iterate_floats(cache)} == {torch.float32}


def test_keys_and_values_are_refused():
    cache = TitansCache(tiny_model().config)
    with pytest.raises(NotImplementedError, match="does not update keys and values"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
