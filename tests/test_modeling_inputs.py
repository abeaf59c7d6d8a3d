# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments that cannot be meant: one error naming argument, value and what is allowed, and the cache unharmed."""

import copy

import pytest
import torch
from transformers import DynamicCache

from titans_testing import OPTIONS, logits_of, random_ids, tiny_model
from transformers_titans import SegmentState, TitansCache
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)

ROWS, COLUMNS, SEEN = 2, 5, 6
IDS = random_ids(ROWS, COLUMNS)
ONES = torch.ones(ROWS, COLUMNS, dtype=torch.long)

# Arguments of a call on a cache of two rows that has read six columns; and what the message must say.
BAD_CALLS = {
    "no_input": ({"input_ids": None}, ["input_ids", "inputs_embeds"]),
    "both_inputs": ({"inputs_embeds": torch.zeros(ROWS, COLUMNS, 32)}, ["input_ids", "inputs_embeds"]),
    "ids_1d": ({"input_ids": IDS[0]}, ["input_ids", "(5,)"]),
    "ids_3d": ({"input_ids": IDS[None]}, ["input_ids", "(1, 2, 5)"]),
    "ids_empty": ({"input_ids": IDS[:, :0]}, ["input_ids", "(2, 0)"]),
    "no_rows": ({"input_ids": IDS[:0]}, ["input_ids", "(0, 5)"]),
    "ids_float": ({"input_ids": IDS.float()}, ["input_ids", "torch.float32"]),
    "ids_bool": ({"input_ids": IDS.bool()}, ["input_ids", "torch.bool"]),
    "ids_list": ({"input_ids": IDS.tolist()}, ["input_ids", "list"]),
    "id_too_large": ({"input_ids": IDS.clone().fill_(64)}, ["input_ids", "64", "vocab_size=64"]),
    "id_negative": ({"input_ids": IDS.clone().fill_(-1)}, ["input_ids", "-1", "vocab_size=64"]),
    "embeds_2d": ({"input_ids": None, "inputs_embeds": torch.zeros(ROWS, 32)}, ["inputs_embeds", "(2, 32)"]),
    "embeds_narrow": (
        {"input_ids": None, "inputs_embeds": torch.zeros(ROWS, COLUMNS, 31)},
        ["inputs_embeds", "(2, 5, 31)", "32"],
    ),
    "embeds_width_1": (
        {"input_ids": None, "inputs_embeds": torch.zeros(ROWS, COLUMNS, 1)},
        ["inputs_embeds", "(2, 5, 1)", "32"],
    ),
    "embeds_integer": (
        {"input_ids": None, "inputs_embeds": torch.zeros(ROWS, COLUMNS, 32, dtype=torch.long)},
        ["inputs_embeds", "torch.int64"],
    ),
    "mask_short": ({"attention_mask": ONES[:, :3]}, ["attention_mask", "(2, 3)", "5"]),
    "mask_between": ({"attention_mask": torch.ones(ROWS, 8)}, ["attention_mask", "(2, 8)", "5", "11"]),
    "mask_long": ({"attention_mask": torch.ones(ROWS, 12)}, ["attention_mask", "(2, 12)", "5", "11"]),
    "mask_rows": ({"attention_mask": ONES[:1]}, ["attention_mask", "(1, 5)", "2"]),
    "mask_1d": ({"attention_mask": ONES[0]}, ["attention_mask", "(5,)"]),
    "mask_4d": ({"attention_mask": torch.zeros(ROWS, 1, COLUMNS, COLUMNS)}, ["attention_mask", "(2, 1, 5, 5)"]),
    "positions_1d": ({"position_ids": torch.arange(COLUMNS)}, ["position_ids", "(5,)"]),
    "positions_short": ({"position_ids": torch.arange(3)[None]}, ["position_ids", "(1, 3)"]),
    "positions_rows": ({"position_ids": torch.arange(COLUMNS).repeat(3, 1)}, ["position_ids", "(3, 5)"]),
    "positions_float": ({"position_ids": torch.arange(5.0).repeat(2, 1)}, ["position_ids", "torch.float32"]),
    "positions_list": ({"position_ids": [[0, 1, 2, 3, 4]]}, ["position_ids", "tensor", "list"]),
    "cu_seq_lens_list": ({"cu_seq_lens_q": [0, 3, 5]}, ["cu_seq_lens_q", "tensor", "list"]),
    "seq_idx_short": ({"seq_idx": torch.zeros(ROWS, 3)}, ["seq_idx", "(2, 3)"]),
    "cu_seq_lens_of_rows": ({"cu_seq_lens_q": torch.tensor([0, 5])}, ["cu_seq_lens_q", "2"]),
    "cache_tuple": ({"cache": ((torch.zeros(1), torch.zeros(1)),)}, ["cache", "TitansCache", "tuple"]),
    "cache_dynamic": ({"cache": DynamicCache()}, ["cache", "TitansCache", "DynamicCache"]),
    "cache_rows": ({"input_ids": random_ids(3, COLUMNS)}, ["cache", "2", "3"]),
}


def filled_cache(model, rows: int = ROWS) -> TitansCache:
    cache = TitansCache(model.config)
    logits_of(model, random_ids(rows, SEEN, seed=7), cache=cache)
    return cache


def contents(cache: TitansCache) -> dict[str, torch.Tensor]:
    tensors = (tuple(layer.tree() for layer in cache.layers), cache.progress)
    return {name: t.clone() for name, t in iterate_tensors(tensors)}


def assert_unchanged(cache: TitansCache, before: dict[str, torch.Tensor]) -> None:
    after = contents(cache)
    assert after.keys() == before.keys() and cache.get_seq_length() == SEEN
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("variant", ["lmm", "mag", "mac"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call_is_refused_and_leaves_the_cache_alone(case, variant):
    arguments, said = BAD_CALLS[case]
    model = variant_model(variant)
    cache = filled_cache(model)
    before = contents(cache)
    with pytest.raises((ValueError, TypeError)) as error:
        logits_of(model, **({"input_ids": IDS, "cache": cache} | arguments))
    assert all(word in str(error.value) for word in said), str(error.value)
    assert_unchanged(cache, before)
    continued = logits_of(model, IDS, cache=cache)
    expected = logits_of(model, torch.cat([random_ids(ROWS, SEEN, seed=7), IDS], 1))[:, SEEN:]
    torch.testing.assert_close(continued, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["mask_short", "mask_long", "mask_4d", "positions_1d", "embeds_narrow", "ids_float"])
def test_bad_call_without_a_cache_is_refused(case):
    arguments, said = BAD_CALLS[case]
    with pytest.raises((ValueError, TypeError)) as error:
        logits_of(tiny_model(), **({"input_ids": IDS} | arguments))
    assert said[0] in str(error.value) and said[1] in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("variant", "overrides", "said"),
    [
        ("lmm", {"memory_depth": 3}, "memory_depth=2"),
        ("lmm", {"memory_expansion": 3}, "memory_expansion=2"),
        ("lmm", {"memory_num_heads": 1}, "memory_num_heads=2"),
        ("lmm", {"memory_head_dim": 8}, "memory_head_dim=16"),
        ("lmm", {"memory_chunk_size": 5}, "memory_chunk_size=4"),
        ("lmm", {"memory_conv_kernel_size": 3}, "memory_conv_kernel_size=4"),
        ("lmm", {"num_hidden_layers": 3}, "num_hidden_layers=2"),
        ("lmm", {"hidden_size": 40}, "hidden_size=32"),
        ("lmm", VARIANTS["mal"], "variant='lmm'"),
        ("mal", VARIANTS["mag"], "variant='mal'"),
        ("mag", VARIANTS["mac"], "variant='mag'"),
        ("mac", VARIANTS["lmm"], "variant='mac'"),
        ("mal", {"sliding_window": 6}, "sliding_window=5"),
        ("mag", {"sliding_window": 4}, "sliding_window=5"),
        ("mac", {"segment_length": 12}, "segment_length=8"),
        ("mac", {"memory_depth": 1}, "memory_depth=2"),
        ("mag", {"num_key_value_heads": 1}, "num_key_value_heads=2"),
        ("mal", {"head_dim": 8}, "head_dim=16"),
        ("mac", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_parameters="),
    ],
    ids=str,
)
def test_cache_of_another_model_is_refused(variant, overrides, said):
    cache = filled_cache(variant_model(variant))
    before = contents(cache)
    with pytest.raises(ValueError, match=said):
        logits_of(tiny_model(**(VARIANTS[variant] | overrides)), IDS, cache=cache)
    assert_unchanged(cache, before)


@every_variant
def test_allowed_masks_with_a_cache(variant):
    model = variant_model(variant)
    expected = logits_of(model, IDS, cache=filled_cache(model))
    for mask in (ONES, ONES.bool(), ONES.float(), torch.ones(ROWS, SEEN + COLUMNS)):
        assert torch.equal(logits_of(model, IDS, cache=filled_cache(model), attention_mask=mask), expected)


@every_variant
def test_position_ids_of_one_row_serve_all(variant):
    model = variant_model(variant)
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    expected = logits_of(model, IDS, position_ids=positions.repeat(2, 1))
    assert torch.equal(logits_of(model, IDS, position_ids=positions), expected)


def test_int32_ids_and_positions_are_taken():
    model = tiny_model()
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    expected = logits_of(model, IDS, position_ids=positions)
    assert torch.equal(logits_of(model, IDS.int(), position_ids=positions.int()), expected)


@every_variant
def test_failure_in_a_layer_leaves_the_cache_alone(variant):
    model = variant_model(variant)
    cache = filled_cache(model)
    before = contents(cache)

    def fail(module, arguments):
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        logits_of(model, IDS, cache=cache)
    handle.remove()
    assert_unchanged(cache, before)


@pytest.mark.parametrize("option", ["default", "no_conv", "persistent_0"])
def test_the_cache_owns_its_memory(option):
    # Before the first chunk closes, the memory's weights are the learned start weights: a copy, not the parameters.
    model = tiny_model(**OPTIONS[option])
    cache = TitansCache(model.config)
    logits_of(model, IDS[:, :2], cache=cache)
    before = copy.deepcopy(cache)
    frozen = {name: t.clone() for name, t in iterate_tensors(tuple(layer.tree() for layer in cache.layers))}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for name, tensor in iterate_tensors(tuple(layer.tree() for layer in cache.layers)):
        assert torch.equal(tensor, frozen[name]), name
    assert torch.equal(logits_of(model, IDS, cache=cache), logits_of(model, IDS, cache=before))


def segment_state(model, batch_size: int = 2) -> SegmentState:
    start = model.model.layers[0].memory.start_state().expand(batch_size)
    return SegmentState(start.memory.weights, start.conv_tail[..., :32])


def test_reading_alone_needs_no_layout_and_takes_a_mask():
    model = variant_model("mac", dtype=torch.float64)
    memory, state = model.model.layers[0].memory, segment_state(model)
    hidden_states, mask = torch.randn(2, 5, 32, dtype=torch.float64), torch.ones(2, 5)
    plain = memory(hidden_states, state)
    for masked in (0, 2, 4):
        mask[1] = 1
        mask[1, masked] = 0
        keep = [t for t in range(5) if t != masked]
        output = memory(hidden_states, state, attention_mask=mask)
        alone = memory(hidden_states[1:, keep], segment_state(model, 1))
        torch.testing.assert_close(output.hidden_states[0], plain.hidden_states[0])
        torch.testing.assert_close(output.hidden_states[1, keep], alone.hidden_states[0])
        torch.testing.assert_close(output.state.conv_tail[1], alone.state.conv_tail[0])


@pytest.mark.parametrize("arguments", [{"output_surprise": True}, {"prefix_states": torch.zeros(2, 32)}])
def test_reading_alone_refuses_what_belongs_to_writing(arguments):
    model = variant_model("mac")
    with pytest.raises(ValueError, match="prefix_states and output_surprise belong to writing"):
        model.model.layers[0].memory(torch.randn(2, 5, 32), segment_state(model), **arguments)


def test_a_blocks_state_is_not_a_memorys():
    model = variant_model("mac")
    cache = model(random_ids(2, 5), use_cache=True).cache
    with pytest.raises(ValueError, match="state must be a NeuralMemoryState or SegmentState, got TitansLayerState"):
        model.model.layers[0].memory(torch.randn(2, 5, 32), cache.layers[0].state)


def test_a_mask_that_is_no_tensor_is_named():
    with pytest.raises(ValueError, match="attention_mask must be a tensor, got dict"):
        variant_model("mac")(random_ids(1, 5), attention_mask={"full_attention": None})
