# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Every variant in pieces: split calls, padding and packed documents, against one call of each text alone."""

import copy

import pytest
import torch

from stream_testing import (
    CHUNK,
    DOCUMENTS,
    EXACT,
    F64,
    SEGMENT,
    WINDOW,
    assert_same_future,
    assert_same_state,
    every_variant,
    feed,
    positions_of,
    random_sizes,
    state_tensors,
)
from titans_testing import (
    LONG_TEXT,
    assert_close,
    logits_of,
    parameter_gradients,
    random_ids,
    relative_error,
)
from transformers_titans import TitansCache
from variant_oracle import variant_model


# Below, at and above the ends of chunk, window and segment.
PIECES = sorted(
    {1, CHUNK - 1, CHUNK, CHUNK + 1, WINDOW - 1, WINDOW, WINDOW + 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 16}
)


def one_layer(variant: str, **fields):
    """What happens at the ends of pieces is each layer's own affair; four tests show it of two."""
    return variant_model(variant, num_hidden_layers=1, **fields)


@every_variant
def test_every_cut_in_two(variant):
    model = variant_model(variant, dtype=F64)
    ids = random_ids(2, 27)
    whole_cache = TitansCache(model.config)
    whole = feed(model, whole_cache, ids)
    for cut in range(1, 27):
        cache = TitansCache(model.config)
        assert_close(f"cut at {cut}", feed(model, cache, ids, [cut, 27 - cut]), whole, EXACT)
        assert_same_state(cache, whole_cache, EXACT)
        assert cache.get_seq_length() == 27


@pytest.mark.parametrize("size", PIECES)
@every_variant
def test_equal_pieces(variant, size):
    model = one_layer(variant, dtype=F64)
    ids = random_ids(2, 43)
    whole_cache, cache = TitansCache(model.config), TitansCache(model.config)
    whole = feed(model, whole_cache, ids)
    assert_close("logits", feed(model, cache, ids, size), whole, EXACT)
    assert_same_state(cache, whole_cache, EXACT)
    assert_same_future(model, cache, whole_cache)


@pytest.mark.parametrize("longest", [3, 11, 70], ids=lambda n: f"pieces_up_to_{n}")
@every_variant
def test_random_splits_of_a_long_text(variant, longest):
    model = one_layer(variant, dtype=F64, **LONG_TEXT)
    ids = random_ids(1, 120)
    whole_cache, cache = TitansCache(model.config), TitansCache(model.config)
    whole = feed(model, whole_cache, ids)
    assert_close("logits", feed(model, cache, ids, random_sizes(120, longest, longest)), whole, EXACT)
    assert_same_state(cache, whole_cache, EXACT)
    assert_same_future(model, cache, whole_cache)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("mal", {"sliding_window": 1}),
        ("mal", {"sliding_window": 2, "num_persistent_tokens": 0}),
        ("mag", {"sliding_window": 16}),
        ("mag", {"sliding_window": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("mac", {"segment_length": 4}),
        ("mac", {"segment_length": 12, "memory_conv_kernel_size": 0}),
        ("mac", {"segment_length": 12, "num_persistent_tokens": 0, "num_key_value_heads": 1}),
        ("mac", {"segment_length": 1, "memory_chunk_size": 1}),
        ("mac", {"segment_length": 12, "memory_gate_granularity": "chunk"}),
        ("lmm", {"memory_gate_granularity": "chunk"}),
    ],
    ids=str,
)
def test_splits_for_other_sizes(variant, options):
    model = one_layer(variant, dtype=F64, **options)
    ids = random_ids(2, 41)
    whole_cache = TitansCache(model.config)
    whole = feed(model, whole_cache, ids)
    for sizes in (1, 12, random_sizes(41, 9, 1)):
        cache = TitansCache(model.config)
        assert_close(str(sizes), feed(model, cache, ids, sizes), whole, EXACT)
        assert_same_state(cache, whole_cache, EXACT)


@every_variant
def test_float32_split_is_as_accurate_as_one_call(variant):
    exact, model = one_layer(variant, dtype=F64, **LONG_TEXT), one_layer(variant, **LONG_TEXT)
    for parameter, stored in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(stored.data)
    ids = random_ids(1, 120)
    reference = logits_of(exact, ids)
    allowed = 4 * relative_error(logits_of(model, ids), reference)
    assert allowed < 1e-4
    for sizes in ([110, 10], random_sizes(120, 30, 1), 1):
        assert relative_error(feed(model, TitansCache(model.config), ids, sizes), reference) <= allowed


# Left, right, interior, and pads around every end of chunk, window and segment.
MASKS = torch.ones(4, 29, dtype=torch.long)
MASKS[0, :11] = MASKS[1, 20:] = 0
MASKS[2, [0, 3, 4, 5, 8, 13, 14, 28]] = 0
MASKS[3, 2:] = 0


@pytest.mark.parametrize("sizes", [None, 1, 6], ids=lambda n: f"calls_of_{n}")
@every_variant
def test_padded_rows_equal_rows_alone(variant, sizes):
    model = one_layer(variant, dtype=F64)
    ids = random_ids(4, 29)
    cache = TitansCache(model.config)
    logits = feed(model, cache, ids, sizes, attention_mask=MASKS)
    for row, real in enumerate(MASKS.bool()):
        alone = TitansCache(model.config)
        expected = feed(model, alone, ids[row, real][None])
        assert_close(f"row {row}", logits[row, real][None], expected, EXACT)
        kept = copy.deepcopy(cache)
        kept.batch_select_indices(torch.tensor([row]))
        assert_same_future(model, kept, alone)


@every_variant
def test_what_stands_at_pads_does_not_matter(variant):
    model = one_layer(variant, dtype=F64)
    ids = random_ids(4, 29)
    other = torch.where(MASKS.bool(), ids, random_ids(4, 29, seed=1))
    first, second = TitansCache(model.config), TitansCache(model.config)
    logits = feed(model, first, ids, attention_mask=MASKS)
    changed = feed(model, second, other, attention_mask=MASKS)
    assert torch.equal(logits[MASKS.bool()], changed[MASKS.bool()])
    for name, tensor in state_tensors(first).items():
        assert torch.equal(tensor, state_tensors(second)[name]), name


@every_variant
def test_not_even_nan_at_pads_matters(variant):
    model = one_layer(variant, dtype=F64)
    embeds, real = model.get_input_embeddings()(random_ids(4, 29)).detach(), MASKS.bool()
    caches, logits = [TitansCache(model.config) for _ in range(2)], []
    for cache, pad in zip(caches, (0.0, float("nan")), strict=True):
        filled = torch.where(real.unsqueeze(-1), embeds, pad)
        logits.append(logits_of(model, inputs_embeds=filled, attention_mask=MASKS, cache=cache)[real])
    assert torch.equal(*logits)
    assert_same_future(model, *caches)


@every_variant
def test_pads_of_a_single_row(variant):
    model = one_layer(variant, dtype=F64)
    ids = random_ids(1, 29)
    for row in range(4):
        mask, real = MASKS[[row]], MASKS[row].bool()
        cache, alone = TitansCache(model.config), TitansCache(model.config)
        logits = feed(model, cache, ids, attention_mask=mask)
        assert_close(f"mask {row}", logits[:, real], feed(model, alone, ids[:, real]), EXACT)
        assert_same_future(model, cache, alone)


def borders(how: str) -> dict[str, torch.Tensor]:
    """The documents as each kind of collator tells them."""
    ends = torch.tensor(DOCUMENTS).cumsum(0)
    if how == "position_ids":
        return {"position_ids": positions_of(DOCUMENTS)}
    if how == "cu_seq_lens_q":
        return {"cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()}
    return {"seq_idx": torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))[None].int()}


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q", "seq_idx"])
@every_variant
def test_packed_documents_equal_documents_alone(variant, how):
    model = variant_model(variant, dtype=F64).train()
    ids = random_ids(1, sum(DOCUMENTS))
    signs = torch.randint(0, 2, (1, ids.shape[1], 64)) * 2.0 - 1
    packed = model(ids, **borders(how)).logits
    alone = torch.cat([model(document).logits for document in ids.split(DOCUMENTS, 1)], 1)
    assert_close("logits", packed, alone, EXACT)
    expected = parameter_gradients(model, (alone * signs).sum())
    for name, gradient in parameter_gradients(model, (packed * signs).sum()).items():
        assert_close(name, gradient, expected[name], EXACT)


@pytest.mark.parametrize("sizes", [1, 3, 8, [6, 8, 1, 20], [5, 9, 1, 17, 3]], ids=str)
@every_variant
def test_borders_through_calls_with_a_cache(variant, sizes):
    model = one_layer(variant, dtype=F64)
    ids, positions = random_ids(2, sum(DOCUMENTS)), positions_of(DOCUMENTS)
    cache, last = TitansCache(model.config), TitansCache(model.config)
    logits = feed(model, cache, ids, sizes, position_ids=positions)
    alone = torch.cat([logits_of(model, document) for document in ids.split(DOCUMENTS, 1)], 1)
    assert_close("logits", logits, alone, EXACT)
    feed(model, last, ids[:, -DOCUMENTS[-1] :])
    assert_same_future(model, cache, last)


@every_variant
def test_rows_with_different_borders_and_pads(variant):
    model = variant_model(variant, dtype=F64)
    ids, mask = random_ids(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, :3] = mask[0, 12] = mask[1, 20:] = 0
    positions = torch.zeros(2, 24, dtype=torch.long)
    pieces = ([6, 14], [15, 1, 4])
    for row, lengths in enumerate(pieces):
        positions[row, mask[row].bool()] = positions_of(lengths)[0]
    logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for row, lengths in enumerate(pieces):
        real = mask[row].bool()
        alone = torch.cat([logits_of(model, part[None]) for part in ids[row, real].split(lengths)], 1)
        assert_close(f"row {row}", logits[row, real][None], alone, EXACT)


@every_variant
def test_a_document_cannot_reach_into_the_next(variant):
    model = one_layer(variant)
    ids = random_ids(1, sum(DOCUMENTS))
    changed = ids.clone()
    changed[0, 13] = 3 + (ids[0, 13] - 2) % 61
    pair = [logits_of(model, x, position_ids=positions_of(DOCUMENTS)) for x in (ids, changed)]
    assert not torch.equal(pair[0][:, 13], pair[1][:, 13])
    assert torch.equal(pair[0][:, 14:], pair[1][:, 14:])


@pytest.mark.parametrize("sizes", [None, 1, 5], ids=lambda n: f"calls_of_{n}")
@every_variant
def test_no_token_moves_an_earlier_logit(variant, sizes):
    model = variant_model(variant, dtype=F64)
    ids = random_ids(1, 27)
    # At the start, inside and at the end of chunks and segments, and the last token: one row for each.
    places = [1, 3, 4, 6, 7, 8, 11, 15, 16, 21, 26]
    changed = ids.repeat(len(places), 1)
    for row, at in enumerate(places):
        changed[row, at] = 3 + (ids[0, at] - 2) % 61
    logits = feed(model, TitansCache(model.config), torch.cat([ids, changed]), sizes)
    for at, moved in zip(places, (logits[1:] - logits[0]).abs().amax(-1), strict=True):
        assert moved[:at].max() <= 1e-12, at
        assert moved[at:].min() > 1e-9, at
