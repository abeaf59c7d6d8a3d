# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A memory kept on disk: exact when read again, whole or not there, and a clear refusal of whatever is not one."""

import json
import os
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from titans_testing import OPTIONS, logits_of, random_ids, tiny_config, tiny_model
from transformers_titans import TitansCache
from transformers_titans.cache_titans import CACHE_FILE, FORMAT
from transformers_titans.memory_state import iterate_tensors
from variant_oracle import CACHING_VARIANTS, EVERY_VARIANT, VARIANTS, variant_model


every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)

IDS = random_ids(3, 14)
LATER = random_ids(3, 9, seed=9)
RAGGED = torch.ones(3, 14, dtype=torch.long)
RAGGED[0, :3] = RAGGED[1, 5:10] = 0


def tensors_of(cache: TitansCache) -> dict[str, torch.Tensor]:
    trees = (tuple(layer.tree() for layer in cache.layers), cache.progress, cache.base_progress, cache.recorded)
    return dict(iterate_tensors(trees))


def assert_same_cache(actual: TitansCache, expected: TitansCache) -> None:
    a, e = tensors_of(actual), tensors_of(expected)
    assert a.keys() == e.keys()
    for name, tensor in e.items():
        assert a[name].dtype == tensor.dtype and torch.equal(a[name], tensor), name
    for name in ("geometry", "batch_size", "is_recording", "nbytes", "needs_replay"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.get_seq_length() == expected.get_seq_length()


def plain(model, cache):
    logits_of(model, IDS, cache=cache)


def at_chunk_border(model, cache):
    logits_of(model, IDS[:, :12], cache=cache)


def ragged(model, cache):
    logits_of(model, IDS, cache=cache, attention_mask=RAGGED)


def before_the_first_chunk(model, cache):
    logits_of(model, IDS[:, :2], cache=cache)


def documents(model, cache):
    logits_of(model, IDS, cache=cache, position_ids=torch.arange(14)[None] % 5)


def recording(model, cache):
    logits_of(model, IDS[:, :5], cache=cache)
    cache.activate_past_recording()
    logits_of(model, IDS[:, 5:], cache=cache)


def recording_from_the_start(model, cache):
    cache.activate_past_recording()
    logits_of(model, IDS, cache=cache)


def cropped(model, cache):
    recording(model, cache)
    cache.crop(-4)


def cropped_ragged(model, cache):
    logits_of(model, IDS[:, :5], cache=cache, attention_mask=RAGGED[:, :5])
    cache.activate_past_recording()
    logits_of(model, IDS[:, 5:], cache=cache, attention_mask=RAGGED[:, 5:])
    cache.crop(-4)


def cropped_to_the_limit(model, cache):
    recording(model, cache)
    cache.crop(-9)


def cropped_to_nothing(model, cache):
    recording_from_the_start(model, cache)
    cache.crop(-14)


def long_call(model, cache):
    cache.activate_past_recording()
    logits_of(model, random_ids(3, 300), cache=cache)


def with_gradients(model, cache):
    model(IDS, cache=cache)


SITUATIONS = [
    plain,
    at_chunk_border,
    ragged,
    before_the_first_chunk,
    documents,
    recording,
    recording_from_the_start,
    cropped,
    cropped_ragged,
    cropped_to_the_limit,
    cropped_to_nothing,
    long_call,
    with_gradients,
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "option", ["default", "no_conv", "persistent_0", "depth_3", "mal", "mag", "mac", *CACHING_VARIANTS]
)
def test_a_loaded_cache_goes_on_exactly(option, situation, tmp_path):
    model = tiny_model(**(OPTIONS | EVERY_VARIANT)[option])
    cache = TitansCache(model.config)
    situation(model, cache)
    cache.save_pretrained(tmp_path)
    loaded = TitansCache.from_pretrained(tmp_path, config=model.config)
    assert_same_cache(loaded, cache)
    assert torch.equal(logits_of(model, LATER, cache=loaded), logits_of(model, LATER, cache=cache))
    if cache.is_recording:
        for either in (loaded, cache):
            either.crop(-6)
        assert torch.equal(logits_of(model, LATER, cache=loaded), logits_of(model, LATER, cache=cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@every_variant
def test_dtypes_are_kept(variant, dtype, tmp_path):
    model = variant_model(variant, dtype=dtype)
    cache = TitansCache(model.config)
    cropped(model, cache)
    cache.save_pretrained(tmp_path)
    loaded = TitansCache.from_pretrained(tmp_path)
    assert_same_cache(loaded, cache)
    assert torch.equal(logits_of(model, LATER, cache=loaded), logits_of(model, LATER, cache=cache))


@every_variant
def test_a_memory_may_be_asked_in_another_dtype(variant, tmp_path):
    model = variant_model(variant)
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(tmp_path)
    expected = logits_of(model, LATER, cache=cache)
    loaded = TitansCache.from_pretrained(tmp_path)
    actual = logits_of(variant_model(variant, dtype=torch.bfloat16), LATER, cache=loaded)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.3)
    weights = [layer.state.memory.memory.weights[0].dtype for layer in loaded.layers]
    assert weights == [torch.float32] * 2


def test_a_file_may_be_named_instead_of_its_directory(tmp_path):
    model = tiny_model()
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(str(tmp_path / "new" / "folder"))
    assert os.listdir(tmp_path / "new" / "folder") == [CACHE_FILE]
    assert_same_cache(TitansCache.from_pretrained(tmp_path / "new" / "folder" / CACHE_FILE), cache)


def test_a_loaded_cache_outlives_its_file(tmp_path):
    model = tiny_model()
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(tmp_path)
    first, second = TitansCache.from_pretrained(tmp_path), TitansCache.from_pretrained(tmp_path)
    expected = logits_of(model, LATER, cache=cache)
    cache.save_pretrained(tmp_path)
    assert torch.equal(logits_of(model, LATER, cache=first), expected)
    (tmp_path / CACHE_FILE).unlink()
    assert torch.equal(logits_of(model, LATER, cache=second), expected)


def test_an_empty_cache_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        TitansCache(tiny_config()).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    model = tiny_model()
    cache = TitansCache(model.config)
    plain(model, cache)
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="taken is a file"):
        cache.save_pretrained(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("fails_at", ["write", "replace"])
def test_failure_leaves_the_old_file_and_no_rest(fails_at, tmp_path, monkeypatch):
    model = tiny_model()
    old, new = TitansCache(model.config), TitansCache(model.config)
    plain(model, old)
    ragged(model, new)
    old.save_pretrained(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    if fails_at == "write":
        monkeypatch.setattr("transformers_titans.cache_titans.save_file", fail)
    else:
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        new.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [CACHE_FILE]
    assert_same_cache(TitansCache.from_pretrained(tmp_path), old)


def test_the_file_has_the_users_ordinary_permissions(tmp_path):
    model = tiny_model()
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(tmp_path)
    (tmp_path / "other").write_text("")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (CACHE_FILE, "other")]
    assert modes[0] == modes[1]


def saved_by(variant: str, folder, **fields):
    """The file of a cache that a model of this variant has filled."""
    model = variant_model(variant, **fields)
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(folder)
    return folder / CACHE_FILE


@pytest.fixture
def saved(tmp_path):
    return saved_by("lmm", tmp_path)


def refused(path, *said) -> None:
    with pytest.raises(ValueError) as error:
        TitansCache.from_pretrained(path)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path, str(tmp_path / CACHE_FILE))
    refused(tmp_path / "nowhere", "nowhere")


@pytest.mark.parametrize("kept", [0, 5, 100, -1], ids=lambda n: f"first_{n}_bytes")
def test_a_truncated_file_is_refused(kept, saved):
    saved.write_bytes(saved.read_bytes()[:kept])
    refused(saved, str(saved))


def test_a_damaged_header_is_refused(saved):
    content = bytearray(saved.read_bytes())
    content[8:40] = b"x" * 32
    saved.write_bytes(content)
    refused(saved, str(saved))


def test_a_foreign_file_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    refused(tmp_path / "model.safetensors", "model.safetensors", "is not a Titans memory file")
    (tmp_path / "notes.txt").write_text("a few words")
    refused(tmp_path / "notes.txt", "notes.txt")


def contents(file) -> tuple[dict[str, torch.Tensor], dict]:
    """The file's tensors, and what it says of them."""
    with safe_open(file, "pt") as handle:
        return load_file(file), json.loads(handle.metadata()["cache"])


def rewrite(file, change) -> None:
    """Writes the file again after ``change(tensors, meta)``."""
    tensors, meta = contents(file)
    change(tensors, meta)
    save_file(tensors, file, metadata={"format": FORMAT, "cache": json.dumps(meta)})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: tensors.pop(next(name for name in tensors if "momentum" in name)),
        lambda tensors, meta: tensors.pop(next(name for name in tensors if "pending.k" in name)),
        lambda tensors, meta: [tensors.pop(name) for name in list(tensors) if name.startswith("0.1.")],
        lambda tensors, meta: [tensors.pop(name) for name in list(tensors) if "conv_tail" in name],
        lambda tensors, meta: tensors.update({n: t[:, :1].clone() for n, t in tensors.items() if "weights" in n}),
        lambda tensors, meta: tensors.update({n: t[:2].clone() for n, t in tensors.items() if "pending" in n}),
        lambda tensors, meta: tensors.update({n: t.half() for n, t in tensors.items() if "weights" in n}),
        lambda tensors, meta: meta.pop("geometry"),
        lambda tensors, meta: meta.pop("columns"),
        lambda tensors, meta: meta["geometry"].pop("memory_depth"),
    ],
    ids=[
        "momentum_missing",
        "pending_missing",
        "layer_missing",
        "conv_tail_missing",
        "heads_missing",
        "rows_missing",
        "narrowed",
        "geometry_missing",
        "columns_missing",
        "geometry_incomplete",
    ],
)
def test_an_incomplete_file_is_refused_at_the_latest_by_the_model(change, saved):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"incomplete|damaged|must be|must have|cache was made"):
        logits_of(tiny_model(), LATER, cache=TitansCache.from_pretrained(saved, config=tiny_config()))


def without(*names):
    """Removes the tensors in whose names one of these stands."""

    def change(tensors, meta):
        for name in [name for name in tensors if any(part in name for part in names)]:
            tensors.pop(name)

    return change


def changed(name, fn):
    """Applies ``fn`` to the tensors in whose names this stands."""
    return lambda tensors, meta: tensors.update({n: fn(t).contiguous() for n, t in tensors.items() if name in n})


def counted(name, number):
    """Sets what every layer's kept memories count under this name."""
    return lambda tensors, meta: meta["kept"].update({n: number for n in meta["kept"] if n.endswith(name)})


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("mal", without("attention.")),
        ("mag", without("attention.keys")),
        ("mac", without("attention.values")),
        ("mac", without("retrieved")),
        ("mac", without("retrieved_values")),
        ("mac", without("segment.")),
        ("mac", without("segment.segment_weights.1")),
        ("mac", without("segment.conv_tail")),
        ("mag", without("0.1.0.attention.keys")),
        ("mal", changed("attention.keys", lambda t: t[:2])),
        ("mag", changed("attention.values", lambda t: t[:, :1])),
        ("mag", changed("attention.", lambda t: t[..., :8])),
        ("mac", changed("attention.", lambda t: t[:, :, :3])),
        ("mac", changed("attention.retrieved", lambda t: t[:, :, 1:])),
        ("mag", changed("attention.", lambda t: t.repeat(1, 1, 5, 1))),
        ("mac", changed("segment_weights", lambda t: t[:, :1])),
        ("mac", changed("segment_weights", torch.Tensor.half)),
        ("mag", changed("attention.keys", torch.Tensor.long)),
        ("mac", changed("conv_tail", torch.Tensor.long)),
        ("mac", changed("memory.momentum", torch.Tensor.half)),
        ("mag", changed("0.1.0.attention.", lambda t: t[:, :, 1:])),
        ("lmm", lambda tensors, meta: meta["geometry"].update(VARIANTS["mag"])),
        ("mag", lambda tensors, meta: meta["geometry"].update(VARIANTS["lmm"])),
        ("mac", lambda tensors, meta: meta["geometry"].pop("segment_length")),
        ("mag", lambda tensors, meta: meta["geometry"].pop("variant")),
        ("lmm_grm", without("kept.keys")),
        ("lmm_grm", without("kept.total")),
        ("lmm_grm", without("kept.weights.1")),
        ("lmm_grm", without("0.1.0.memory.kept.")),
        ("lmm_grm", changed("kept.weights", lambda t: t[:, :0])),
        ("lmm_grm", changed("kept.", lambda t: torch.cat([t, t], 1))),
        ("lmm_grm", changed("kept.keys", lambda t: t[:2])),
        ("lmm_grm", changed("kept.weights", torch.Tensor.half)),
        ("lmm_grm", changed("kept.keys", torch.Tensor.long)),
        ("lmm_grm", lambda tensors, meta: meta["kept"].clear()),
        ("lmm_grm", counted("closed", 2)),
        ("lmm_grm", counted("closed", -1)),
        ("lmm_grm", counted("left", 8)),
        ("lmm_grm", counted("left", -1)),
        ("lmm_grm", lambda tensors, meta: meta["kept"].update({"0.1.0.memory.kept.left": 3})),
        ("lmm_grm", lambda tensors, meta: meta["geometry"].update(memory_caching=None)),
        ("lmm_grm", lambda tensors, meta: meta["geometry"].update(memory_caching="average")),
        ("lmm_grm", lambda tensors, meta: meta["geometry"].pop("cache_segment_length")),
        ("lmm_grm", lambda tensors, meta: meta.pop("shared")),
        ("mac_ssc", without("segment.kept")),
        ("mac_ssc", without(".runners.")),
        ("mac_ssc", without(".runners.0.1.0")),
        ("mac_ssc", changed(".runners.", torch.Tensor.half)),
        ("mac_ssc", changed(".runners.", lambda t: t[:, :1])),
        ("mac_ssc", lambda tensors, meta: meta["geometry"].update(cache_initialization="checkpoint")),
        ("mag_soup", changed("kept.", lambda t: torch.cat([t, t], 1))),
    ],
    ids=[
        "mal_without_attention",
        "mag_without_keys",
        "mac_without_values",
        "mac_without_retrieved",
        "mac_without_retrieved_values",
        "mac_without_segment",
        "mac_without_a_layers_segment_weights",
        "mac_without_query_tail",
        "mag_without_a_layers_keys",
        "rows_missing",
        "heads_missing",
        "narrow_heads",
        "mac_with_tokens_missing",
        "mac_with_a_retrieved_token_missing",
        "window_too_long",
        "segment_heads_missing",
        "segment_narrowed",
        "integer_keys",
        "integer_tails",
        "momentum_narrowed",
        "a_layers_window_shorter",
        "lmm_as_mag",
        "mag_as_lmm",
        "segment_length_missing",
        "variant_missing",
        "kept_keys_missing",
        "kept_sums_missing",
        "kept_layer_missing",
        "a_layers_kept_memories_missing",
        "kept_weights_empty",
        "kept_twice",
        "kept_rows_missing",
        "kept_weights_narrowed",
        "integer_kept_keys",
        "kept_counts_missing",
        "more_segments_than_kept",
        "segments_below_zero",
        "segment_complete",
        "segment_below_zero",
        "a_layer_counts_otherwise",
        "kept_without_caching",
        "keys_where_none_are",
        "caching_length_missing",
        "shared_missing",
        "mac_without_segment_kept",
        "runners_missing",
        "a_runners_layer_missing",
        "runners_narrowed",
        "runners_heads_missing",
        "runners_of_checkpoints",
        "more_kept_than_allowed",
    ],
)
def test_an_incomplete_attention_state_is_refused_at_the_latest_by_the_model(variant, change, tmp_path):
    file = saved_by(variant, tmp_path)
    before = contents(file)
    rewrite(file, change)
    # A change that finds nothing to change would prove nothing.
    (tensors, facts), (changed_tensors, changed_facts) = before, contents(file)
    same = tensors.keys() == changed_tensors.keys() and all(
        tensors[name].dtype == t.dtype and torch.equal(tensors[name], t) for name, t in changed_tensors.items()
    )
    assert not same or facts != changed_facts
    with pytest.raises(ValueError, match=r"incomplete|damaged|must be|must have|cache was made"):
        model = variant_model(variant)
        logits_of(model, LATER, cache=TitansCache.from_pretrained(file, config=model.config))


@pytest.mark.parametrize("count", [-1, 50])
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("lmm", "memory.memory.count"),
        ("mal", "attention.count"),
        ("mag", "attention.count"),
        ("mac", "attention.count"),
        ("mac", "memory.memory.count"),
        ("lmm_grm", "kept.closed"),
        ("lmm_grm", "kept.left"),
        ("mac_ssc", "segment.kept.closed"),
    ],
)
def test_rows_that_count_more_or_less_than_there_is_are_refused(variant, name, count, tmp_path):
    model = variant_model(variant)
    cache = TitansCache(model.config)
    ragged(model, cache)
    cache.save_pretrained(tmp_path)
    rewrite(tmp_path / CACHE_FILE, changed(name, lambda t: torch.full_like(t, count)))
    with pytest.raises(ValueError, match=r"incomplete|damaged|must be|must have"):
        logits_of(model, LATER, cache=TitansCache.from_pretrained(tmp_path, config=model.config))


@pytest.mark.parametrize(
    ("variant", "overrides", "said"),
    [
        ("lmm", {"memory_depth": 3}, "memory_depth=2"),
        ("lmm", {"memory_chunk_size": 8}, "memory_chunk_size=4"),
        ("lmm", {"num_hidden_layers": 1}, "num_hidden_layers=2"),
        ("lmm", {"memory_head_dim": 4}, "memory_head_dim=16"),
        ("lmm", VARIANTS["mac"], "variant='lmm'"),
        ("mal", VARIANTS["mag"], "variant='mal'"),
        ("mag", VARIANTS["lmm"], "variant='mag'"),
        ("mac", VARIANTS["mal"], "variant='mac'"),
        ("mal", {"sliding_window": 4}, "sliding_window=5"),
        ("mag", {"sliding_window": 512}, "sliding_window=5"),
        ("mac", {"segment_length": 16}, "segment_length=8"),
        ("mac", {"num_key_value_heads": 1}, "num_key_value_heads=2"),
        ("lmm_grm", {"memory_caching": "residual"}, "memory_caching='grm'"),
        ("lmm_grm", {"memory_caching": None}, "memory_caching='grm'"),
        ("lmm_grm", {"cache_segment_length": 4}, "cache_segment_length=8"),
        ("lmm_grm", {"connector": "query"}, "connector='projection'"),
        ("mac_ssc", {"cache_segmentation": "constant"}, "cache_segmentation='logarithmic'"),
        ("mac_ssc", {"cache_initialization": "checkpoint"}, "cache_initialization='independent'"),
        ("mag_soup", {"cache_max_segments": None}, "cache_max_segments=2"),
        ("mal", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_parameters="),
    ],
    ids=str,
)
def test_memory_of_another_model_is_refused_with_the_field(variant, overrides, said, tmp_path):
    file = saved_by(variant, tmp_path)
    fields = EVERY_VARIANT[variant] | overrides
    with pytest.raises(ValueError, match=said):
        TitansCache.from_pretrained(file, config=tiny_config(**fields))
    cache = TitansCache.from_pretrained(file)
    with pytest.raises(ValueError, match=said):
        logits_of(tiny_model(**fields), LATER, cache=cache)


@every_variant
def test_rotary_parameters_are_the_same_after_a_way_over_the_disk(variant, tmp_path):
    scaled = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
    }
    file = saved_by(variant, tmp_path, rope_parameters=scaled)
    model = variant_model(variant, rope_parameters=scaled)
    cache = TitansCache(model.config)
    plain(model, cache)
    loaded = TitansCache.from_pretrained(file, config=model.config)
    assert torch.equal(logits_of(model, LATER, cache=loaded), logits_of(model, LATER, cache=cache))


def test_a_device_may_be_named_with_its_index(tmp_path):
    model = tiny_model()
    cache = TitansCache(model.config)
    plain(model, cache)
    cache.save_pretrained(tmp_path)
    assert_same_cache(TitansCache.from_pretrained(tmp_path, device="cpu:0"), cache)
