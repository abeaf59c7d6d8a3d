# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call must not cost: work, copies and memory that nobody asked for."""

import pytest
import torch

from stream_testing import feed
from titans_testing import logits_of, random_ids
from transformers_titans import TitansCache
from transformers_titans.kept_plan import KeptCounts
from transformers_titans.segment_plan import SegmentOptions, plan_segments
from variant_oracle import VARIANTS, variant_model


every_variant = pytest.mark.parametrize("variant", VARIANTS)
OPTIONS = SegmentOptions(segment_length=8, chunk_size=4, num_persistent=2, implementation="sdpa")


def plan(mask, starts=None, count=0):
    cos_sin = (torch.zeros(1, mask.shape[1], 4),) * 2
    return plan_segments(OPTIONS, tuple(mask.shape), count, 0, KeptCounts(0, 0, 0), cos_sin, mask, starts)


def test_packed_documents_take_no_more_columns_than_their_longest_rows():
    mask = torch.ones(2, 60, dtype=torch.bool)
    starts = torch.zeros_like(mask)
    starts[0, 3::3] = True
    starts[1, 5::5] = True
    pieces = plan(mask, starts)
    # Twelve documents of five tokens beside as many of three, then eight more of three: in whole chunks of four.
    assert pieces.lengths == (8,) * 12 + (4,) * 8


def test_a_padded_text_within_a_segment_is_one_piece():
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    pieces = plan(mask)
    assert pieces.lengths == (7,)
    assert pieces.pieces[0].closed is False and pieces.pieces[0].restart is None


def test_a_call_of_nothing_but_padding_is_one_empty_piece():
    pieces = plan(torch.zeros(2, 7, dtype=torch.bool))
    assert pieces.lengths == (4,)
    assert not pieces.pieces[0].mask.any()


@every_variant
def test_padded_rows_have_room_for_what_they_have_read(variant):
    model = variant_model(variant, sliding_window=1000, segment_length=1000)
    cache = TitansCache(model.config)
    feed(model, cache, random_ids(2, 7), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]))
    kept = {layer.state.attention.keys.shape[2] for layer in cache.layers if layer.state.attention is not None}
    # In `mac` room for them grows in steps.
    assert kept == {"lmm": set(), "mal": {7}, "mag": {7}, "mac": {64}}[variant]


def test_a_padded_token_that_ends_no_segment_copies_no_weights():
    model = variant_model("mac", memory_chunk_size=4, segment_length=8)
    cache = TitansCache(model.config)
    feed(model, cache, random_ids(2, 5), attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
    before = [w.data_ptr() for layer in cache.layers for w in layer.state.segment.segment_weights]
    feed(model, cache, random_ids(2, 1))
    assert [w.data_ptr() for layer in cache.layers for w in layer.state.segment.segment_weights] == before
    feed(model, cache, random_ids(2, 2))
    assert before[0] != cache.layers[0].state.segment.segment_weights[0].data_ptr()


@every_variant
@pytest.mark.parametrize("recording", [False, True])
def test_inputs_are_handed_to_the_cache_only_while_it_records(variant, recording, monkeypatch):
    model = variant_model(variant)
    cache, handed = TitansCache(model.config), []
    if recording:
        cache.activate_past_recording()
    advance = cache.advance
    monkeypatch.setattr(
        cache, "advance", lambda c, states, inputs: handed.extend(inputs) or advance(c, states, inputs)
    )
    logits_of(model, random_ids(1, 9), cache=cache)
    assert len(handed) == model.config.num_hidden_layers
    assert all((t is not None) == recording for t in handed)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("variant", ["mal", "mag"])
def test_blocks_return_attention_weights_only_on_request(variant, wanted):
    model, returned = variant_model(variant), []
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, arguments, output: returned.append(output.attentions))
    output = model(random_ids(1, 9), output_attentions=wanted)
    assert [weights is not None for weights in returned] == [wanted] * model.config.num_hidden_layers
    assert (output.attentions is not None) == wanted


def test_rows_that_are_alike_share_their_masks():
    model, masks = variant_model("mal", sliding_window=5), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, arguments: masks.append(arguments[2].attention_mask))
    logits_of(model, random_ids(3, 23), use_cache=False)
    # Five blocks of five tokens, whatever the number of rows, and one mask for all layers.
    assert {tuple(mask.shape) for mask in masks} == {(5, 1, 5, 12)}
    assert len({mask.data_ptr() for mask in masks}) == 1
