# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Every variant with a cache: decoding, rollback, rows, files, size, and gradients through it."""

import copy
import random

import pytest
import torch

from stream_testing import (
    DOCUMENTS,
    EXACT,
    F64,
    SEGMENT,
    assert_same_future,
    assert_same_state,
    every_variant,
    every_variant_of_constant_size,
    feed,
    positions_of,
    random_sizes,
    state_tensors,
)
from titans_testing import (
    LONG_TEXT,
    assert_close,
    iterate_floats,
    logits_of,
    parameter_gradients,
    random_ids,
)
from transformers_titans import TitansCache
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import variant_model


ENDLESS = {"eos_token_id": None, "do_sample": False}


@every_variant
def test_decoding_with_an_assistant_is_greedy(variant):
    model, helper = variant_model(variant), variant_model(variant)
    for parameter in helper.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    ids = torch.tensor([[5, 9, 14, 7, 33, 21, 8, 11] * 3])
    expected = model.generate(ids, max_new_tokens=15, **ENDLESS)
    assert torch.equal(model.generate(ids, max_new_tokens=15, assistant_model=helper, **ENDLESS), expected)


@pytest.mark.parametrize(
    ("start", "masked"),
    [(0, False), (9, True), (16, False)],
    ids=["recording_from_0", "padded_recording_from_9", "recording_from_a_segments_end"],
)
@every_variant
def test_crop_at_every_distance_is_as_if_never_fed(variant, start, masked):
    model = variant_model(variant, dtype=F64, num_hidden_layers=1)
    ids, mask = random_ids(2, 21), torch.ones(2, 21, dtype=torch.long)
    if masked:
        mask[0, :3] = mask[1, [5, 17, 18]] = 0
    cache, fresh, later = TitansCache(model.config), TitansCache(model.config), random_ids(2, 9, seed=9)
    if start:
        for each in (cache, fresh):
            feed(model, each, ids[:, :start], attention_mask=mask[:, :start])
    cache.activate_past_recording()
    feed(model, cache, ids[:, start:], 7, attention_mask=mask[:, start:])
    for left in range(start, 21):
        cropped, whole = copy.deepcopy(cache), copy.deepcopy(fresh)
        cropped.crop(left - 21)
        assert cropped.get_seq_length() == left
        actual, expected = (logits_of(model, later, cache=each) for each in (cropped, whole))
        assert_close(f"{left} left", actual, expected, EXACT)
        assert cropped.progress.seen.tolist() == whole.progress.seen.tolist()
        feed(model, fresh, ids[:, left : left + 1], attention_mask=mask[:, left : left + 1])


@every_variant
def test_crop_over_a_document_border(variant):
    model = variant_model(variant, dtype=F64, num_hidden_layers=1)
    ids, positions = random_ids(2, sum(DOCUMENTS)), positions_of(DOCUMENTS)
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    feed(model, cache, ids, position_ids=positions)
    for removed in (2, 3, 21, 30):
        cropped, fresh = copy.deepcopy(cache), TitansCache(model.config)
        cropped.crop(-removed)
        feed(model, fresh, ids[:, :-removed], position_ids=positions[:, :-removed])
        assert_same_future(model, cropped, fresh)


@every_variant
def test_crop_of_a_long_padded_call(variant, soon_long_calls):
    # A long recorded call is read in two parts, with a state kept between them.
    model = variant_model(variant, dtype=F64, segment_length=24, **LONG_TEXT)
    ids, mask = random_ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = mask[1, 38:48] = 0
    for removed in (3, 19):
        cropped, fresh = TitansCache(model.config), TitansCache(model.config)
        cropped.activate_past_recording()
        feed(model, cropped, ids, attention_mask=mask)
        cropped.crop(-removed)
        feed(model, fresh, ids[:, :-removed], attention_mask=mask[:, :-removed])
        assert_same_future(model, cropped, fresh)


@every_variant
def test_any_mixture_of_calls_pads_documents_crops_and_orders(variant):
    """Random histories in which each row still ends as if its documents had been read alone."""
    model = variant_model(variant, dtype=F64, num_hidden_layers=1)
    for seed in range(3):
        draw = random.Random(seed)
        ids = random_ids(3, 34, seed=seed)
        mask = torch.tensor([[int(draw.random() < 0.8) for _ in range(34)] for _ in range(3)])
        positions, lengths = torch.zeros(3, 34, dtype=torch.long), []
        for row in range(3):
            lengths.append(random_sizes(int(mask[row].sum()), 14, seed + row))
            positions[row, mask[row].bool()] = positions_of(lengths[row])[0]
        logits, order, fed = torch.zeros(3, 34, 64, dtype=F64), torch.arange(3), 0
        cache = TitansCache(model.config)
        cache.activate_past_recording()
        while fed < 34:
            at = slice(fed, min(34, fed + draw.choice([1, 2, 5, 9, 20])))
            part = {"attention_mask": mask[order, at], "position_ids": positions[order, at]}
            logits[order, at] = logits_of(model, ids[order, at], cache=cache, **part)
            back = draw.randint(0, (at.stop - fed) // 2)
            cache.crop(-back)
            fed = at.stop - back
            swap = torch.tensor(draw.sample(range(3), 3))
            cache.reorder_cache(swap)
            order = order[swap]
        for row, real in enumerate(mask.bool()):
            alone = torch.cat([logits_of(model, part[None])[0] for part in ids[row, real].split(lengths[row])])
            assert_close(f"history {seed}, row {row}", logits[row, real], alone, EXACT)


@pytest.mark.parametrize("situation", ["plain", "ragged", "documents", "cropped", "short"])
@every_variant
def test_a_saved_cache_goes_on_exactly(variant, situation, tmp_path):
    model = variant_model(variant)
    ids, mask = random_ids(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :4] = mask[1, [3, 20]] = 0
    cache = TitansCache(model.config)
    if situation == "cropped":
        cache.activate_past_recording()
    kwargs = {"ragged": {"attention_mask": mask}, "documents": {"position_ids": positions_of([6, 15])}}
    feed(model, cache, ids[:, :2] if situation == "short" else ids, **kwargs.get(situation, {}))
    if situation == "cropped":
        cache.crop(-6)
    cache.save_pretrained(tmp_path)
    loaded = TitansCache.from_pretrained(tmp_path, config=model.config)
    actual, expected = state_tensors(loaded), state_tensors(cache)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
    later = random_ids(2, 11, seed=9)
    assert torch.equal(feed(model, loaded, later), feed(model, cache, later))


@every_variant
def test_deepcopy_is_equal_and_independent(variant):
    model = variant_model(variant)
    cache, later = TitansCache(model.config), random_ids(2, 11, seed=9)
    feed(model, cache, random_ids(2, 13))
    copied = copy.deepcopy(cache)
    expected = feed(model, copy.deepcopy(copied), later)
    assert torch.equal(feed(model, cache, later), expected)
    assert copied.get_seq_length() == 13
    assert torch.equal(feed(model, copied, later), expected)


@every_variant
def test_a_call_never_changes_tensors_in_place(variant):
    model = variant_model(variant)
    cache = TitansCache(model.config)
    feed(model, cache, random_ids(2, 13))
    before = {name: (t, t.clone()) for name, t in state_tensors(cache).items()}
    feed(model, cache, random_ids(2, 14), [1, 13])
    for name, (tensor, value) in before.items():
        assert torch.equal(tensor, value), name


@every_variant_of_constant_size
def test_size_is_constant_in_the_number_of_tokens(variant):
    fields = {"memory_chunk_size": 64, "segment_length": 256, "sliding_window": 200}
    model = variant_model(variant, **(LONG_TEXT | fields))
    cache = TitansCache(model.config)
    sizes, stored = [], []
    for part in random_ids(1, 16_384).split(2048, 1):
        logits_of(model, part, cache=cache, logits_to_keep=1)
        sizes.append(cache.nbytes)
        tensors = [t for _, t in iterate_tensors(tuple(layer.tree() for layer in cache.layers))]
        stored.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
    assert cache.get_seq_length() == 16_384
    assert len(set(sizes)) == 1
    # At a segment's end its weights are the running ones, which need no second place.
    assert len(set(stored[1:])) == 1 and stored[1] <= stored[0] <= 1.05 * sizes[0]


@every_variant_of_constant_size
def test_state_does_not_grow_while_decoding(variant):
    model = variant_model(variant)
    cache, sizes = TitansCache(model.config), []
    for token in random_ids(1, 6 * SEGMENT).split(1, 1):
        feed(model, cache, token)
        sizes.append(cache.nbytes)
    # Chunk and segment fill and empty; beyond that, nothing is kept.
    assert sizes[2 * SEGMENT :: SEGMENT] == [sizes[2 * SEGMENT]] * 4
    assert max(sizes[4 * SEGMENT :]) == max(sizes[2 * SEGMENT : 4 * SEGMENT])


@pytest.mark.parametrize("sizes", [[9, 9, 9], [5, 1, 21], [8, 16, 3]], ids=str)
@every_variant
def test_gradients_through_a_carried_cache_equal_one_call(variant, sizes):
    model = variant_model(variant, dtype=F64, num_hidden_layers=1).train()
    ids = random_ids(2, 27)
    signs = torch.randint(0, 2, (2, 27, 64)) * 2.0 - 1
    expected = parameter_gradients(model, (model(ids).logits * signs).sum())
    cache = TitansCache(model.config)
    logits = torch.cat([model(part, cache=cache).logits for part in ids.split(sizes, 1)], 1)
    actual = parameter_gradients(model, (logits * signs).sum())
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(name, actual[name], gradient, EXACT)


@every_variant
def test_every_parameter_has_a_gradient_on_a_carried_cache(variant):
    model = variant_model(variant).train()
    ids = random_ids(2, 22)
    cache = TitansCache(model.config)
    model(ids[:, :11], cache=cache)
    cache.detach()
    assert not any(t.requires_grad for t in iterate_floats(cache))
    gradients = parameter_gradients(model, model(ids[:, 11:], labels=ids[:, 11:], cache=cache).loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("with_cache", [False, True], ids=["fresh", "cache"])
@every_variant
def test_gradient_checkpointing_gives_the_same_gradients(variant, with_cache, reentrant):
    ids, results = random_ids(2, 29), []
    for checkpointing in (False, True):
        model = variant_model(variant, dtype=F64).train()
        cache = None
        if with_cache:
            cache = TitansCache(model.config)
            model(ids[:, :10], cache=cache)
            cache.detach()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        output = model(ids[:, 10:], labels=ids[:, 10:], cache=cache)
        gradients = parameter_gradients(model, output.loss)
        results.append((output.loss, gradients, cache))
    plain, checkpointed = results
    assert_close("loss", checkpointed[0], plain[0], EXACT)
    assert checkpointed[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert_close(name, checkpointed[1][name], gradient, EXACT)
    if with_cache:
        assert_same_state(checkpointed[2].detach(), plain[2].detach(), EXACT)


@every_variant
def test_hidden_states_and_surprise_in_pieces(variant):
    model = variant_model(variant, dtype=F64)
    ids, mask = random_ids(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :3] = 0
    wanted = {"output_hidden_states": True, "output_surprise": True}
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, **wanted)
        cache = TitansCache(model.config)
        parts = [
            model(part, attention_mask=real, cache=cache, **wanted)
            for part, real in zip(ids.split(6, 1), mask.split(6, 1), strict=True)
        ]
    assert len(whole.hidden_states) == 3 and len(whole.surprise) == 2
    assert torch.equal(whole.hidden_states[0], model.model.embed_tokens(ids))
    for name, shape in (("hidden_states", (2, 21, 32)), ("surprise", (2, 21, 2))):
        for layer, expected in enumerate(getattr(whole, name)):
            joined = torch.cat([getattr(part, name)[layer] for part in parts], 1)
            assert expected.shape == shape
            assert_close(f"{name} {layer}", joined[mask.bool()], expected[mask.bool()], EXACT)
    for surprise in whole.surprise:
        assert not surprise[~mask.bool()].any() and surprise[mask.bool()].min() > 0
