# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of MAL, MAG and MAC: the same in every implementation, the window's exact meaning, and positions."""

import importlib.util

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from titans_testing import TOLERANCE, assert_close, logits_of, parameter_gradients, random_ids, tiny_config
from transformers_titans import TitansCache, TitansForCausalLM, attention_layout
from variant_oracle import VARIANTS, variant_model


F64 = torch.float64
WITH_ATTENTION = [name for name in VARIANTS if name != "lmm"]
WINDOWED = ["mal", "mag"]
# A memory that writes nothing and sees one token at a time: whatever passes between tokens does so by attention.
SILENT = {"memory_max_lr": 1e-30, "memory_forgetting": False, "memory_conv_kernel_size": 0, "num_hidden_layers": 1}
IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention"]
# The package of each, and what transformers calls it.
FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "FlashAttention2"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention3"),
}


@pytest.fixture(autouse=True)
def flex_attention_as_it_is():
    """transformers compiles flex_attention, for minutes on a CPU; what is asked of it here is the same eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def few_queries_at_once(monkeypatch):
    """Segments as short as those here are then read in several parts too."""
    monkeypatch.setattr(attention_layout, "QUERIES", 2)


def model_with(implementation: str, variant: str, **overrides):
    model = variant_model(variant, **overrides)
    model.set_attn_implementation(implementation)
    return model


def another(ids: torch.Tensor, at: int) -> torch.Tensor:
    """``ids`` with another token in column ``at``."""
    changed = ids.clone()
    changed[:, at] = 3 + (ids[:, at] - 2) % 61
    return changed


def documents(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


# Each is (rows, columns, arguments): one window, many windows, padding, packing.
MASK = torch.ones(2, 23, dtype=torch.long)
MASK[0, :4] = MASK[1, [2, 9, 10, 22]] = 0
CALLS = {
    "short": (2, 4, {}),
    "long": (2, 23, {}),
    "padded": (2, 23, {"attention_mask": MASK}),
    "packed": (2, 23, {"position_ids": documents([6, 1, 16])}),
    "packed_short": (1, 4, {"position_ids": documents([1, 3])}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_implementations_agree(variant, implementation, call):
    rows, columns, arguments = CALLS[call]
    ids = random_ids(rows, columns)
    real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
    eager, other = (model_with(name, variant, dtype=F64, num_key_value_heads=1) for name in ("eager", implementation))
    if implementation == "flex_attention":
        # torch has no backward of it for a CPU.
        expected, actual = (logits_of(model, ids, **arguments)[real] for model in (eager, other))
        assert_close("logits", actual, expected, TOLERANCE[F64])
        return
    signs = torch.randint(0, 2, (int(real.sum()), 64)) * 2.0 - 1
    expected, actual = (model.train()(ids, **arguments).logits[real] for model in (eager, other))
    assert_close("logits", actual, expected, TOLERANCE[F64])
    gradients = [
        parameter_gradients(model, (logits * signs).sum()) for model, logits in ((eager, expected), (other, actual))
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(name, gradients[1][name], gradient, TOLERANCE[F64])


@pytest.mark.parametrize("size", [1, 5, 6, 23])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_implementations_agree_with_a_cache(variant, implementation, size):
    ids = random_ids(2, 23)
    expected = logits_of(model_with("eager", variant, dtype=F64), ids, attention_mask=MASK)
    model = model_with(implementation, variant, dtype=F64)
    cache = TitansCache(model.config)
    parts = zip(ids.split(size, 1), MASK.split(size, 1), strict=True)
    logits = torch.cat([logits_of(model, part, cache=cache, attention_mask=mask) for part, mask in parts], 1)
    assert_close("logits", logits[MASK.bool()], expected[MASK.bool()], TOLERANCE[F64])


@pytest.mark.parametrize("size", [1, 4, 7, 23])
def test_no_query_of_a_segment_is_given_keys_far_behind_it(size, monkeypatch):
    model, ids = model_with("sdpa", "mac", dtype=F64, num_hidden_layers=1), random_ids(2, 23)
    sdpa, given = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def count(module, query, key, value, mask, **kwargs):
        given.append((query.shape[2], key.shape[2]))
        return sdpa(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", count)
    cache = TitansCache(model.config)
    logits = torch.cat([logits_of(model, part, cache=cache) for part in ids.split(size, 1)], 1)
    assert_close("logits", logits, logits_of(model_with("eager", "mac", dtype=F64, num_hidden_layers=1), ids), 1e-9)
    persistent, length = model.config.num_persistent_tokens, model.config.segment_length
    expected = []
    for begin in range(0, 23, size):
        end = min(begin + size, 23)
        while begin < end:
            border = min(end, begin - begin % length + length)
            for first in range(begin, border, 2):
                last = min(first + 2, border)
                expected.append((last - first, persistent + 2 * ((last - 1) % length + 1)))
            begin = border
    assert given == expected


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1, 7, 30], ids=lambda n: f"calls_of_{n}")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", WINDOWED)
def test_influence_ends_behind_the_window(variant, implementation, size, window):
    model = model_with(implementation, variant, dtype=F64, sliding_window=window, **SILENT)
    ids, places = random_ids(1, 30), [0, 3, 12, 20]
    rows = torch.cat([ids, *(another(ids, at) for at in places)])
    cache = TitansCache(model.config)
    logits = torch.cat([logits_of(model, part, cache=cache) for part in rows.split(size, 1)], 1)
    for at, moved in zip(places, (logits[1:] - logits[0]).abs().amax(-1), strict=True):
        assert moved[at : at + window].min() > 1e-7
        assert torch.cat([moved[:at], moved[at + window :]]).max() < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", WINDOWED)
def test_a_window_counts_real_tokens(variant, implementation):
    # The token at the window's end is still seen when there are pads between.
    model = model_with(implementation, variant, dtype=F64, **SILENT)
    ids, mask = random_ids(1, 13), torch.ones(1, 13, dtype=torch.long)
    mask[0, [3, 4, 6]] = 0
    before, after = (logits_of(model, x, attention_mask=mask) for x in (ids, another(ids, 1)))
    moved = (after - before).abs().amax(-1)[0]
    # Real tokens from 1 on: 1, 2, 5, 7, 8 are within a window of 5, the next is 9.
    assert moved[[1, 2, 5, 7, 8]].min() > 1e-7
    assert not moved[9:].any()


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_a_constant_added_to_all_positions_changes_nothing(variant):
    model = variant_model(variant, dtype=F64)
    ids = random_ids(2, 23)
    expected = logits_of(model, ids)
    for offset in (0, 1, 1000):
        assert_close(
            f"offset {offset}",
            logits_of(model, ids, position_ids=offset + torch.arange(23)[None]),
            expected,
            TOLERANCE[F64],
        )
    packed = documents([6, 1, 16])
    shifted = packed + torch.tensor([[7] * 6 + [300] + [44] * 16])
    assert_close(
        "documents",
        logits_of(model, ids, position_ids=shifted),
        logits_of(model, ids, position_ids=packed),
        TOLERANCE[F64],
    )


@pytest.mark.parametrize("size", [1, 6, 23], ids=lambda n: f"calls_of_{n}")
@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_positions_of_ten_million_are_as_exact_as_small_ones(variant, size):
    exact, model = variant_model(variant, dtype=F64), variant_model(variant)
    for parameter, stored in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(stored.data)
    ids, far = random_ids(1, 23), 10_000_000 + torch.arange(23)[None]
    cache = TitansCache(model.config)
    parts = zip(ids.split(size, 1), far.split(size, 1), strict=True)
    logits = torch.cat([logits_of(model, part, cache=cache, position_ids=at) for part, at in parts], 1)
    assert_close("logits", logits, logits_of(exact, ids), TOLERANCE[torch.float32])


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_the_order_of_tokens_matters(variant):
    # Without rotation, attention would take the keys of the window for a set.
    model = variant_model(variant, dtype=F64, **SILENT)
    ids = random_ids(1, 4)
    swapped = ids[:, [1, 0, 2, 3]]
    assert (logits_of(model, ids) - logits_of(model, swapped))[:, 2:].abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_equal_key_value_heads_are_grouped_heads(variant):
    ids = random_ids(2, 13)
    grouped = variant_model(variant, dtype=F64, num_attention_heads=4, num_key_value_heads=2)
    full = variant_model(variant, dtype=F64, num_attention_heads=4)
    full.load_state_dict(
        {
            name: tensor.unflatten(0, (2, 1, 8)).expand(2, 2, 8, *tensor.shape[1:]).flatten(0, 2)
            if ".self_attn.k_proj." in name or ".self_attn.v_proj." in name
            else tensor
            for name, tensor in grouped.state_dict().items()
        }
    )
    assert grouped.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert_close("logits", logits_of(grouped, ids), logits_of(full, ids), TOLERANCE[F64])


def attentions_of(model, ids: torch.Tensor, **kwargs):
    with torch.no_grad():
        return model(ids, output_attentions=True, **kwargs).attentions


@pytest.mark.parametrize("persistent", [0, 2])
@pytest.mark.parametrize("variant", WINDOWED)
def test_attention_weights_of_a_long_call(variant, persistent):
    model = model_with("eager", variant, dtype=F64, num_persistent_tokens=persistent)
    ids = random_ids(2, 23)
    attentions = attentions_of(model, ids)
    assert len(attentions) == 2
    distance = torch.arange(23)[:, None] - torch.arange(23)
    visible = (distance >= 0) & (distance < 5)
    for weights in attentions:
        assert weights.shape == (2, 2, 23, 23)
        assert (weights[..., visible] > 0).all() and not weights[..., ~visible].any()
        if persistent:
            assert (weights.sum(-1) < 1).all()
        else:
            assert_close("sums", weights.sum(-1), torch.ones(2, 2, 23, dtype=F64), TOLERANCE[F64])


@pytest.mark.parametrize("variant", WINDOWED)
def test_attention_weights_are_zero_across_documents_and_at_pads(variant):
    model = model_with("eager", variant, dtype=F64, num_persistent_tokens=0)
    ids, mask = random_ids(1, 12), torch.ones(1, 12, dtype=torch.long)
    mask[0, [0, 4, 11]] = 0
    positions = torch.tensor([[0, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 0]])
    real = mask[0].bool()
    document, rank = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]), real.long().cumsum(0)
    distance = rank[:, None] - rank
    visible = (distance >= 0) & (distance < 5) & (document[:, None] == document) & real[:, None] & real
    for weights in attentions_of(model, ids, attention_mask=mask, position_ids=positions):
        assert (weights[..., visible] > 0).all() and not weights[..., ~visible].any()
        assert_close("sums", weights.sum(-1)[0, 0], real.double(), TOLERANCE[F64])


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_no_attention_weights_where_there_is_no_square_of_them(variant):
    # The memory alone has none, and in a segment a token sees other things than tokens.
    assert attentions_of(model_with("eager", variant), random_ids(1, 9)) is None


@pytest.mark.parametrize("variant", WINDOWED)
def test_attention_weights_behind_kept_keys(variant):
    model = model_with("eager", variant, dtype=F64, num_persistent_tokens=0)
    ids = random_ids(2, 9)
    cache = TitansCache(model.config)
    logits_of(model, ids[:, :6], cache=cache)
    whole, later = attentions_of(model, ids), attentions_of(model, ids[:, 6:], cache=cache)
    for expected, weights in zip(whole, later, strict=True):
        # The window's last 4 keys were kept.
        assert weights.shape == (2, 2, 3, 7)
        assert_close("weights", weights, expected[:, :, 6:, 2:], TOLERANCE[F64])


@pytest.mark.parametrize("variant", WINDOWED)
def test_only_eager_attention_has_weights(variant):
    # As in transformers' own models: asked for in a call there are none, as a setting they are refused.
    model = model_with("sdpa", variant)
    assert attentions_of(model, random_ids(1, 9)) is None
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_dropout_acts_in_training_only(variant):
    ids = random_ids(2, 23)
    model, plain = variant_model(variant, attention_dropout=0.5), variant_model(variant)
    assert torch.equal(logits_of(model, ids), logits_of(plain, ids))
    model.train()
    torch.manual_seed(1)
    first = logits_of(model, ids)
    assert not torch.equal(first, logits_of(model, ids))
    torch.manual_seed(1)
    assert torch.equal(logits_of(model, ids), first)
    assert torch.equal(logits_of(plain.train(), ids), logits_of(plain.eval(), ids))


@pytest.mark.parametrize("name", FLASH_PACKAGES)
@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_an_implementation_that_is_not_installed_is_named(variant, name):
    package, title = FLASH_PACKAGES[name]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=title):
        TitansForCausalLM(tiny_config(**VARIANTS[variant], attn_implementation=name))
    model = variant_model(variant)
    with pytest.raises((ImportError, ValueError), match=title):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_sdpa_is_the_default_and_a_choice_is_kept_out_of_the_checkpoint(variant, tmp_path):
    model = TitansForCausalLM(tiny_config(**VARIANTS[variant]))
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    assert TitansForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    loaded = TitansForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["paged|eager", "somebody_elses"])
@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_an_implementation_that_knows_no_layout_is_refused_before_it_is_set(variant, name, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "somebody_elses", lambda *args, **kwargs: None)
    model = variant_model(variant)
    with pytest.raises(ValueError, match="attn_implementation must be one of .* got"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"
    assert torch.isfinite(logits_of(model, random_ids(1, 9))).all()


def test_a_factor_counts_in_the_types_that_have_one_only():
    ids = random_ids(1, 21)
    plain, ignored, linear = (
        logits_of(variant_model("mag", rope_parameters={"rope_theta": 1e4, **parameters}), ids)
        for parameters in (
            {"rope_type": "default"},
            {"rope_type": "default", "factor": 7.0},
            {"rope_type": "linear", "factor": 7.0},
        )
    )
    assert torch.equal(plain, ignored)
    assert not torch.allclose(plain, linear)


def test_yarns_temperature_is_that_of_all_keys():
    """A window of one token: its own key, at distance 0, and P's, so that the rotation itself has no part in it."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64}
    fields = {"dtype": torch.float64, "sliding_window": 1}
    scaled, plain = variant_model("mag", rope_parameters=yarn, **fields), variant_model("mag", **fields)
    factor = (0.1 * torch.log(torch.tensor(16.0, dtype=torch.float64)) + 1).item()
    for layer in plain.model.layers:
        layer.self_attn.q_proj.weight.data *= factor**2
    ids = random_ids(1, 9)
    assert_close("logits", logits_of(scaled, ids), logits_of(plain, ids), TOLERANCE[torch.float64])
