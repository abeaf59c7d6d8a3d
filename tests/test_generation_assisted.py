# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Assisted and prompt-lookup decoding: drafts are rolled back exactly, so the text is the greedy one."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from titans_testing import OPTIONS, logits_of, random_ids, tiny_model
from transformers_titans import TitansCache
from variant_oracle import EVERY_VARIANT, variant_model


ENDLESS = {"eos_token_id": None, "do_sample": False}
every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
REPETITIVE = torch.tensor([[5, 9, 14, 7, 33, 21, 8, 11] * 5])


def similar_model(seed: int = 1, **overrides):
    """A model that agrees with `tiny_model` often, but not always."""
    model = tiny_model(**overrides)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.05 * parameter.data.std() * noise if parameter.numel() > 2 else 0
    return model


@pytest.fixture
def cache_lengths(monkeypatch):
    """Columns removed by every crop, to prove that drafts were made and rejected."""
    removed = []
    crop = TitansCache.crop

    def recording_crop(self, tokens_to_remove):
        removed.append(-tokens_to_remove)
        return crop(self, tokens_to_remove)

    monkeypatch.setattr(TitansCache, "crop", recording_crop)
    return removed


@pytest.mark.parametrize(
    ("variant", "option"),
    [
        ("lmm", "default"),
        ("lmm", "depth_1"),
        ("lmm", "depth_3"),
        ("lmm", "no_conv"),
        ("lmm", "persistent_0"),
        ("lmm", "chunk_1"),
        ("lmm", "no_norm"),
        ("mal", "persistent_0"),
        ("mag", "no_conv"),
        ("mac", "no_conv"),
        ("mac", "persistent_0"),
        ("mac", "chunk_gates"),
    ],
)
def test_prompt_lookup_equals_greedy(variant, option, cache_lengths):
    model = variant_model(variant, dtype=torch.float64, num_hidden_layers=1, **OPTIONS[option])
    expected = model.generate(REPETITIVE, max_new_tokens=20, **ENDLESS)
    cache_lengths.clear()
    generated = model.generate(REPETITIVE, max_new_tokens=20, prompt_lookup_num_tokens=3, **ENDLESS)
    assert torch.equal(generated, expected)
    assert max(cache_lengths) > 0


@pytest.mark.parametrize("variant", ["lmm", "mac"])
def test_prompt_lookup_of_a_text_the_model_repeats(variant, cache_lengths):
    # Trained to repeat, so that drafts are accepted as well as rejected.
    model = variant_model(variant, num_hidden_layers=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = model(REPETITIVE, labels=REPETITIVE).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    prompt = REPETITIVE[:, :19]
    expected = model.generate(prompt, max_new_tokens=60, **ENDLESS)
    cache_lengths.clear()
    generated = model.generate(prompt, max_new_tokens=60, prompt_lookup_num_tokens=5, **ENDLESS)
    assert torch.equal(generated, expected)
    assert len(cache_lengths) < 40


@pytest.mark.parametrize("drafted", [1, 5, 20])
@pytest.mark.parametrize("assistant", ["same", "similar", "other_size"])
def test_assistant_equals_greedy(assistant, drafted, cache_lengths):
    model = tiny_model()
    helper = {
        "same": lambda: tiny_model(),
        "similar": similar_model,
        "other_size": lambda: tiny_model(num_hidden_layers=1, memory_depth=1, memory_chunk_size=7, hidden_size=24),
    }[assistant]()
    helper.generation_config.num_assistant_tokens = drafted
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0
    ids = random_ids(1, 9)
    expected = model.generate(ids, max_new_tokens=24, **ENDLESS)
    generated = model.generate(ids, max_new_tokens=24, assistant_model=helper, **ENDLESS)
    assert torch.equal(generated, expected)
    assert (max(cache_lengths) > 0) == (assistant != "same") or drafted == 1


@every_variant
def test_drafts_by_the_first_blocks_equal_greedy(variant, cache_lengths):
    """`assistant_early_exit`: the model drafts with fewer of its own blocks, and a cache of fewer layers."""
    model = variant_model(variant, num_hidden_layers=2, dtype=torch.float64)
    prompt = REPETITIVE[:, :19]
    expected = model.generate(prompt, max_new_tokens=12, **ENDLESS)
    generated = model.generate(prompt, max_new_tokens=12, assistant_early_exit=1, **ENDLESS)
    assert torch.equal(generated, expected) and cache_lengths
    assert model.config.num_hidden_layers == 2


@every_variant
def test_assisted_decoding_after_a_long_prompt(variant, soon_long_calls):
    model = variant_model(variant, dtype=torch.float64, memory_max_lr=0.01, memory_max_forget=0.001)
    ids = torch.cat([random_ids(1, 30), REPETITIVE], 1)
    expected = model.generate(ids, max_new_tokens=12, **ENDLESS)
    assert torch.equal(model.generate(ids, max_new_tokens=12, prompt_lookup_num_tokens=4, **ENDLESS), expected)


def test_titans_model_assists_another_architecture_and_is_assisted_by_one():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    llama = LlamaForCausalLM(config).eval()
    for parameter in llama.parameters():
        parameter.data *= 5
    titans = tiny_model()
    ids = random_ids(1, 9)
    for main, helper in ((titans, llama), (llama, titans)):
        expected = main.generate(ids, max_new_tokens=25, **ENDLESS)
        assert torch.equal(main.generate(ids, max_new_tokens=25, assistant_model=helper, **ENDLESS), expected)


@pytest.mark.parametrize("mode", ["lookup", "assistant"])
def test_assisted_sampling_keeps_to_the_models_own_distribution(mode):
    model = tiny_model()
    arguments = {"lookup": {"prompt_lookup_num_tokens": 2}, "assistant": {"assistant_model": similar_model()}}[mode]
    torch.manual_seed(0)
    text = {"max_new_tokens": 1, "min_new_tokens": 1, "do_sample": True, "top_k": 3, "eos_token_id": None}
    allowed = logits_of(model, REPETITIVE)[0, -1].topk(3).indices.tolist()
    drawn = [model.generate(REPETITIVE, **text, **arguments)[0, -1].item() for _ in range(12)]
    assert set(drawn) <= set(allowed)


@pytest.mark.parametrize(
    "arguments", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_model}], ids=["lookup", "assistant"]
)
@every_variant
def test_assisted_decoding_on_a_filled_cache_is_refused(variant, arguments):
    model = variant_model(variant)
    arguments = {name: value() if callable(value) else value for name, value in arguments.items()}
    cache = TitansCache(model.config)
    logits_of(model, REPETITIVE[:, :20], cache=cache)
    expected = logits_of(model, REPETITIVE)[:, 20:]
    with pytest.raises(ValueError, match="assisted decoding cannot go on from a cache"):
        model.generate(REPETITIVE, cache=cache, max_new_tokens=5, **arguments, **ENDLESS)
    torch.testing.assert_close(logits_of(model, REPETITIVE[:, 20:], cache=cache), expected, rtol=1e-4, atol=1e-5)


@every_variant
def test_assisted_decoding_on_an_empty_cache_of_the_users(variant):
    model = variant_model(variant)
    expected = model.generate(REPETITIVE, max_new_tokens=12, **ENDLESS)
    cache = TitansCache(model.config)
    generated = model.generate(REPETITIVE, cache=cache, max_new_tokens=12, prompt_lookup_num_tokens=3, **ENDLESS)
    assert torch.equal(generated, expected)
    assert cache.get_seq_length() == 51


@every_variant
def test_returned_cache_of_assisted_decoding_continues(variant):
    model = variant_model(variant)
    output = model.generate(
        REPETITIVE, max_new_tokens=12, prompt_lookup_num_tokens=3, return_dict_in_generate=True, **ENDLESS
    )
    joined = torch.cat([output.sequences, random_ids(1, 5)], 1)
    # All of it is text, even if the model should have chosen the padding token.
    arguments = {"attention_mask": torch.ones_like(joined), "max_new_tokens": 9, **ENDLESS}
    expected = model.generate(joined, **arguments)
    assert torch.equal(model.generate(joined, cache=output.cache, **arguments), expected)
