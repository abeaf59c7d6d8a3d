# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The models under training: losses, gradients of every parameter, checkpointing, dtypes, and learning itself."""

import copy

import pytest
import torch

from titans_testing import (
    OPTIONS,
    assert_close,
    fill_with_noise,
    iterate_floats,
    logits_of,
    parameter_gradients,
    random_ids,
    relative_error,
    tiny_config,
    tiny_model,
)
from transformers_titans import TitansCache, TitansConfig, TitansForCausalLM
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


F64 = torch.float64

every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
# In 16 bits a rounded score selects another memory now and then: no error that is small where rounding is.
every_smooth_variant = pytest.mark.parametrize("variant", sorted(EVERY_VARIANT.keys() - {"mac_ssc"}))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in the logits' own dtype; transformers' loss function computes in float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def assert_same_gradients(actual: dict, expected: dict, ratio: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(name, actual[name], gradient, ratio)


@pytest.mark.parametrize("length", [2, 3, 9], ids=["two_tokens", "below_a_chunk", "several_chunks"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_parameter_has_a_gradient(option, length):
    model = tiny_model(**OPTIONS[option]).train()
    ids = random_ids(2, length)
    gradients = parameter_gradients(model, model(ids, labels=ids).loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        # Only what acts from one token on the next needs a second one: past surprise and what carries it.
        assert gradient.any() or "eta_proj" in name, name


@pytest.mark.parametrize("sizes", [(5, 3), (8, 2), (7, 16)], ids=str)
@pytest.mark.parametrize("persistent", [0, 2], ids=["persistent_0", "persistent_2"])
@every_variant
def test_every_parameter_has_a_gradient_behind_a_detached_cache(variant, persistent, sizes):
    # Wherever the cache stands in chunk, window and segment, and however little follows.
    model = variant_model(variant, num_persistent_tokens=persistent).train()
    ids = random_ids(2, sum(sizes))
    first, second = ids.split(sizes, 1)
    cache = TitansCache(model.config)
    model(first, cache=cache)
    gradients = parameter_gradients(model, model(second, labels=second, cache=cache.detach()).loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


DEFAULTS = {name: {"variant": name} for name in VARIANTS} | {"lmm_grm": {"memory_caching": "grm"}}


@pytest.mark.parametrize("length", [1, 63, 531])
@pytest.mark.parametrize("fields", DEFAULTS.values(), ids=DEFAULTS)
def test_default_settings_train(fields, length):
    # Chunk, window and segment at their default sizes, of which no length is a multiple.
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = TitansForCausalLM(TitansConfig(num_attention_heads=2, **sizes, **fields)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, losses = random_ids(1, length), []
    for _ in range(2):
        output = model(ids, labels=ids)
        assert output.cache is None
        optimizer.zero_grad()
        output.loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[1] < losses[0] or length == 1


@pytest.mark.parametrize("option", ["default", "depth_3", "no_conv", "no_norm", "persistent_0", "forget_to_start"])
def test_gradients_equal_finite_differences(option):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "memory_head_dim": 3, "intermediate_size": 6}
    model = tiny_model(dtype=F64, **sizes, **OPTIONS[option])
    ids = random_ids(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    gradients = parameter_gradients(model, next_token_loss(model(ids, attention_mask=mask).logits, ids))
    step = 1e-6
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        losses = []
        for sign in (1, -1):
            parameter.data += sign * step * direction
            losses.append(next_token_loss(logits_of(model, ids, attention_mask=mask), ids))
            parameter.data -= sign * step * direction
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close((gradients[name] * direction).sum(), slope, rtol=1e-5, atol=1e-8, msg=name)


def test_loss_is_cross_entropy_of_the_next_token():
    model = tiny_model()
    ids = random_ids(2, 9)
    labels = ids.clone()
    labels[0, :4] = labels[1, 6] = -100
    output = model(ids, labels=labels)
    logprobs = output.logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    picked = logprobs.gather(2, targets.clamp(min=0)[..., None])[..., 0][targets != -100]
    assert picked.numel() == 12
    torch.testing.assert_close(output.loss, -picked.mean())
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=30).loss, -picked.sum() / 30)
    counted = model(ids, labels=labels, num_items_in_batch=torch.tensor(30)).loss
    torch.testing.assert_close(counted, -picked.sum() / 30)
    shifted = torch.nn.functional.pad(targets, (0, 1), value=-100)
    torch.testing.assert_close(model(ids, labels=labels, shift_labels=shifted).loss, output.loss)


@every_variant
def test_accumulated_micro_batches_equal_one_batch(variant):
    model = variant_model(variant, dtype=F64).train()
    ids = random_ids(8, 9)
    labels = ids.clone()
    for row in range(8):
        labels[row, : row + 1] = -100
    expected = parameter_gradients(model, model(ids, labels=labels).loss)
    count = (labels[:, 1:] != -100).sum()
    parts = zip(ids.split(2), labels.split(2), strict=True)
    loss = sum(model(part, labels=target, num_items_in_batch=count).loss for part, target in parts)
    assert_same_gradients(parameter_gradients(model, loss), expected, 1e-11)


@pytest.mark.parametrize("counted", [None, 0, 5], ids=["alone", "counted_zero", "beside_a_live_one"])
@every_variant
def test_batch_without_a_target_has_zero_loss_and_zero_gradients(variant, counted):
    model = variant_model(variant).train()
    ids = random_ids(2, 9)
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=counted).loss
    assert loss.item() == 0
    gradients = parameter_gradients(model, loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())


@every_variant
def test_padded_labels_and_padded_rows_do_not_touch_gradients(variant):
    model = variant_model(variant, dtype=F64).train()
    ids = random_ids(2, 7)
    expected = parameter_gradients(model, model(ids, labels=ids).loss)
    padded = torch.zeros(3, 11, dtype=torch.long)
    padded[0, 4:], padded[1, :7] = ids[0], ids[1]
    mask = padded.ne(0).long()
    labels = padded.masked_fill(mask == 0, -100)
    # Nobody predicts a row's first token, padding neither.
    labels[0, 4] = -100
    actual = parameter_gradients(model, model(padded, attention_mask=mask, labels=labels).loss)
    assert_same_gradients(actual, expected, 1e-11)


@pytest.mark.parametrize(
    ("variant", "use_cache"),
    [("lmm", None), ("lmm", True), ("lmm", False), ("mal", True), ("mag", True), ("mac", True), ("mac", False)],
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("with_cache", [False, True], ids=["fresh", "cache"])
def test_gradient_checkpointing_gives_the_same_gradients(variant, with_cache, reentrant, use_cache):
    ids = random_ids(2, 17)
    results = []
    for checkpointing in (False, True):
        model = variant_model(variant, dtype=F64).train()
        cache = None
        if with_cache:
            cache = TitansCache(model.config)
            model(ids[:, :6], cache=cache)
            cache.detach()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        output = model(ids[:, 6:], labels=ids[:, 6:], cache=cache, use_cache=use_cache)
        gradients = parameter_gradients(model, output.loss)
        if with_cache:
            assert output.cache is cache
        else:
            assert (output.cache is not None) == bool(use_cache)
        length = None if output.cache is None else output.cache.get_seq_length()
        assert length in (None, 17 if with_cache else 11)
        model.eval()
        after = None if length is None else logits_of(model, random_ids(2, 5, seed=2), cache=output.cache.detach())
        results.append((output.loss, gradients, after))
    plain, checkpointed = results
    assert_close("loss", checkpointed[0], plain[0], 1e-12)
    assert_same_gradients(checkpointed[1], plain[1], 1e-11)
    if plain[2] is not None:
        assert_close("after", checkpointed[2], plain[2], 1e-12)


@every_variant
def test_gradient_checkpointing_passes_gradients_into_an_earlier_window(variant):
    ids = random_ids(2, 18)
    gradients = []
    for checkpointing in (False, True):
        model = variant_model(variant, dtype=F64).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        cache = TitansCache(model.config)
        loss = sum(model(part, labels=part, cache=cache).loss for part in ids.split(9, 1))
        gradients.append(parameter_gradients(model, loss))
    assert_same_gradients(gradients[1], gradients[0], 1e-11)


@every_variant
def test_reentrant_checkpointing_detaches_the_cache(variant):
    # torch's reentrant checkpoint keeps gradients of tensors alone, and a layer's state is a tuple of them.
    ids = random_ids(2, 18)
    gradients = []
    for checkpointing in (False, True):
        model = variant_model(variant, dtype=F64).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        cache = TitansCache(model.config)
        loss = 0
        for part in ids.split(9, 1):
            loss = loss + model(part, labels=part, cache=cache).loss
            if checkpointing:
                assert not any(t.requires_grad for t in iterate_floats(cache))
            else:
                cache.detach()
        gradients.append(parameter_gradients(model, loss))
    assert_same_gradients(gradients[1], gradients[0], 1e-11)


def test_gradients_through_a_carried_cache_equal_one_call():
    model = tiny_model(dtype=F64).train()
    ids = random_ids(2, 18)
    expected = parameter_gradients(model, next_token_loss(model(ids).logits, ids))
    cache = TitansCache(model.config)
    logits = torch.cat([model(part, cache=cache).logits for part in ids.split([5, 1, 12], 1)], 1)
    assert_same_gradients(parameter_gradients(model, next_token_loss(logits, ids)), expected, 1e-10)


@every_variant
def test_detached_cache_stops_gradients_and_allows_a_second_step(variant):
    model = variant_model(variant).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cache = TitansCache(model.config)
    for part in random_ids(2, 15).split(3, 1):
        loss = model(part, labels=part, cache=cache).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert cache.detach() is cache
        assert not any(t.requires_grad for t in iterate_floats(cache))


@pytest.mark.parametrize(
    ("variant", "option"),
    [
        ("lmm", "default"),
        ("lmm", "depth_1"),
        ("lmm", "depth_3"),
        ("lmm", "no_conv"),
        ("lmm", "no_norm"),
        ("lmm", "forget_to_start"),
        ("mal", "default"),
        ("mag", "default"),
        ("mac", "default"),
        ("mac", "chunk_gates"),
    ],
)
def test_backward_under_anomaly_detection(variant, option):
    model = variant_model(variant, **OPTIONS[option]).train()
    ids = random_ids(2, 11)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with torch.autograd.detect_anomaly(check_nan=True):
        cache = TitansCache(model.config)
        for _ in range(2):
            model(ids, labels=ids, attention_mask=mask, position_ids=positions, cache=cache).loss.backward()
            cache.detach()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def pair_of_dtypes(variant: str, dtype: torch.dtype):
    """A model in ``dtype`` and a float64 one of the same parameters."""
    model, exact = variant_model(variant, dtype=dtype), variant_model(variant, dtype=F64)
    for parameter, stored in zip(exact.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(stored.data)
    return model, exact


def assert_only_rounded(gradients: dict, exact_model, ids: torch.Tensor, unit: float) -> None:
    """Gradients in 16 bits may differ as far as rounding each module's result once moves those of the exact model.

    How far that is depends on the variant (`mac` chains most modules) and on what cancels in a gradient; it is
    measured here with noise of up to half a unit, scaled down to where its effect is linear. Where no attention
    amplifies it, it is below 50 units.
    """
    small, draws = 1e-4, 4
    most = 50 * unit if exact_model.config.variant == "lmm" else float("inf")

    def round_result(module, arguments, result):
        return result * (1 + small * unit * (torch.rand_like(result) - 0.5)) if torch.is_tensor(result) else result

    expected = parameter_gradients(exact_model, exact_model(ids, labels=ids).loss)
    leaves = [module for module in exact_model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(round_result) for module in leaves]
    noisy = [parameter_gradients(exact_model, exact_model(ids, labels=ids).loss) for _ in range(draws)]
    for handle in handles:
        handle.remove()
    ratios = []
    for name, gradient in expected.items():
        spread = (sum((relative_error(g[name], gradient) / small) ** 2 for g in noisy) / draws) ** 0.5
        ratios.append(relative_error(gradients[name], gradient) / spread)
        assert ratios[-1] < 5, name
        assert relative_error(gradients[name], gradient) < most, name
    assert sorted(ratios)[len(ratios) // 2] < 1.5


def assert_float32_memory(cache: TitansCache, window_dtype: torch.dtype) -> None:
    """What the memory has learned is float32; attention's keys and values are as the model computes them."""
    for layer in cache.layers:
        memory, attention, segment = layer.state
        assert {t.dtype for t in iterate_floats((memory.memory, memory.kept))} == {torch.float32}
        assert {t.dtype for t in iterate_floats(attention)} <= {window_dtype}
        assert segment is None or {t.dtype for t in iterate_floats((segment.segment_weights, segment.kept))} == {
            torch.float32
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_smooth_variant
def test_16_bit_model_trains_with_a_float32_state(variant, dtype):
    model, reference = pair_of_dtypes(variant, dtype)
    ids = random_ids(2, 21)
    output = model(ids, labels=ids, use_cache=True)
    assert output.logits.dtype == dtype
    assert_float32_memory(output.cache, dtype)
    exact = reference(ids, labels=ids)
    # Activations are rounded about ten times in each of two layers.
    unit = torch.finfo(dtype).eps
    assert relative_error(output.logits, exact.logits) < 10 * unit
    gradients = parameter_gradients(model, output.loss)
    assert {gradient.dtype for gradient in gradients.values()} == {dtype}
    assert_only_rounded(gradients, reference, ids, unit)


@pytest.mark.parametrize(
    ("model_dtype", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=["bf16", "fp16", "bf16_and_its_weights"],
)
@every_smooth_variant
def test_autocast_trains_with_a_float32_state(variant, model_dtype, dtype):
    model, reference = pair_of_dtypes(variant, model_dtype)
    model.train()
    ids = random_ids(2, 21)
    cache = TitansCache(model.config)
    with torch.autocast("cpu", dtype=dtype):
        output = model(ids, labels=ids, cache=cache)
    assert_float32_memory(cache, dtype)
    gradients = parameter_gradients(model, output.loss)
    assert {gradient.dtype for gradient in gradients.values()} == {model_dtype}
    assert_only_rounded(gradients, reference, ids, max(torch.finfo(dtype).eps, torch.finfo(model_dtype).eps))
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        after = model(ids, cache=cache).logits
    assert torch.isfinite(after).all()
    assert torch.isfinite(logits_of(model, ids, cache=cache)).all()


@every_variant
def test_large_activations_stay_finite_in_float16(variant):
    model = variant_model(variant, dtype=torch.float16)
    ids = random_ids(2, 21)
    ids[0] = 7
    with torch.no_grad():
        embeds = 1e3 * model.get_input_embeddings()(ids)
        embeds[1, 5:9] = 0
        output = model(inputs_embeds=embeds)
    assert torch.isfinite(output.logits).all()
    assert all(torch.isfinite(t).all() for t in iterate_floats(output.cache))


@every_variant
def test_double_model_computes_in_double(variant):
    model = variant_model(variant, dtype=F64)
    ids = random_ids(1, 21)
    output = model(ids, use_cache=True)
    assert output.logits.dtype == F64
    assert all(t.dtype == F64 for t in iterate_floats(output.cache))
    converted = variant_model(variant).double()
    fill_with_noise(converted)
    # Without a graph both: short calls then take other products, whose last digit may differ.
    assert torch.equal(logits_of(converted, ids), logits_of(model, ids))


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_model_learns_a_batch_and_generates_it(variant):
    torch.manual_seed(0)
    model = TitansForCausalLM(tiny_config(**VARIANTS[variant])).train()
    ids = random_ids(3, 14)
    # Different first tokens, so that each row can be told from its beginning.
    ids[:, 0] = torch.tensor([3, 4, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05
    model.eval()
    generated = model.generate(ids[:, :1], max_new_tokens=13, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, ids)


@every_variant
def test_training_leaves_no_trace_in_a_copy(variant):
    model = variant_model(variant).train()
    before = copy.deepcopy(model.state_dict())
    ids = random_ids(2, 9)
    model(ids, labels=ids, use_cache=True).loss.backward()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
