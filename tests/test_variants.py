# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""MAL, MAG and MAC beside LMM: equal to the oracle in logits and gradients, and what sets each of them apart."""

import pytest
import torch

from titans_testing import (
    MATRIX_MEMORY,
    TOLERANCE,
    assert_close,
    logits_of,
    parameter_gradients,
    random_ids,
    relative_error,
    tiny_config,
)
from transformers_titans import TitansForCausalLM
from variant_oracle import VARIANTS, oracle_logits, variant_model


F64 = torch.float64
SEGMENT = 8

# Parts of the memory, which every variant has; the first five are the ablations of the paper's Table 5.
MEMORIES = {
    "linear": {"memory_depth": 1},
    "no_conv": {"memory_conv_kernel_size": 0},
    "no_momentum": {"memory_momentum": False},
    "no_forgetting": {"memory_forgetting": False},
    "persistent_0": {"num_persistent_tokens": 0},
    "persistent_chunk_and_1": {"num_persistent_tokens": 5},
    "depth_3": {"memory_depth": 3},
    "forget_to_start": {"memory_forget_to": "start"},
    "gates_by_chunk": {"memory_gate_granularity": "chunk"},
    "other_heads": {"memory_num_heads": 3, "memory_head_dim": 7},
    "linear_no_norm_no_residual": MATRIX_MEMORY,
    "dla": {"memory_rule": "dla"},
    "linear_attention": {"memory_rule": "linear_attention"} | MATRIX_MEMORY,
    "swla": {"memory_rule": "swla"} | MATRIX_MEMORY,
    "swla_of_one_token": {"memory_rule": "swla", "memory_momentum": False} | MATRIX_MEMORY,
    "three_layers_tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
}
ATTENTIONS = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one_kv_head_of_other_size": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6},
    "wide_heads": {"head_dim": 20},
    "bias": {"attention_bias": True},
    "fast_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    "grouped_persistent_0": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_persistent_tokens": 0},
}
WINDOWS = {f"window_{size}": {"sliding_window": size} for size in (1, 2, 4, 8, 50)}
SEGMENTS = {f"segment_{size}": {"segment_length": size} for size in (4, 12, 40)}
SEGMENTS |= {"segment_is_chunk_of_1": {"segment_length": 1, "memory_chunk_size": 1}}
GATINGS = {"sigmoid": {"memory_gating": "sigmoid"}}
OWN = {"lmm": {}, "mal": ATTENTIONS | WINDOWS, "mag": ATTENTIONS | WINDOWS | GATINGS}
OWN |= {"mac": ATTENTIONS | SEGMENTS | GATINGS}
CASES = [
    pytest.param(variant, options, id=f"{variant}-{name}")
    for variant in VARIANTS
    for name, options in (MEMORIES | OWN[variant]).items()
]


def weighted(logits: torch.Tensor) -> torch.Tensor:
    """A loss to which every logit matters, differently."""
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(7), dtype=F64)).sum()


def assert_equals_oracle(model, ids: torch.Tensor, documents=None, **kwargs) -> None:
    """Logits and every parameter's gradient of rows (B, T), each of which has these documents."""
    logits = model(ids, **kwargs).logits
    expected = torch.stack([oracle_logits(model, row, documents) for row in ids])
    assert_close("logits", logits, expected, TOLERANCE[F64])
    parameters = dict(model.named_parameters())
    reference = torch.autograd.grad(
        weighted(expected), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    gradients = parameter_gradients(model, weighted(logits))
    assert gradients.keys() == parameters.keys()
    for name, gradient in zip(parameters, reference, strict=True):
        assert_close(name, gradients[name], gradient, TOLERANCE[F64])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 23])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_oracle_at_each_length(variant, length):
    assert_equals_oracle(variant_model(variant, dtype=F64).train(), random_ids(2, length))


@pytest.mark.parametrize(("variant", "options"), CASES)
def test_equals_the_oracle_for_each_option(variant, options):
    fields = {"num_hidden_layers": 1} | options
    assert_equals_oracle(variant_model(variant, dtype=F64, **fields).train(), random_ids(1, 19))


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_equal_the_oracle(variant):
    documents = [5, 1, 13, 3]
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    model = variant_model(variant, dtype=F64).train()
    assert_equals_oracle(model, random_ids(2, 22), documents, position_ids=positions)


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_rows_equal_the_oracle_on_their_real_tokens(variant):
    model = variant_model(variant, dtype=F64)
    ids, mask = random_ids(3, 21), torch.ones(3, 21, dtype=torch.long)
    mask[0, :6] = mask[1, 15:] = mask[2, [2, 3, 9, 17]] = 0
    logits = logits_of(model, ids, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        with torch.no_grad():
            expected = oracle_logits(model, ids[row, real])
        assert_close(f"row {row}", logits[row, real], expected, TOLERANCE[F64])


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_the_oracle(variant):
    model, exact = variant_model(variant), variant_model(variant, dtype=F64)
    ids = random_ids(1, 23)
    with torch.no_grad():
        expected = oracle_logits(exact, ids[0])[None]
    assert_close("logits", logits_of(model, ids), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_16_bit_models_and_autocast_are_as_exact_as_their_type(variant, dtype):
    model, exact = variant_model(variant, dtype=dtype), variant_model(variant, dtype=F64)
    wide = variant_model(variant)
    for parameters in zip(exact.parameters(), wide.parameters(), model.parameters(), strict=True):
        for copied in parameters[:2]:
            copied.data.copy_(parameters[2].data)
    ids = random_ids(2, 23)
    expected = logits_of(exact, ids)
    with torch.autocast("cpu", dtype=dtype):
        autocast = logits_of(wide, ids)
    # Activations are rounded about ten times in each of two layers.
    assert relative_error(logits_of(model, ids), expected) < 10 * torch.finfo(dtype).eps
    assert relative_error(autocast, expected) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("length", [2, 3, 9, 20], ids=lambda n: f"{n}_tokens")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient(variant, length):
    model = variant_model(variant).train()
    ids = random_ids(2, length)
    gradients = parameter_gradients(model, model(ids, labels=ids).loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        # Past surprise needs a token before the one that is predicted from.
        assert gradient.any() or ("eta_proj" in name and length == 2), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_learns_a_repeated_sequence(variant):
    torch.manual_seed(0)
    model = TitansForCausalLM(tiny_config(num_hidden_layers=1, **VARIANTS[variant])).train()
    ids = random_ids(1, 11).repeat(1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_persistent_tokens_of_each_layer_reach_every_output(variant):
    ids = random_ids(1, 23)
    before = logits_of(variant_model(variant, dtype=F64), ids)
    for layer in range(2):
        model = variant_model(variant, dtype=F64)
        model.model.layers[layer].persistent_tokens.weight.data.neg_()
        assert (logits_of(model, ids) - before).abs().amax(-1).min() > 1e-3


def moved_by_token_0(model, length: int) -> torch.Tensor:
    """(T,) how far each token's logits move when token 0 is another one."""
    ids = random_ids(1, length)
    changed = ids.clone()
    changed[0, 0] = 3 + (ids[0, 0] - 2) % 61
    return (logits_of(model, changed) - logits_of(model, ids)).abs().amax(-1)[0]


# A memory that writes nothing: its weights stay where they are to the last bit. (Forgetting would be a message, too.)
SILENT = {"memory_max_lr": 1e-30, "memory_forgetting": False}


@pytest.mark.parametrize("variant", ["mal", "mag"])
def test_beyond_the_window_only_the_memory_remembers(variant):
    window, kernel, layers = 5, 4, 2
    per_layer = (window - 1) + (kernel - 1) if variant == "mal" else max(window, kernel) - 1
    reach = layers * per_layer
    silent = moved_by_token_0(variant_model(variant, dtype=F64, **SILENT), reach + 20)
    assert silent[: reach + 1].min() > 1e-6
    assert not silent[reach + 1 :].any()
    assert moved_by_token_0(variant_model(variant, dtype=F64), reach + 20).min() > 1e-6


@pytest.mark.parametrize("variant", ["mal", "mag"])
def test_within_the_window_attention_sees_what_the_memory_does_not(variant):
    model = variant_model(variant, dtype=F64, memory_conv_kernel_size=0, num_hidden_layers=1, **SILENT)
    moved = moved_by_token_0(model, 20)
    assert moved[:5].min() > 1e-6 and not moved[5:].any()


def test_mac_remembers_past_a_segment_through_its_memory_alone():
    length = 3 * SEGMENT + 3
    silent = variant_model("mac", dtype=F64, memory_conv_kernel_size=0, **SILENT)
    moved = moved_by_token_0(silent, length)
    assert moved[:SEGMENT].min() > 1e-6
    assert not moved[SEGMENT:].any()
    assert moved_by_token_0(variant_model("mac", dtype=F64, memory_conv_kernel_size=0), length).min() > 1e-6


def test_mac_attention_reads_the_memory_of_earlier_segments():
    # Without the memory's own output (a constant gate), what is left of segment 1 in segment 3 came in by attention.
    model = variant_model("mac", dtype=F64, memory_conv_kernel_size=0, memory_gating="sigmoid")
    for layer in model.model.layers:
        layer.combination.memory_norm.weight.data.zero_()
    moved = moved_by_token_0(model, 3 * SEGMENT)
    assert moved[2 * SEGMENT :].min() > 1e-6


def test_mac_of_one_segment_reads_the_start_weights_only():
    # Before the first segment's end nothing has been written that the reading could show.
    model = variant_model("mac", dtype=F64, num_hidden_layers=1, memory_gating="sigmoid")
    model.model.layers[0].combination.memory_norm.weight.data.zero_()
    ids = random_ids(1, 2 * SEGMENT)
    before = logits_of(model, ids)
    model.config.memory_max_lr = 1e-30
    after = logits_of(model, ids)
    assert torch.equal(after[:, :SEGMENT], before[:, :SEGMENT])
    assert (after - before)[:, SEGMENT:].abs().amax(-1).min() > 1e-6


def test_gatings_differ_and_silu_is_the_default():
    ids = random_ids(1, 9)
    for variant in ("mag", "mac"):
        default, silu, sigmoid = (
            logits_of(variant_model(variant, **options), ids)
            for options in ({}, {"memory_gating": "silu"}, {"memory_gating": "sigmoid"})
        )
        assert torch.equal(default, silu)
        assert (default - sigmoid).abs().max() > 1e-3
