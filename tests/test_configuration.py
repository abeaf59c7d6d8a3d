# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""TitansConfig: defaults, round trips, and a refusal that names field, value and choice for whatever cannot be."""

import json
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from titans_testing import tiny_config
from transformers_titans import TitansConfig, TitansForCausalLM


# What transformers' strict configurations raise, around the ValueError or TypeError of the check that failed.
REFUSED = StrictDataclassError

EVERY_FIELD = {
    "vocab_size": 77,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "hidden_act": "gelu",
    "max_position_embeddings": 99,
    "initializer_range": 0.5,
    "rms_norm_eps": 1e-3,
    "use_cache": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
    "attention_bias": True,
    "attention_dropout": 0.1,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": [5, 6],
    "variant": "mag",
    "sliding_window": 11,
    "segment_length": 13,
    "num_persistent_tokens": 0,
    "memory_gating": "sigmoid",
    "memory_gate_granularity": "chunk",
    "memory_backend": "chunked",
    "memory_num_heads": 3,
    "memory_head_dim": 7,
    "memory_depth": 3,
    "memory_expansion": 1,
    "memory_chunk_size": 9,
    "memory_momentum": False,
    "memory_forgetting": False,
    "memory_max_lr": 0.7,
    "memory_max_forget": 0.2,
    "memory_forget_to": "start",
    "memory_residual": False,
    "memory_norm": False,
    "memory_conv_kernel_size": 0,
    "cache_segment_length": 18,
    "memory_caching": "soup",
    "cache_initialization": "independent",
    "cache_segmentation": "logarithmic",
    "cache_top_k": 4,
    "connector": "query",
}
# What this version builds only one way, and what only constant segmentation has.
SINGLE_CHOICE, CONSTANT = {"memory_rule"}, {"cache_max_segments"}


def fields_of(config) -> dict:
    return {name: getattr(config, name) for name in EVERY_FIELD}


def test_every_own_field_is_in_the_round_trip_list():
    inherited = set(TitansConfig.__mro__[1].__dataclass_fields__)
    own = set(TitansConfig.__dataclass_fields__) - inherited
    assert own - SINGLE_CHOICE - CONSTANT <= set(EVERY_FIELD)
    defaults = fields_of(TitansConfig())
    assert all(defaults[name] != value for name, value in EVERY_FIELD.items())


def test_documented_defaults():
    config = TitansConfig()
    described = re.findall(r"(\w+) \(`\w+`, \*optional\*, defaults to `?(.+?)`?\):", TitansConfig.__doc__)
    assert len(described) > 15
    for name, default in described:
        assert getattr(config, name) == eval(default), name
    assert config.model_type == "titans"
    assert config.memory_num_heads == config.num_attention_heads
    assert config.memory_head_dim == config.hidden_size // config.num_attention_heads
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.head_dim == config.hidden_size // config.num_attention_heads
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide num_attention_heads=12, got 5"),
        ({"variant": "mal", "head_dim": 7}, "head_dim must be even for rotary embeddings, got 7"),
        ({"attention_dropout": 1.0}, "attention_dropout must be >= 0 and < 1, got 1.0"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_type'\] must be one of .* got 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "must be 1.0, got 0.5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "'rope_theta'\\] must be > 0, got -1.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "'factor'\\] must be >= 1, got 0.0"),
        ({"variant": "mac", "segment_length": 100}, "multiple of memory_chunk_size=64 in variant 'mac', got 100"),
        ({"memory_gating": "relu"}, "memory_gating must be one of .* got 'relu'"),
    ],
)
def test_attention_that_cannot_be_is_refused(fields, message):
    with pytest.raises(REFUSED, match=message):
        TitansConfig(**fields)


def test_segments_need_not_fit_without_segments():
    assert TitansConfig(variant="mag", segment_length=100).segment_length == 100


@pytest.mark.parametrize(
    ("given", "heads", "head_dim"),
    [({}, 6, 8), ({"memory_num_heads": 4}, 4, 12), ({"memory_head_dim": 5}, 6, 5)],
    ids=["neither", "heads", "head_dim"],
)
def test_memory_width_follows_the_stream_unless_given(given, heads, head_dim):
    config = TitansConfig(hidden_size=48, num_attention_heads=6, **given)
    assert (config.memory_num_heads, config.memory_head_dim) == (heads, head_dim)


def test_json_round_trip_keeps_every_field():
    config = TitansConfig(**EVERY_FIELD)
    assert fields_of(config) == EVERY_FIELD
    again = TitansConfig(**json.loads(config.to_json_string(use_diff=False)))
    assert fields_of(again) == EVERY_FIELD
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("loader", [TitansConfig, AutoConfig], ids=["TitansConfig", "AutoConfig"])
def test_save_and_load_keeps_every_field(loader, tmp_path):
    TitansConfig(**EVERY_FIELD).save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    assert type(loaded) is TitansConfig
    assert fields_of(loaded) == EVERY_FIELD


def test_loading_accepts_transformers_own_arguments(tmp_path):
    # `cache_dir` begins like a field of this model but is one of transformers' loading arguments.
    TitansForCausalLM(tiny_config()).save_pretrained(tmp_path)
    config = TitansConfig.from_pretrained(tmp_path, cache_dir=tmp_path / "hub", memory_depth=3)
    assert config.memory_depth == 3
    assert AutoConfig.from_pretrained(tmp_path, cache_dir=tmp_path / "hub").memory_depth == 2
    model = TitansForCausalLM.from_pretrained(tmp_path, cache_dir=tmp_path / "hub")
    assert model.config.memory_depth == 2


def test_saved_file_names_every_class_and_no_layer_types(tmp_path):
    TitansConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "titans"
    assert "layer_types" not in saved
    assert saved["auto_map"] == {
        "AutoConfig": "configuration_titans.TitansConfig",
        "AutoModel": "modeling_titans.TitansModel",
        "AutoModelForCausalLM": "modeling_titans.TitansForCausalLM",
        "AutoModelForSequenceClassification": "modeling_titans.TitansForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_titans.TitansForTokenClassification",
    }


def test_auto_map_of_another_place_survives():
    elsewhere = {"AutoModel": "someone/repo--modeling_titans.TitansModel"}
    auto_map = TitansConfig(auto_map=elsewhere).auto_map
    assert auto_map["AutoModel"] == elsewhere["AutoModel"]
    assert auto_map["AutoConfig"] == "configuration_titans.TitansConfig"


WORDS = {
    "variant": ("lmm", "mal", "mag", "mac"),
    "memory_rule": ("titans", "dla", "linear_attention", "swla"),
    "memory_gate_granularity": ("token", "chunk"),
    "memory_backend": ("auto", "triton", "chunked", "compiled", "native", "recurrent"),
    "memory_forget_to": ("zero", "start"),
    "memory_caching": ("residual", "grm", "soup", "ssc", "average"),
    "cache_initialization": ("checkpoint", "independent"),
    "cache_segmentation": ("constant", "logarithmic"),
    "connector": ("projection", "query"),
}


@pytest.mark.parametrize("name", WORDS)
def test_unknown_word_is_refused_with_the_allowed_ones(name):
    with pytest.raises(REFUSED) as error:
        TitansConfig(**{name: "nonsense"})
    message = str(error.value)
    assert name in message and "'nonsense'" in message
    assert all(repr(word) in message for word in WORDS[name])


@pytest.mark.parametrize("name", ["memory_caching", "cache_initialization", "cache_segmentation", "connector"])
def test_every_word_of_memory_caching_is_built(name, tmp_path):
    for word in WORDS[name]:
        fields = {"memory_caching": "grm", name: word}
        TitansConfig(**fields).save_pretrained(tmp_path)
        loaded = TitansConfig.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in fields} == fields


AT_LEAST_ONE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads sliding_window segment_length "
    "memory_num_heads memory_head_dim memory_depth memory_expansion memory_chunk_size cache_segment_length cache_top_k"
).split()


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_size_below_one_is_refused(name, value):
    # Given heads, so that no derived field is refused before the one in question.
    fields = {"memory_num_heads": 2, "memory_head_dim": 4, name: value}
    with pytest.raises(REFUSED, match=rf"{name} must be >= 1, got {value}"):
        TitansConfig(**fields)


@pytest.mark.parametrize("name", ["num_persistent_tokens", "memory_conv_kernel_size"])
def test_size_below_zero_is_refused_and_zero_is_not(name):
    assert getattr(TitansConfig(**{name: 0}), name) == 0
    with pytest.raises(REFUSED, match=rf"{name} must be >= 0, got -1"):
        TitansConfig(**{name: -1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_max_lr", 0.0),
        ("memory_max_lr", -0.1),
        ("memory_max_lr", float("nan")),
        ("memory_max_lr", float("inf")),
        ("memory_max_forget", 0.0),
        ("memory_max_forget", 1),
        ("memory_max_forget", 1.5),
        ("memory_max_forget", float("nan")),
    ],
)
def test_gate_bound_out_of_range_is_refused(name, value):
    with pytest.raises(REFUSED, match=rf"{name} must be .*got {value}"):
        TitansConfig(**{name: value})


MATRIX = {"memory_depth": 1, "memory_residual": False, "memory_norm": False}


@pytest.mark.parametrize(
    ("rule", "field", "value", "needed"),
    [
        ("dla", "memory_depth", 1, "needs memory_depth >= 2, got 1"),
        *[
            (rule, field, value, f"needs {field}={needed}, got {value}")
            for rule in ("linear_attention", "swla")
            for field, value, needed in [
                ("memory_depth", 2, 1),
                ("memory_residual", True, False),
                ("memory_norm", True, False),
            ]
        ],
    ],
)
def test_rule_says_which_memory_it_needs(rule, field, value, needed):
    fits = {} if rule == "dla" else MATRIX
    assert TitansConfig(memory_rule=rule, **fits).memory_rule == rule
    with pytest.raises(REFUSED, match=rf"memory_rule='{rule}' {needed}"):
        TitansConfig(memory_rule=rule, **(fits | {field: value}))


def test_narrow_stream_says_that_heads_get_no_width():
    with pytest.raises(REFUSED, match="memory_head_dim must be >= 1, got 0"):
        TitansConfig(hidden_size=4, num_attention_heads=8)


def test_caching_segment_need_not_fit_while_nothing_is_cached():
    assert TitansConfig(memory_chunk_size=48).cache_segment_length == 256


@pytest.mark.parametrize("length", [1, 63, 96])
def test_caching_segment_that_does_not_fit_is_refused(length):
    said = f"cache_segment_length must be a multiple of memory_chunk_size=64, got {length}"
    with pytest.raises(REFUSED, match=said):
        TitansConfig(memory_caching="grm", cache_segment_length=length)
    assert TitansConfig(memory_caching="grm", cache_segment_length=192).cache_segment_length == 192


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cache_max_segments": 0}, "cache_max_segments must be >= 1 or None, got 0"),
        ({"cache_max_segments": -2}, "cache_max_segments must be >= 1 or None, got -2"),
        (
            {"cache_max_segments": 3, "cache_segmentation": "logarithmic"},
            "cache_max_segments must be None with cache_segmentation='logarithmic', .* got 3",
        ),
        ({"cache_max_segments": 2.0}, "cache_max_segments"),
    ],
)
def test_bound_of_kept_memories_that_cannot_be_is_refused(fields, said):
    with pytest.raises(REFUSED, match=said):
        TitansConfig(memory_caching="grm", **fields)


@pytest.mark.parametrize("backend", ["triton", "native"])
def test_backends_that_read_no_mixture_are_refused_for_soup(backend):
    said = r"memory_backend must be one of \('auto', .*\) with memory_caching='soup', got '" + backend
    with pytest.raises(REFUSED, match=said):
        TitansConfig(memory_caching="soup", memory_backend=backend)
    assert TitansConfig(memory_caching="grm", memory_backend=backend).memory_backend == backend


@pytest.mark.parametrize("most", [None, 1, 7])
def test_kept_memories_may_be_bounded(most, tmp_path):
    TitansConfig(memory_caching="grm", cache_max_segments=most).save_pretrained(tmp_path)
    assert TitansConfig.from_pretrained(tmp_path).cache_max_segments == most


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("memory_dept", "memory_depth"),
        ("memory_chunksize", "memory_chunk_size"),
        ("memory_heads", "memory_num_heads"),
        ("cache_segment_len", "cache_segment_length"),
        ("cache_topk", "cache_top_k"),
        ("segment_len", "segment_length"),
        ("num_persistent_token", "num_persistent_tokens"),
    ],
)
def test_misspelled_field_is_refused_with_the_right_name(wrong, right):
    with pytest.raises(ValueError) as error:
        TitansConfig(**{wrong: 2})
    assert f"{wrong!r}" in str(error.value)
    assert f"did you mean {right!r}?" in str(error.value)


def test_unknown_field_like_none_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        TitansConfig(memory_xyzzyqwk=1)
    assert "TitansConfig has no field 'memory_xyzzyqwk'. Fields of this kind: [" in str(error.value)
    assert "'memory_depth'" in str(error.value) and "did you mean" not in str(error.value)


def test_extra_attributes_of_others_are_kept():
    assert TitansConfig(my_note="x").my_note == "x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "768"),
        ("hidden_size", 768.0),
        ("memory_depth", None),
        ("memory_depth", True),
        ("num_persistent_tokens", False),
        ("memory_momentum", "yes"),
        ("memory_momentum", 1),
        ("memory_max_lr", "0.1"),
        ("memory_forget_to", None),
        ("memory_caching", False),
        ("eos_token_id", "2"),
    ],
)
def test_wrong_type_is_refused_at_construction_and_assignment(name, value):
    with pytest.raises(REFUSED, match=name):
        TitansConfig(**{name: value})
    config = TitansConfig()
    with pytest.raises(REFUSED, match=name):
        setattr(config, name, value)


@pytest.mark.parametrize(
    ("name", "value"), [("memory_max_forget", 2.0), ("memory_depth", 0), ("variant", "max"), ("connector", "none")]
)
def test_value_broken_by_assignment_is_not_saved(name, value, tmp_path):
    config = TitansConfig()
    setattr(config, name, value)
    with pytest.raises(REFUSED, match=name):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_saved_file_with_a_broken_value_is_refused_on_load(tmp_path):
    TitansConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"memory_chunk_size": 0}))
    with pytest.raises(REFUSED, match="memory_chunk_size must be >= 1, got 0"):
        TitansConfig.from_pretrained(tmp_path)


def test_weight_files_may_have_a_variant_too(tmp_path):
    """`from_pretrained(variant="fp16")` of an Auto class names weight files, and leaves the architecture alone."""
    model = TitansForCausalLM(tiny_config(variant="mac", segment_length=8))
    model.save_pretrained(tmp_path, variant="fp16")
    for load in (AutoModelForCausalLM.from_pretrained, TitansForCausalLM.from_pretrained):
        assert load(tmp_path, variant="fp16").config.variant == "mac"
    with pytest.raises(OSError, match="mag"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="mag")


def test_config_alone_takes_variant_as_a_field(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert TitansConfig.from_pretrained(tmp_path, variant="mag").variant == "mag"
    with pytest.raises(REFUSED, match="variant must be one of .* got 'fp16'"):
        TitansConfig.from_pretrained(tmp_path, variant="fp16")
