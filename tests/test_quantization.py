# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: which layers keep their precision unasked, decoding, saving, and training adapters on top.

bitsandbytes packs 4-bit weights in blocks, hence the sizes: inputs a multiple of 64, outputs of 32.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, TorchAoConfig

from titans_testing import iterate_floats, logits_of, random_ids, relative_error
from transformers_titans import TitansCache, TitansForCausalLM
from variant_oracle import VARIANTS, variant_model


SIZES = {"hidden_size": 64, "memory_head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 1}
NEVER = ("theta_proj", "alpha_proj", "eta_proj", "lm_head")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "o_gate_proj", "u_proj", "gate_proj", "up_proj", "down_proj"]
QUANTIZED = [*VARIANTS, "lmm_grm"]
every_variant = pytest.mark.parametrize("variant", QUANTIZED)

# Each with the name of its list of modules to leave alone, and the relative error of one rounded weight.
QUANTIZERS = {
    "bitsandbytes_4bit": (
        lambda **fields: BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **fields
        ),
        "llm_int8_skip_modules",
        2.0**-4,
    ),
    "bitsandbytes_8bit": (
        lambda **fields: BitsAndBytesConfig(load_in_8bit=True, **fields),
        "llm_int8_skip_modules",
        2.0**-7,
    ),
    "torchao_8bit_weights": (
        lambda **fields: TorchAoConfig(Int8WeightOnlyConfig(), **fields),
        "modules_to_not_convert",
        2.0**-7,
    ),
    "torchao_8bit": (
        lambda **fields: TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), **fields),
        "modules_to_not_convert",
        2.0**-7,
    ),
}


def quantized_model(variant: str, quantizer: str, folder, dtype=torch.float32, skipped=None, **overrides):
    """A saved model loaded in few bits, and the model that was saved."""
    model = variant_model(variant, **SIZES, **overrides)
    model.save_pretrained(folder)
    make, skip_field, _ = QUANTIZERS[quantizer]
    config = make() if skipped is None else make(**{skip_field: skipped})
    return TitansForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config), model


def quantized_modules(model) -> set[str]:
    """The modules whose weight is no longer a parameter of plain floats."""
    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    return {name for name, weight in weights.items() if weight is not None and type(weight) is not nn.Parameter}


def large_linear_layers(model) -> set[str]:
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name for name in linear if name.split(".")[-1] not in NEVER}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@every_variant
def test_large_linear_layers_are_quantized_and_nothing_else(variant, quantizer, tied, tmp_path):
    quantized, model = quantized_model(variant, quantizer, tmp_path, tie_word_embeddings=tied)
    chosen = large_linear_layers(model)
    assert quantized_modules(quantized) == chosen
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in chosen:
            assert torch.equal(quantized.get_parameter(name), parameter), name


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_list_of_other_modules_does_not_expose_the_gates(quantizer, tmp_path):
    skipped = [".*mlp.*", "lm_head"]
    quantized, model = quantized_model("lmm", quantizer, tmp_path, skipped=skipped)
    assert quantized_modules(quantized) == {name for name in large_linear_layers(model) if ".mlp." not in name}


# Both dtypes with every variant and every quantizer, in turn.
IN_TURN = [
    pytest.param(variant, quantizer, (torch.float32, torch.bfloat16)[(i + j) % 2], id=f"{variant}-{quantizer}")
    for i, variant in enumerate(QUANTIZED)
    for j, quantizer in enumerate(QUANTIZERS)
]


@pytest.mark.parametrize(("variant", "quantizer", "dtype"), IN_TURN)
def test_a_quantized_model_reads_and_generates(variant, quantizer, dtype, tmp_path):
    quantized, model = quantized_model(variant, quantizer, tmp_path / "full", dtype)
    # On some CPUs bitsandbytes packs its weights once more, with a loss, when they are first used.
    quantized.save_pretrained(tmp_path / "quantized")
    ids = random_ids(2, 19)
    logits = logits_of(quantized, ids)
    # Weights are rounded about ten times in a layer, activations to 8 bits or 16.
    assert relative_error(logits, logits_of(model, ids)) < 10 * QUANTIZERS[quantizer][2]
    cache = TitansCache(quantized.config)
    parts = [logits_of(quantized, part, cache=cache) for part in ids.split([10, 1, 8], 1)]
    assert relative_error(torch.cat(parts, 1), logits) < 10 * 2.0**-7
    memories = [tensor for layer in cache.layers for tensor in iterate_floats(layer.state.memory.memory)]
    assert memories and all(tensor.dtype == torch.float32 for tensor in memories)
    sampling = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    tokens = quantized.generate(ids, **sampling)
    loaded = TitansForCausalLM.from_pretrained(tmp_path / "quantized")
    assert quantized_modules(loaded) == quantized_modules(quantized)
    assert torch.equal(logits_of(loaded, ids), logits)
    assert torch.equal(loaded.generate(ids, **sampling), tokens)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@every_variant
def test_adapters_train_on_a_quantized_model(variant, quantizer, tmp_path):
    quantized, plain = quantized_model(variant, quantizer, tmp_path, torch.bfloat16)
    config = LoraConfig(r=2, target_modules=PROJECTIONS, init_lora_weights=False, task_type="CAUSAL_LM")
    # This also has activations recomputed in the backward.
    model = get_peft_model(prepare_model_for_kbit_training(quantized), config).train()
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapters) == 2 * len(large_linear_layers(plain))
    optimizer = torch.optim.SGD(list(adapters.values()), lr=0.05)
    ids = random_ids(2, 11)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in adapters.items():
            assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
