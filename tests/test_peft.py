# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""PEFT: adapters on each linear layer and on the convolution, parts trained in full, merging, saving and loading."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from titans_testing import TOLERANCE, assert_close, logits_of, random_ids
from variant_oracle import VARIANTS, variant_model


F64 = torch.float64
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "o_gate_proj", "u_proj", "gate_proj", "up_proj", "down_proj"]
MEMORY_ONLY = r".*\.memory\.(q|k|v|o|o_gate|u)_proj"
# One with a projection by which tokens are compared with segments.
every_variant = pytest.mark.parametrize("variant", [*VARIANTS, "lmm_grm"])
ATTENTION_ONLY = r".*\.self_attn\.(q|k|v|o)_proj"
# What a memory has beside its projections: small, and trained as a whole rather than by a low rank.
MEMORY_PARTS = ["start_weights", "conv1d", "theta_proj", "alpha_proj", "eta_proj", "o_norm"]


def adapted(model, **fields):
    """The model with random adapters, so that no gradient is zero for want of a first step."""
    config = LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False, **fields})
    return get_peft_model(model, config)


def adapted_modules(model) -> set[str]:
    prefix, suffix = "base_model.model.", ".lora_A"
    names = {name for name, _ in model.named_modules() if name.endswith(suffix)}
    return {name.removeprefix(prefix).removesuffix(suffix) for name in names}


def trainable(model) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_one_step(model) -> None:
    """One step of gradient descent, in which every trainable parameter must have a gradient."""
    ids = random_ids(2, 11, seed=3)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert trainable(model)
    for name, parameter in trainable(model).items():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
    torch.optim.SGD(list(trainable(model).values()), lr=0.1).step()
    model.eval()


def generated(model, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)


def assert_saved_and_merged_alike(model, variant: str, folder) -> None:
    """Logits and greedy tokens of an adapted model, loaded from disk and merged into the base."""
    ids = random_ids(2, 11)
    logits, tokens = logits_of(model, ids), generated(model, ids)
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(variant_model(variant, dtype=F64), folder).eval()
    assert_close("loaded", logits_of(loaded, ids), logits, TOLERANCE[F64])
    assert torch.equal(generated(loaded, ids), tokens)
    merged = model.merge_and_unload()
    assert_close("merged", logits_of(merged, ids), logits, TOLERANCE[F64])
    assert torch.equal(generated(merged, ids), tokens)
    assert merged.state_dict().keys() == variant_model(variant).state_dict().keys()


@every_variant
def test_every_linear_layer_takes_an_adapter(variant, tmp_path):
    model = variant_model(variant, dtype=F64)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ids = random_ids(2, 11)
    plain = logits_of(model, ids)
    model = adapted(model, target_modules="all-linear")
    assert adapted_modules(model) == linear - {"lm_head"}
    train_one_step(model)
    with model.disable_adapter():
        assert_close("disabled", logits_of(model, ids), plain, TOLERANCE[F64])
    assert not torch.allclose(logits_of(model, ids), plain)
    assert_saved_and_merged_alike(model, variant, tmp_path)


@every_variant
def test_documented_names_cover_memory_attention_and_mlp(variant):
    config = variant_model(variant).config
    num_layers, projections = config.num_hidden_layers, 5 + (config.memory_caching is not None)
    model = adapted(variant_model(variant), target_modules=MEMORY_ONLY)
    assert len(adapted_modules(model)) == projections * num_layers
    attention = 0 if config.variant == "lmm" else 4 * num_layers
    if attention:
        assert len(adapted_modules(adapted(variant_model(variant), target_modules=ATTENTION_ONLY))) == attention
    else:
        with pytest.raises(ValueError, match="Target modules .* not found in the base model"):
            adapted(variant_model(variant), target_modules=ATTENTION_ONLY)
    model = adapted(variant_model(variant), target_modules=PROJECTIONS)
    assert len(adapted_modules(model)) == (projections + 3) * num_layers + attention
    train_one_step(model)


@every_variant
def test_a_memory_is_trained_in_full_beside_adapters(variant, tmp_path):
    model = variant_model(variant, dtype=F64)
    norms = {name.split(".")[-1] for name, _ in model.named_modules() if name.endswith("norm")}
    parts = [*MEMORY_PARTS, *sorted(norms - {"o_norm"})]
    expected = [name for name, _ in model.named_parameters() if set(parts) & set(name.split("."))]
    model = adapted(model, target_modules=PROJECTIONS, modules_to_save=parts)
    copies = [name for name in trainable(model) if ".modules_to_save." in name]
    stripped = [name.replace(".modules_to_save.default", "").removeprefix("base_model.model.") for name in copies]
    assert sorted(stripped) == sorted(expected)
    before = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    train_one_step(model)
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trainable(model).items())
    assert_saved_and_merged_alike(model, variant, tmp_path)


@every_variant
def test_persistent_tokens_are_trained_and_saved_beside_adapters(variant, tmp_path):
    # PEFT saves modules, and passes over a name that belongs to a parameter without a word.
    model = variant_model(variant, dtype=F64)
    model = adapted(model, target_modules=PROJECTIONS, modules_to_save=["persistent_tokens"])
    copies = [name for name in trainable(model) if ".modules_to_save." in name]
    assert len(copies) == model.config.num_hidden_layers
    train_one_step(model)
    assert_saved_and_merged_alike(model, variant, tmp_path)


@every_variant
def test_whole_memories_are_trained_beside_adapters_on_the_rest(variant, tmp_path):
    model = variant_model(variant, dtype=F64)
    memories = {name for name, _ in model.named_parameters() if ".memory." in name}
    rest = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    if model.config.variant != "lmm":
        rest += [f"self_attn.{name}_proj" for name in "qkvo"]
    model = adapted(model, target_modules=rest, modules_to_save=["memory"])
    copies = {name for name in trainable(model) if ".modules_to_save." in name}
    stripped = {name.replace(".modules_to_save.default", "").removeprefix("base_model.model.") for name in copies}
    assert stripped == memories
    train_one_step(model)
    assert_saved_and_merged_alike(model, variant, tmp_path)


@every_variant
def test_the_convolution_takes_an_adapter(variant):
    # PEFT wants a multiple of the groups as the rank, and cannot merge a convolution that has groups.
    sizes = {"memory_num_heads": 1, "memory_head_dim": 4}
    model = adapted(variant_model(variant, **sizes), target_modules=["conv1d"], r=3 * 4)
    assert len(adapted_modules(model)) == model.config.num_hidden_layers
    train_one_step(model)
    assert generated(model, random_ids(2, 11)).shape == (2, 17)


@every_variant
def test_adapters_have_the_same_gradients_with_activations_recomputed(variant):
    ids = random_ids(2, 11)
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = variant_model(variant, dtype=F64)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = adapted(model, target_modules="all-linear").train()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in trainable(model).items()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(name, gradients[1][name], gradient, TOLERANCE[F64])
