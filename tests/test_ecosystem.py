# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What transformers and accelerate build upon a model: pipelines, weights on other devices, the Trainer."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map, init_empty_weights
from torch import nn
from transformers import Trainer, TrainingArguments, pipeline

from titans_testing import TOLERANCE, assert_close, iterate_floats, logits_of, random_ids
from transformers_titans import TitansCache, TitansForCausalLM
from transformers_titans.tokenization import byte_tokenizer
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


F32 = torch.float32
SAMPLING = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
PLACES = {"embed_tokens": "cpu", "layers.0": "disk", "layers.1": "cpu", "norm": "disk"}
every_variant = pytest.mark.parametrize("variant", [*VARIANTS, "mac_ssc"])


@every_variant
def test_a_pipeline_answers_each_prompt_of_a_batch_as_if_it_were_alone(variant):
    tokenizer = byte_tokenizer()
    model = variant_model(variant, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["All happy families", "It was the best of times, it was the worst"]
    fields = {**SAMPLING, "return_tensors": True}
    answers = [answer[0]["generated_token_ids"] for answer in generator(prompts, batch_size=2, **fields)]
    alone = [generator(prompt, **fields)[0]["generated_token_ids"] for prompt in prompts]
    for prompt, answer, expected in zip(prompts, answers, alone, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert len(expected) == len(ids) + SAMPLING["max_new_tokens"]
        assert answer[-len(expected) :] == expected
    assert generator(prompts[0], **SAMPLING)[0]["generated_text"].startswith(prompts[0])


@every_variant
def test_an_automatic_device_map_keeps_blocks_whole(variant):
    with init_empty_weights():
        model = variant_model(variant, num_hidden_layers=4)
    whole = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    sizes = {0: 2 * whole + whole // 2, "cpu": 100 * whole}
    devices = infer_auto_device_map(model, sizes, no_split_module_classes=model._no_split_modules)
    assert set(devices.values()) == {0, "cpu"}
    split = [name for name in devices if name.startswith("model.layers.") and name.count(".") > 2]
    assert split == []


def offloaded(kind: str, model, folder):
    """The model with weights that are brought in for each module's forward, or fetched from disk."""
    if kind == "cpu_offload":
        return cpu_offload(model, execution_device="cpu")
    model.save_pretrained(folder / "model")
    if kind == "auto":
        return TitansForCausalLM.from_pretrained(folder / "model", device_map="auto")
    places = {f"model.{name}": place for name, place in PLACES.items()} | {"lm_head": "cpu"}
    if kind == "disk_map":
        places_and_folder = {"device_map": places, "offload_folder": folder / "weights"}
        return TitansForCausalLM.from_pretrained(folder / "model", **places_and_folder)
    return dispatch_model(
        model,
        places,
        main_device="cpu",
        offload_dir=folder / "weights",
        skip_keys=model._skip_keys_device_placement,
        force_hooks=True,
    )


@pytest.mark.parametrize("kind", ["auto", "cpu_offload", "disk_map", "dispatch"])
@every_variant
def test_offloaded_weights_give_the_same_numbers(variant, kind, tmp_path):
    fields = {"num_persistent_tokens": 0} if kind == "disk_map" else {}
    ids = random_ids(2, 21)
    plain = variant_model(variant, **fields)
    logits, tokens = logits_of(plain, ids), plain.generate(ids, **SAMPLING)
    model = offloaded(kind, variant_model(variant, **fields), tmp_path)
    assert any(p.device.type == "meta" for p in model.parameters()) == (kind != "auto")
    assert_close("one call", logits_of(model, ids), logits, TOLERANCE[F32])
    assert torch.equal(model.generate(ids, **SAMPLING), tokens)
    cache = TitansCache(model.config)
    parts = []
    for part in ids.split([3, 1, 17], 1):
        with torch.no_grad():
            output = model(part, cache=cache)
        assert output.cache is cache
        parts.append(output.logits)
    assert all(tensor.device.type == "cpu" for tensor in iterate_floats(cache))
    assert_close("three calls", torch.cat(parts, 1), logits, TOLERANCE[F32])


@every_variant
def test_a_cache_owns_its_memory(variant):
    # A state that is still the start weights, or a view of them, would change with the optimizer's next step.
    model = variant_model(variant, num_persistent_tokens=0)
    cache = TitansCache(model.config)
    logits_of(model, random_ids(2, 3), cache=cache)
    before = [tensor.clone() for tensor in iterate_floats(cache)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert before
    assert all(torch.equal(one, other) for one, other in zip(iterate_floats(cache), before, strict=True))


class Rows(torch.utils.data.Dataset):
    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@every_variant
def test_training_in_bfloat16_with_activations_recomputed_can_be_resumed(variant, tmp_path):
    def run(folder: str, resume: bool = False, **fields) -> nn.Module:
        args = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            bf16=True,
            activation_checkpointing=True,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **fields,
        )
        model = variant_model(variant).train()
        trainer = Trainer(model=model, args=args, train_dataset=Rows(random_ids(12, 19)))
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == fields["max_steps"]
        return trainer.model

    unbroken = run("unbroken", max_steps=4, save_strategy="no")
    run("halves", max_steps=2, save_strategy="steps", save_steps=2)
    resumed = run("halves", resume=True, max_steps=4, save_strategy="no")
    start = dict(variant_model(variant).named_parameters())
    for name, parameter in unbroken.named_parameters():
        assert parameter.dtype == F32 and parameter.isfinite().all()
        assert not torch.equal(parameter, start[name]), name
        assert torch.equal(resumed.get_parameter(name), parameter), name
    saved = TitansForCausalLM.from_pretrained(tmp_path / "halves" / "checkpoint-2")
    fields = EVERY_VARIANT[variant]
    assert {name: getattr(saved.config, name) for name in fields} == fields
