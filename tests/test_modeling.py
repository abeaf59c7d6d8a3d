# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The models as transformers models: what its own common tests ask of every architecture, under their names."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from titans_testing import OPTIONS, assert_close, fill_with_noise, logits_of, random_ids, tiny_config, tiny_model
from transformers_titans import (
    TitansCache,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansForTokenClassification,
    TitansModel,
)
from transformers_titans.memory_layer import ALPHA_START, ETA_START, start_weight_std, theta_start
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


MODELS = {
    "base": TitansModel,
    "causal_lm": TitansForCausalLM,
    "sequence_classification": TitansForSequenceClassification,
    "token_classification": TitansForTokenClassification,
}

every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)


def assert_same_parameters(model, reference) -> None:
    expected = reference.state_dict()
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def test_the_noise_makes_the_memory_matter():
    model = tiny_model()
    ids = random_ids(1, 40)
    whole = logits_of(model, ids)
    assert (logits_of(model, ids[:, 20:]) - whole[:, 20:]).abs().amax(-1).min() > 1e-3
    for gate in ("theta_proj", "alpha_proj", "eta_proj"):
        changed = copy.deepcopy(model)
        for layer in changed.model.layers:
            getattr(layer.memory, gate).bias.data += 0.5
        assert (logits_of(changed, ids)[:, 20:] - whole[:, 20:]).abs().max() > 1e-3, gate


@pytest.mark.parametrize("option", OPTIONS)
def test_forward_is_finite_and_shaped(option):
    model = tiny_model(**OPTIONS[option])
    for length in (1, 3, 4, 5, 13):
        logits = logits_of(model, random_ids(2, length))
        assert logits.shape == (2, length, 64) and torch.isfinite(logits).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("variant", "option"),
    [
        ("lmm", "default"),
        ("lmm", "tied"),
        ("lmm", "no_conv"),
        ("lmm", "no_norm"),
        ("lmm", "persistent_0"),
        ("mal", "default"),
        ("mag", "default"),
        ("mag", "tied"),
        ("mac", "default"),
        ("mac", "persistent_0"),
        ("mac", "attention_bias"),
    ],
)
def test_save_load_is_bit_equal(variant, option, dtype, tmp_path):
    options = OPTIONS | {"attention_bias": {"attention_bias": True, "num_key_value_heads": 1}}
    model = variant_model(variant, dtype=dtype, **options[option])
    model.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_same_parameters(loaded, model)
    ids = random_ids(2, 11)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_save_load_keeps_the_stored_dtype_by_default(tmp_path):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in TitansForCausalLM.from_pretrained(tmp_path).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", MODELS)
@every_variant
def test_save_load_of_each_class(variant, kind, tmp_path):
    model = variant_model(variant, model_class=MODELS[kind])
    model.save_pretrained(tmp_path)
    assert_same_parameters(MODELS[kind].from_pretrained(tmp_path), model)


@every_variant
def test_save_load_in_shards(variant, tmp_path):
    model = variant_model(variant)
    model.save_pretrained(tmp_path, max_shard_size="10kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_parameters(TitansForCausalLM.from_pretrained(tmp_path), model)


IN_EVERY_VARIANT = [
    "model.layers.0.memory.start_weights.1",
    "model.layers.0.memory.theta_proj.bias",
    "model.layers.1.memory.alpha_proj.bias",
    "model.layers.1.memory.eta_proj.weight",
    "model.layers.0.memory.memory_norm_weight",
    "model.layers.0.memory.o_norm.weight",
    "model.layers.1.persistent_tokens.weight",
    "model.layers.0.input_layernorm.weight",
]
WITH_ATTENTION = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.o_proj.bias"]
COMBINED = ["model.layers.0.combination.attention_norm.weight", "model.layers.1.combination.memory_norm.weight"]
REMOVED = {
    "lmm": IN_EVERY_VARIANT,
    "mal": [*IN_EVERY_VARIANT, *WITH_ATTENTION, "model.layers.1.pre_attention_layernorm.weight"],
    "mag": [*IN_EVERY_VARIANT, *WITH_ATTENTION, *COMBINED],
    "mac": [*IN_EVERY_VARIANT, *WITH_ATTENTION, *COMBINED],
}


@pytest.mark.parametrize(
    ("variant", "removed"), [(variant, name) for variant, names in REMOVED.items() for name in names]
)
def test_load_with_missing_key_initialises_that_one_alone(variant, removed, tmp_path):
    model = variant_model(variant, attention_bias=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    saved = tensors.pop(removed)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = TitansForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {removed}
    state = loaded.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    fresh = TitansForCausalLM(tiny_config(attention_bias=True, **VARIANTS[variant])).state_dict()[removed]
    assert not torch.equal(state[removed], saved)
    if fresh.unique().numel() == 1:
        assert torch.equal(state[removed], fresh), "the start value is a constant of its own, not a Linear's"
    else:
        assert state[removed].std().item() == pytest.approx(fresh.std().item(), rel=0.5)


@every_variant
def test_load_base_model_into_head_and_back(variant, tmp_path):
    model = variant_model(variant)
    model.save_pretrained(tmp_path / "lm")
    base = TitansModel.from_pretrained(tmp_path / "lm")
    assert_same_parameters(base, model.model)
    base.save_pretrained(tmp_path / "base")
    loaded = TitansForCausalLM.from_pretrained(tmp_path / "base")
    assert_same_parameters(loaded.model, model.model)


@pytest.mark.parametrize(
    ("auto_class", "model_class"),
    [
        (AutoModel, TitansModel),
        (AutoModelForCausalLM, TitansForCausalLM),
        (AutoModelForSequenceClassification, TitansForSequenceClassification),
    ],
)
def test_auto_classes_build_and_load(auto_class, model_class, tmp_path):
    assert type(auto_class.from_config(tiny_config())) is model_class
    tiny_model(model_class).save_pretrained(tmp_path)
    assert type(auto_class.from_pretrained(tmp_path)) is model_class


@pytest.mark.parametrize("option", ["default", "depth_3", "no_norm", "no_conv", "persistent_0"])
def test_initial_gates_and_start_weights(option):
    config = tiny_config(**OPTIONS[option])
    memory = TitansForCausalLM(config).model.layers[0].memory
    starts = {"theta_proj": theta_start(config.memory_depth), "alpha_proj": ALPHA_START, "eta_proj": ETA_START}
    for gate, start in starts.items():
        assert torch.equal(getattr(memory, gate).bias, torch.full((2,), start)), gate
    assert memory.theta_proj.weight.std().item() == pytest.approx(config.initializer_range, rel=0.5)
    for layer, weight in enumerate(memory.start_weights()):
        assert weight.std().item() == pytest.approx(start_weight_std(layer, weight.shape[1]), rel=0.1)


def test_tied_weights_are_one_tensor_and_stored_once(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = TitansForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_parameters(loaded, model)


def test_untied_head_is_stored_and_not_overwritten(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_resize_token_embeddings(tie):
    model = tiny_model(tie_word_embeddings=tie)
    ids = random_ids(2, 9)
    before = logits_of(model, ids)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert torch.equal(logits_of(model, ids)[..., :64], before)
    assert logits_of(model, torch.tensor([[69, 64]])).shape == (1, 2, 70)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert model.lm_head.weight.grad.shape == (70, 32)
    model.resize_token_embeddings(30)
    assert logits_of(model, ids % 30).shape == (2, 9, 30)
    with pytest.raises(ValueError, match=r"vocab_size=30\), got 31"):
        model(torch.tensor([[31]]))


def test_get_and_set_embeddings():
    model = tiny_model()
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    replacement = torch.nn.Embedding(64, 32)
    model.set_input_embeddings(replacement)
    assert model.model.embed_tokens is replacement


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match="hidden_act must be one of .*'silu'.*, got 'sillu'"):
        tiny_model(hidden_act="sillu")


def test_hidden_states_output():
    model = tiny_model(num_hidden_layers=3)
    ids = random_ids(2, 7)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert all(h.shape == (2, 7, 32) for h in output.hidden_states)
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert len({h.sum().item() for h in output.hidden_states}) == 4
    assert model(ids).hidden_states is None


@pytest.mark.parametrize("kind", MODELS)
@every_variant
def test_return_dict_false_gives_the_same_tensors_as_a_tuple(variant, kind):
    model = variant_model(variant, model_class=MODELS[kind])
    ids = random_ids(1, 7)
    with torch.no_grad():
        named = model(ids, use_cache=False, output_hidden_states=True)
        plain = model(ids, use_cache=False, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], named[0])
    assert len(plain) == len(named.to_tuple())


@every_variant
def test_logits_to_keep(variant):
    model = variant_model(variant)
    ids = random_ids(2, 9)
    whole = logits_of(model, ids)
    assert_close("last", logits_of(model, ids, logits_to_keep=1), whole[:, -1:], 1e-6)
    assert_close("chosen", logits_of(model, ids, logits_to_keep=torch.tensor([0, 5])), whole[:, [0, 5]], 1e-6)


@every_variant
def test_inputs_embeds_equal_input_ids(variant):
    model = variant_model(variant)
    ids = random_ids(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        masked = model(inputs_embeds=embeds, attention_mask=mask).logits
    assert torch.equal(masked, logits_of(model, ids, attention_mask=mask))


@every_variant
def test_deepcopy_is_equal_and_independent(variant):
    model = variant_model(variant)
    ids = random_ids(1, 9)
    before = logits_of(model, ids)
    copied = copy.deepcopy(model)
    assert torch.equal(logits_of(copied, ids), before)
    fill_with_noise(copied, seed=5)
    assert torch.equal(logits_of(model, ids), before)


@every_variant
def test_no_state_is_left_in_the_module(variant):
    model = variant_model(variant)
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    ids = random_ids(2, 9)
    first = logits_of(model, ids)
    model.generate(ids, max_new_tokens=5, do_sample=False)
    model.train()
    model(ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()
    for _ in range(2):
        assert torch.equal(logits_of(model, random_ids(4, 7, seed=3)), logits_of(model, random_ids(4, 7, seed=3)))
        assert torch.equal(logits_of(model, ids), first)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@every_variant
def test_runs_without_gradients(variant, mode):
    model = variant_model(variant)
    ids = random_ids(2, 13)
    whole = model(ids).logits
    with mode():
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], cache=first.cache)
    assert not second.logits.requires_grad
    assert_close("logits", torch.cat([first.logits, second.logits], 1), whole, 1e-5)


@every_variant
def test_cache_is_made_in_evaluation_and_on_request_only(variant):
    model = variant_model(variant)
    ids = random_ids(1, 5)
    assert isinstance(model(ids).cache, TitansCache)
    assert model(ids, use_cache=False).cache is None
    assert model(ids, labels=ids).cache is None
    assert isinstance(model(ids, labels=ids, use_cache=True).cache, TitansCache)
    model.config.use_cache = False
    assert model(ids).cache is None
    model.config.use_cache = True
    model.train()
    assert model(ids).cache is None
    assert isinstance(model(ids, use_cache=True).cache, TitansCache)


def test_cache_under_its_older_name_is_not_ignored():
    # transformers' own models take `past_key_values` for `cache` until 5.40.
    model = tiny_model()
    ids = random_ids(1, 12)
    cache = TitansCache(model.config)
    logits_of(model, ids[:, :7], cache=cache)
    expected = logits_of(model, ids)[:, 7:]
    assert_close("logits", logits_of(model, ids[:, 7:], past_key_values=cache), expected, 1e-5)


@pytest.mark.parametrize("option", ["default", "persistent_0", "no_conv", "no_norm"])
def test_layers_may_be_offloaded(option, tmp_path):
    model = tiny_model(**OPTIONS[option])
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "lm_head": "cpu"}
    offloaded = TitansForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    ids = torch.tensor([[5, 9, 14, 7] * 4])
    assert torch.equal(logits_of(offloaded, ids), logits_of(model, ids))
    arguments = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **arguments)
    assert torch.equal(offloaded.generate(ids, **arguments), expected)
    # A rollback lets the layers read again what they have read before.
    assert torch.equal(offloaded.generate(ids, prompt_lookup_num_tokens=3, **arguments), expected)


def test_config_of_a_checkpoint_says_which_class_saved_it(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["TitansForCausalLM"]


@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_sequence_classification_reads_each_rows_last_token(variant, side):
    model = variant_model(variant, model_class=TitansForSequenceClassification, num_labels=3)
    short, long = random_ids(1, 5), random_ids(1, 9, seed=1)
    pads = torch.zeros(1, 4, dtype=torch.long)
    padded = torch.cat([pads, short] if side == "left" else [short, pads], 1)
    ids = torch.cat([padded, long])
    mask = ids.ne(0).long()
    logits = logits_of(model, ids, attention_mask=mask)
    assert logits.shape == (2, 3)
    assert_close("padded row", logits[:1], logits_of(model, short), 1e-5)
    assert_close("full row", logits[1:], logits_of(model, long), 1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@every_variant
def test_token_classification_reads_each_token_as_if_its_row_were_alone(variant, side):
    model = variant_model(variant, model_class=TitansForTokenClassification, num_labels=3)
    short, long = random_ids(1, 9), random_ids(1, 13, seed=1)
    pads = torch.zeros(1, 4, dtype=torch.long)
    padded = torch.cat([pads, short] if side == "left" else [short, pads], 1)
    labels = torch.randint(0, 3, (2, 13))
    labels[0, padded[0] == 0] = -100
    ids = torch.cat([padded, long])
    mask = ids.ne(0)
    with torch.no_grad():
        output = model(ids, attention_mask=mask.long(), labels=labels)
    assert output.logits.shape == (2, 13, 3)
    for row, logits in enumerate(output.logits):
        assert_close(f"row {row}", logits[mask[row]][None], logits_of(model, ids[[row]][:, mask[row]]), 1e-5)
    expected = torch.nn.functional.cross_entropy(output.logits[mask], labels[mask])
    assert_close("loss", output.loss, expected, 1e-5)


@pytest.mark.parametrize(
    ("model_class", "labels"),
    [
        (TitansForSequenceClassification, torch.tensor([0, 2])),
        (TitansForTokenClassification, torch.tensor([[0, 1, 2, 1, 0, -100, -100], [2, 1, 0, 0, 1, 2, 2]])),
    ],
    ids=["sequence", "token"],
)
@every_variant
def test_classification_heads_train(variant, model_class, labels):
    model = variant_model(variant, model_class=model_class, num_labels=3, classifier_dropout=0.0).train()
    ids = random_ids(2, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=labels).loss
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
