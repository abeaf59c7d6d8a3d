# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollback: after `crop` a cache is exactly what it would be had the removed columns never been fed."""

import copy

import pytest
import torch

from titans_testing import OPTIONS, assert_close, logits_of, random_ids, tiny_model
from transformers_titans import TitansCache
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import EVERY_VARIANT, variant_model


F64 = torch.float64
CHUNK = 4
IDS = random_ids(2, 60)
LATER = random_ids(2, 9, seed=9)
every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
MASK = torch.ones(2, 60, dtype=torch.long)
MASK[0, :7] = 0


def recording_cache(model, start: int = 0, **kwargs) -> TitansCache:
    """A cache that has read `start` columns and records what comes."""
    cache = TitansCache(model.config)
    if start:
        feed(model, cache, 0, start, **kwargs)
    cache.activate_past_recording()
    return cache


def feed(model, cache, begin: int, end: int, mask=None) -> torch.Tensor:
    mask = None if mask is None else mask[:, begin:end]
    return logits_of(model, IDS[:, begin:end], cache=cache, attention_mask=mask)


def assert_as_if_never_fed(model, cache, length: int, mask=None) -> None:
    """The cache must go on like one that was fed the first ``length`` columns only."""
    assert cache.get_seq_length() == length
    fresh = TitansCache(model.config)
    if length:
        feed(model, fresh, 0, length, mask)
    for ids in (LATER[:, :1], LATER):
        assert_close("later", logits_of(model, ids, cache=cache), logits_of(model, ids, cache=fresh), 1e-11)
    assert cache.progress.seen.tolist() == fresh.progress.seen.tolist()


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "left_padded"])
@pytest.mark.parametrize("start", [0, 9, 10, 12], ids=lambda n: f"recording_from_{n}")
def test_crop_by_every_length(start, masked):
    model = tiny_model(dtype=F64)
    mask = MASK if masked else None
    cache = recording_cache(model, start, mask=mask)
    feed(model, cache, start, 18, mask)
    for removed in range(1, 18 - start + 1):
        cropped = copy.deepcopy(cache)
        cropped.crop(-removed)
        assert_as_if_never_fed(model, cropped, 18 - removed, mask)


@pytest.mark.parametrize("option", ["depth_3", "no_conv", "no_momentum", "persistent_0", "forget_to_start", "chunk_1"])
def test_crop_for_each_kind_of_memory(option):
    model = tiny_model(dtype=F64, **OPTIONS[option])
    cache = recording_cache(model, 5, mask=MASK)
    feed(model, cache, 5, 18, MASK)
    cache.crop(-7)
    assert_as_if_never_fed(model, cache, 11, MASK)


@every_variant
def test_crop_many_times_as_assisted_decoding_does(variant):
    model = variant_model(variant, dtype=F64)
    cache = recording_cache(model)
    feed(model, cache, 0, 13)
    cache.crop(0)
    length = 13
    for fed, removed in ((5, 3), (6, 6), (1, 0), (9, 2), (4, 4), (5, 1)):
        wrong = random_ids(2, fed, seed=fed)
        wrong[:, : fed - removed] = IDS[:, length : length + fed - removed]
        logits_of(model, wrong, cache=cache)
        cache.crop(-removed)
        length += fed - removed
    assert length == 27
    assert_as_if_never_fed(model, cache, 27)


def test_several_calls_between_crops():
    model = tiny_model(dtype=F64)
    cache = recording_cache(model, 3)
    for begin in range(3, 33, 6):
        feed(model, cache, begin, begin + 6)
    cache.crop(-17)
    assert_as_if_never_fed(model, cache, 16)


def test_crop_twice_without_a_call_between():
    model = tiny_model(dtype=F64)
    cache = recording_cache(model, 2)
    feed(model, cache, 2, 20)
    cache.crop(-3)
    cache.crop(-5)
    cache.crop(0)
    assert_as_if_never_fed(model, cache, 12)


def test_crop_by_zero_is_the_new_limit():
    model = tiny_model(dtype=F64)
    cache = recording_cache(model)
    feed(model, cache, 0, 10)
    cache.crop(0)
    with pytest.raises(RuntimeError, match="cannot take back 1 columns: 0 have been recorded"):
        cache.crop(-1)
    feed(model, cache, 10, 14)
    cache.crop(-4)
    assert_as_if_never_fed(model, cache, 10)


@pytest.mark.parametrize("fed", [0, 10])
def test_crop_by_zero_needs_no_recording(fed):
    model = tiny_model(dtype=F64)
    cache = TitansCache(model.config)
    if fed:
        feed(model, cache, 0, fed)
    size = cache.nbytes
    cache.crop(0)
    assert cache.nbytes == size
    assert_as_if_never_fed(model, cache, fed)


def contents(cache) -> dict[str, torch.Tensor]:
    tensors = (tuple(layer.tree() for layer in cache.layers), cache.progress, cache.recorded)
    return {name: t.clone() for name, t in iterate_tensors(tensors)}


@pytest.mark.parametrize("recording", [False, True], ids=["not_recording", "recording"])
@every_variant
def test_crop_past_what_is_recorded_is_refused_and_changes_nothing(variant, recording):
    model = variant_model(variant, dtype=F64)
    cache = TitansCache(model.config)
    feed(model, cache, 0, 9)
    if recording:
        cache.activate_past_recording()
        feed(model, cache, 9, 11)
    before, length = contents(cache), cache.get_seq_length()
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-3)
    assert cache.get_seq_length() == length
    for name, tensor in contents(cache).items():
        assert torch.equal(tensor, before[name]), name
    assert_as_if_never_fed(model, cache, length)


@pytest.mark.parametrize("number", [1, 3, -12, -100])
def test_impossible_crop_is_refused(number):
    model = tiny_model(dtype=F64)
    cache = recording_cache(model)
    feed(model, cache, 0, 11)
    with pytest.raises(ValueError, match=rf"tokens_to_remove must be between -11 and 0 .*got {number}"):
        cache.crop(number)
    assert_as_if_never_fed(model, cache, 11)


@every_variant
def test_crop_of_a_long_call_starts_from_a_state_near_its_end(variant, soon_long_calls):
    model = variant_model(variant, dtype=F64, memory_max_lr=0.01, memory_max_forget=0.001)
    ids, later = random_ids(1, 75), LATER[:1]
    for removed in (1, 16, 17, 60, 75):
        cache = TitansCache(model.config)
        cache.activate_past_recording()
        whole = logits_of(model, ids, cache=cache)
        assert whole.shape == (1, 75, 64) and cache.layers[0].marks[-1][0] == 75 - 16
        cache.crop(-removed)
        fresh = TitansCache(model.config)
        if removed < 75:
            prefix = logits_of(model, ids[:, : 75 - removed], cache=fresh)
            assert_close("prefix", whole[:, : 75 - removed], prefix, 1e-9)
        expected = logits_of(model, later, cache=fresh)
        assert_close(f"removed {removed}", logits_of(model, later, cache=cache), expected, 1e-9)


@every_variant
def test_long_recorded_call_returns_all_that_a_short_one_does(variant, soon_long_calls):
    model = variant_model(variant, dtype=F64, memory_max_lr=0.01, memory_max_forget=0.001)
    ids = random_ids(1, 75)
    mask = torch.ones_like(ids)
    mask[:, 61:66] = 0
    wanted = {"attention_mask": mask, "output_surprise": True, "output_hidden_states": True}
    with torch.no_grad():
        expected = model(ids, use_cache=False, **wanted)
        cache = TitansCache(model.config)
        cache.activate_past_recording()
        actual = model(ids, cache=cache, **wanted)
        model.config.output_hidden_states = True
        cache.reset()
        by_config = model(ids, cache=cache, attention_mask=mask)
    assert_close("logits", actual.logits, expected.logits, 1e-9)
    for name in ("surprise", "hidden_states"):
        for a, e in zip(getattr(actual, name), getattr(expected, name), strict=True):
            assert_close(name, a, e, 1e-9)
    assert len(by_config.hidden_states) == 3


@every_variant
def test_recording_keeps_gradients_out(variant):
    model = variant_model(variant).train()
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    model(IDS[:, :9], cache=cache)
    cache.detach()
    cache.crop(-3)
    loss = model(IDS[:, 6:12], labels=IDS[:, 6:12], cache=cache).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_variant
def test_document_borders_are_replayed(variant):
    model = variant_model(variant, dtype=F64)
    positions = torch.cat([torch.arange(7), torch.arange(5), torch.arange(8)])[None]
    expected_cache = TitansCache(model.config)
    logits_of(model, IDS[:, :15], position_ids=positions[:, :15], cache=expected_cache)
    cache = recording_cache(model)
    logits_of(model, IDS[:, :20], position_ids=positions, cache=cache)
    cache.crop(-5)
    assert cache.progress.position.tolist() == [2, 2]
    expected = logits_of(model, LATER, cache=expected_cache)
    assert_close("later", logits_of(model, LATER, cache=cache), expected, 1e-11)
    # Position 12 goes on from position 11 in both.
    follow = torch.arange(12, 15)[None]
    actual = logits_of(model, LATER[:, :3], position_ids=follow, cache=cache)
    assert_close("on", actual, logits_of(model, LATER[:, :3], position_ids=follow, cache=expected_cache), 1e-11)


@every_variant
def test_rows_of_a_cropped_cache_can_be_reordered_before_the_next_call(variant):
    model = variant_model(variant, dtype=F64)
    cache = recording_cache(model, 4, mask=MASK)
    feed(model, cache, 4, 15, MASK)
    cache.crop(-4)
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    expected = logits_of(model, LATER[[1, 0]], cache=copied)
    assert_close("later", logits_of(model, LATER, cache=cache)[[1, 0]], expected, 1e-11)


@every_variant
def test_recording_ends_with_the_flag(variant):
    # As transformers does behind an assisted call.
    model = variant_model(variant, dtype=F64)
    cache = recording_cache(model)
    feed(model, cache, 0, 9)
    cache.crop(-2)
    for layer in cache.layers:
        layer.record_past = False
    feed(model, cache, 7, 12)
    assert not cache.is_recording and cache.recorded is None
    assert_as_if_never_fed(model, cache, 12)


@every_variant
def test_a_cache_cropped_to_nothing_is_no_view_of_the_parameters(variant):
    model = variant_model(variant, num_persistent_tokens=0)
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    logits_of(model, IDS[:1, :2], cache=cache)
    cache.crop(-2)
    logits_of(model, IDS[:1, :2], cache=cache)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not any(t.untyped_storage().data_ptr() in parameters for _, t in iterate_tensors(cache.layers[0].tree()))
