# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Training with the stock Trainer: packed rows, the memory carried on, accumulation, evaluation, resuming."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from transformers_titans import TitansCache, TitansConfig, TitansForCausalLM
from transformers_titans.training.carry import MEMORY_FOLDER, CarryMemory, StreamDataset
from transformers_titans.training.data import DOCUMENT_FEATURES, RowCollator, cut_documents, pack_documents
from transformers_titans.training.evaluation import compare_memory, row_losses, stream_loss, token_metrics
from transformers_titans.training.train import finish
from variant_oracle import EVERY_VARIANT, VARIANTS


every_variant = pytest.mark.parametrize("variant", [*VARIANTS, "lmm_grm"])

VOCAB_SIZE = 40
CONTEXT_LENGTH = 8
PAD_TOKEN_ID = 0


def tiny_model(seed: int = 0, **overrides) -> TitansForCausalLM:
    set_seed(seed)
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "memory_chunk_size": 4,
        "num_persistent_tokens": 2,
        "initializer_range": 0.2,
    }
    return TitansForCausalLM(TitansConfig(**{**fields, **overrides}))


def random_documents(lengths: list[int], seed: int = 0) -> datasets.Dataset:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, VOCAB_SIZE, size=length).tolist() for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "length": lengths}, features=DOCUMENT_FEATURES)


def training_arguments(output_dir, **overrides) -> TrainingArguments:
    fields = {
        "output_dir": str(output_dir),
        "label_names": ["shift_labels"],
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**fields, **overrides})


def carrying_arguments(output_dir, **overrides) -> TrainingArguments:
    return training_arguments(output_dir, train_sampling_strategy="sequential", **overrides)


def make_trainer(model, args, train_dataset=None, eval_dataset=None, callbacks=None, **kwargs) -> Trainer:
    return Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=RowCollator(CONTEXT_LENGTH, PAD_TOKEN_ID),
        callbacks=callbacks,
        **kwargs,
    )


def carrying_trainer(model, args, documents, eval_documents=None, callbacks=(), **kwargs) -> Trainer:
    train = StreamDataset(documents, CONTEXT_LENGTH, args.train_batch_size)
    evaluation = None
    if eval_documents is not None:
        evaluation = StreamDataset(eval_documents, CONTEXT_LENGTH, args.eval_batch_size)
    return make_trainer(model, args, train, evaluation, [CarryMemory(), *callbacks], **kwargs)


def carry_memory_of(trainer: Trainer) -> CarryMemory:
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, CarryMemory))


def logged_losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class KeepGradients(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.kept.append(gradients(model))


@every_variant
def test_a_packed_document_is_predicted_as_if_it_were_alone(variant):
    model = tiny_model(**EVERY_VARIANT[variant]).eval()
    documents = random_documents([3, 6, 1, 4, 2])
    rows = pack_documents(documents, 16)
    assert len(rows) == 1
    with torch.no_grad():
        batch = RowCollator(16, PAD_TOKEN_ID)(list(rows))
        logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        alone = [model(torch.tensor([ids])).logits[0] for ids in documents["input_ids"]]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_row_losses_count_each_target_of_a_packed_row_once():
    model = tiny_model().eval()
    documents = random_documents([3, 21, 1, 9])
    batch = RowCollator(CONTEXT_LENGTH, PAD_TOKEN_ID)(list(pack_documents(documents, CONTEXT_LENGTH)))
    with torch.no_grad():
        output = model(**batch)
    total, count = row_losses(output.logits, batch["shift_labels"]).sum(0)
    assert count == 2 + 20 + 0 + 8
    torch.testing.assert_close(output.loss, total / count)


@every_variant
def test_evaluation_with_the_memory_carried_equals_one_call_over_each_document(variant, tmp_path):
    model = tiny_model(**EVERY_VARIANT[variant])
    documents = random_documents([37, 5, 16, 1, 23, 8])
    trainer = carrying_trainer(
        model,
        carrying_arguments(tmp_path),
        documents,
        documents,
        compute_metrics=token_metrics,
        preprocess_logits_for_metrics=row_losses,
    )
    metrics = trainer.evaluate()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for ids in documents["input_ids"]:
            ids = torch.tensor([ids])
            total += torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert metrics["eval_num_tokens"] == 90 - 6
    assert metrics["eval_nats_per_token"] == pytest.approx(total / 84, rel=1e-5)
    assert metrics["eval_bits_per_token"] == pytest.approx(total / 84 / np.log(2), rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(np.exp(total / 84), rel=1e-5)
    assert trainer.evaluate()["eval_nats_per_token"] == metrics["eval_nats_per_token"]
    assert carry_memory_of(trainer).caches == {}


@every_variant
def test_carried_training_is_truncated_backpropagation_through_time(variant, tmp_path):
    documents = random_documents([30])
    args = carrying_arguments(
        tmp_path,
        per_device_train_batch_size=1,
        max_steps=4,
        optim="sgd",
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    trainer = carrying_trainer(tiny_model(**EVERY_VARIANT[variant]), args, documents)
    trainer.train()

    model = tiny_model(**EVERY_VARIANT[variant]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    ids = torch.tensor(documents["input_ids"])
    cache, losses = TitansCache(model.config), []
    for start in range(0, 30, CONTEXT_LENGTH):
        window, targets = ids[:, start : start + CONTEXT_LENGTH], ids[0, start + 1 : start + 1 + CONTEXT_LENGTH]
        logits = model(window, cache=cache, use_cache=True).logits
        loss = torch.nn.functional.cross_entropy(logits[0, : len(targets)], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cache.detach()
        losses.append(loss.item())
    assert logged_losses(trainer) == pytest.approx(losses, rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trainer.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_carrying_changes_what_the_second_window_is_trained_on(tmp_path):
    documents = random_documents([16, 16])
    carried = carrying_trainer(tiny_model(), carrying_arguments(tmp_path / "a", max_steps=2), documents)
    fresh = make_trainer(
        tiny_model(),
        carrying_arguments(tmp_path / "b", max_steps=2),
        # The same batches in the same order, only without the memory.
        StreamDataset(documents, CONTEXT_LENGTH, 2),
    )
    carried.train()
    fresh.train()
    losses = logged_losses(carried), logged_losses(fresh)
    assert losses[0][0] == losses[1][0]
    assert abs(losses[0][1] - losses[1][1]) > 1e-4


def resume_pair(tmp_path, make, num_steps=6):
    """Trains ``2 * num_steps`` unbroken, and as two halves in two Trainers; returns both."""
    unbroken = make(tmp_path / "unbroken", save_strategy="no")
    unbroken.train()
    first = make(tmp_path / "halves", save_strategy="steps", save_steps=num_steps)
    first.train()
    second = make(tmp_path / "halves", save_strategy="no")
    second.train(resume_from_checkpoint=str(tmp_path / "halves" / f"checkpoint-{num_steps}"))
    return unbroken, second


@pytest.mark.parametrize(
    ("variant", "carry", "accumulation"),
    [
        ("lmm", False, 1),
        ("lmm", False, 2),
        ("lmm", True, 1),
        ("lmm", True, 2),
        ("mal", True, 1),
        ("mag", True, 1),
        ("mac", True, 2),
        ("lmm_grm", True, 1),
        ("mac_ssc", True, 2),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, variant, carry, accumulation):
    # Two epochs, the second of which begins a few steps before or behind the checkpoint.
    documents = random_documents([41, 7, 30, 5, 16, 33, 3])

    def make(output_dir, **overrides):
        overrides = {"max_steps": 12, "gradient_accumulation_steps": accumulation, **overrides}
        if carry:
            args = carrying_arguments(output_dir, **overrides)
            return carrying_trainer(tiny_model(**EVERY_VARIANT[variant]), args, documents, documents)
        return make_trainer(tiny_model(), training_arguments(output_dir, **overrides), pack_documents(documents, 8))

    unbroken, resumed = resume_pair(tmp_path, make)
    assert logged_losses(resumed) == logged_losses(unbroken)
    for name, parameter in unbroken.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name


def train_and_evaluate_four_streams(output_dir: str) -> None:
    """Carried training and evaluation over four streams, however many processes share them."""
    rows = 4 // int(os.environ.get("WORLD_SIZE", 1))
    args = carrying_arguments(
        output_dir,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        optim="sgd",
    )
    trainer = make_trainer(
        tiny_model(),
        args,
        StreamDataset(random_documents([60, 44, 33, 70, 21, 8, 55, 64]), CONTEXT_LENGTH, 4),
        StreamDataset(random_documents([33, 20, 18, 40], seed=2), CONTEXT_LENGTH, 4),
        [CarryMemory()],
        compute_metrics=token_metrics,
        preprocess_logits_for_metrics=row_losses,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-3"))
    results = {"losses": logged_losses(trainer), "nats": metrics["eval_nats_per_token"], "resumed": trainer.evaluate()}
    if trainer.is_world_process_zero():
        (Path(output_dir) / "results.json").write_text(json.dumps(results))
    finish(trainer)


def test_two_processes_train_as_one_does(tmp_path):
    train_and_evaluate_four_streams(str(tmp_path / "one"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, __file__, str(tmp_path / "two")], check=True, cwd=Path(__file__).parent, timeout=300)
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5) and len(one["losses"]) == 6
    assert two["nats"] == pytest.approx(one["nats"], rel=1e-5)
    assert two["resumed"]["eval_nats_per_token"] == pytest.approx(two["nats"], rel=1e-6)
    saved = (tmp_path / "two" / "checkpoint-3" / MEMORY_FOLDER).iterdir()
    assert sorted(folder.name for folder in saved) == ["rank_0", "rank_1"]


@every_variant
def test_carried_training_in_bfloat16_keeps_a_float32_memory(variant, tmp_path):
    args = carrying_arguments(tmp_path, max_steps=3, bf16=True, save_strategy="steps", save_steps=3)
    trainer = carrying_trainer(tiny_model(**EVERY_VARIANT[variant]), args, random_documents([60, 60]))
    trainer.train()
    assert np.isfinite(logged_losses(trainer)).all()
    cache = TitansCache.from_pretrained(tmp_path / "checkpoint-3" / MEMORY_FOLDER / "rank_0")
    assert all(weight.dtype == torch.float32 for weight in cache.layers[0].state.memory.memory.weights)


def test_evaluating_between_steps_does_not_disturb_the_carried_memory(tmp_path):
    documents = random_documents([60, 60])

    def run(**overrides):
        args = carrying_arguments(tmp_path / str(len(overrides)), max_steps=6, **overrides)
        trainer = carrying_trainer(tiny_model(), args, documents, random_documents([50, 20], seed=1))
        trainer.train()
        return logged_losses(trainer)

    assert run(eval_strategy="steps", eval_steps=1) == run()


def test_each_epoch_of_carried_training_starts_with_a_fresh_memory(tmp_path):
    args = carrying_arguments(tmp_path, num_train_epochs=2, learning_rate=0.0, save_strategy="epoch")
    trainer = carrying_trainer(tiny_model(), args, random_documents([40, 24, 9]))
    trainer.train()
    losses = logged_losses(trainer)
    assert len(losses) == 10
    assert losses[5:] == losses[:5]
    cache = TitansCache.from_pretrained(tmp_path / "checkpoint-10" / MEMORY_FOLDER / "rank_0")
    assert cache.get_seq_length() == 5 * CONTEXT_LENGTH


def test_the_memory_is_saved_in_the_checkpoint_and_needed_to_resume(tmp_path):
    documents = random_documents([60, 60])

    def make(output_dir):
        args = carrying_arguments(output_dir, max_steps=4, save_strategy="steps", save_steps=2)
        return carrying_trainer(tiny_model(), args, documents)

    make(tmp_path / "run").train()
    folder = tmp_path / "run" / "checkpoint-2" / MEMORY_FOLDER / "rank_0"
    cache = TitansCache.from_pretrained(folder)
    assert cache.get_seq_length() == 2 * CONTEXT_LENGTH and cache.batch_size == 2

    elsewhere = make(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="no memory at .*elsewhere.*CarryMemory.resume_from"):
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    carry_memory_of(elsewhere).resume_from(tmp_path / "run" / "checkpoint-2")
    elsewhere.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert elsewhere.state.global_step == 4


@pytest.mark.parametrize(
    ("variant", "batch_size", "accumulation"),
    [("lmm", 2, 4), ("lmm", 1, 8), ("lmm", 4, 2), ("mal", 2, 4), ("mag", 2, 4), ("mac", 2, 4)],
)
def test_accumulated_gradients_equal_those_of_one_batch(tmp_path, variant, batch_size, accumulation):
    rows = cut_documents(random_documents([8, 2, 5, 1, 8, 3, 7, 4]), CONTEXT_LENGTH)

    def run(batch_size, accumulation):
        keep = KeepGradients()
        args = training_arguments(
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            train_sampling_strategy="sequential",
        )
        trainer = make_trainer(tiny_model(**EVERY_VARIANT[variant]), args, rows, callbacks=[keep])
        trainer.train()
        return logged_losses(trainer)[0], keep.kept[0]

    loss, reference = run(8, 1)
    accumulated_loss, accumulated = run(batch_size, accumulation)
    assert accumulated_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in reference.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@every_variant
def test_a_step_without_a_single_target_leaves_all_finite(variant, tmp_path):
    rows = cut_documents(random_documents([1, 1, 1, 1, 8, 8]), CONTEXT_LENGTH)
    keep = KeepGradients()
    args = training_arguments(tmp_path, max_steps=3, train_sampling_strategy="sequential")
    trainer = make_trainer(tiny_model(**EVERY_VARIANT[variant]), args, rows, callbacks=[keep])
    trainer.train()
    losses = logged_losses(trainer)
    assert losses[0] == losses[1] == 0.0 and losses[2] > 0
    assert all((gradient == 0).all() for gradient in keep.kept[0].values())
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_micro_batch_without_a_target_adds_nothing(tmp_path):
    def run(lengths, accumulation):
        keep = KeepGradients()
        args = training_arguments(
            tmp_path, max_steps=1, gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential"
        )
        rows = cut_documents(random_documents(lengths), CONTEXT_LENGTH)
        make_trainer(tiny_model(), args, rows, callbacks=[keep]).train()
        return keep.kept[0]

    with_empty, alone = run([8, 6, 1, 1], 2), run([8, 6], 1)
    for name, gradient in alone.items():
        torch.testing.assert_close(with_empty[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("carry", [False, True], ids=["fresh", "carried"])
@every_variant
def test_evaluation_gathers_logits_and_nothing_else(variant, tmp_path, carry):
    model = tiny_model(**EVERY_VARIANT[variant])
    documents = random_documents([20, 13, 7])
    seen = []

    def compute_metrics(prediction):
        seen.append((prediction.predictions, prediction.label_ids))
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    if carry:
        args = carrying_arguments(tmp_path)
        trainer = carrying_trainer(model, args, documents, documents, compute_metrics=compute_metrics)
    else:
        args, rows = training_arguments(tmp_path), pack_documents(documents, CONTEXT_LENGTH)
        trainer = make_trainer(model, args, rows, rows, compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    predictions, label_ids = seen[0]
    assert isinstance(predictions, np.ndarray) and isinstance(label_ids, np.ndarray)
    assert predictions.shape == (len(trainer.eval_dataset), CONTEXT_LENGTH, VOCAB_SIZE)
    assert label_ids.shape == predictions.shape[:2]
    assert (label_ids != -100).sum() == 20 + 13 + 7 - 3
    assert 0 <= metrics["eval_accuracy"] <= 1 and np.isfinite(metrics["eval_loss"])


@every_variant
def test_other_calls_of_the_model_are_left_alone(variant, tmp_path):
    documents = random_documents([40, 40])
    model = tiny_model(**EVERY_VARIANT[variant])
    ids = torch.tensor(documents["input_ids"])[:, :12]
    reference = model.eval()(ids).logits
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    trainer = carrying_trainer(model, carrying_arguments(tmp_path, max_steps=2, learning_rate=0.0), documents)
    trainer.train()
    model.eval()
    assert torch.equal(model(ids).logits, reference)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)
    assert all(not name.startswith("cache") for name in model.state_dict())


def test_a_carried_memory_refuses_what_would_break_it(tmp_path):
    documents = random_documents([40, 40])
    streams = StreamDataset(documents, CONTEXT_LENGTH, 2)
    with pytest.raises(ValueError, match="train_sampling_strategy must be 'sequential'"):
        make_trainer(tiny_model(), training_arguments(tmp_path), streams, callbacks=[CarryMemory()])
    args = carrying_arguments(tmp_path, max_steps=1, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match="num_streams must be rows of a batch x processes = 4 x 1, got 2"):
        make_trainer(tiny_model(), args, streams, callbacks=[CarryMemory()]).train()
    args = carrying_arguments(tmp_path, max_steps=1)
    rows = cut_documents(documents, CONTEXT_LENGTH)
    with pytest.raises(ValueError, match="must be a StreamDataset when the memory is carried, got Dataset"):
        make_trainer(tiny_model(), args, rows, callbacks=[CarryMemory()]).train()
    with pytest.raises(ValueError, match="must be a StreamDataset"):
        make_trainer(tiny_model(), args, streams, rows, callbacks=[CarryMemory()]).evaluate()


@every_variant
def test_recomputing_activations_does_not_write_the_memory_twice(variant, tmp_path):
    documents = random_documents([60, 60])

    def run(**overrides):
        args = carrying_arguments(tmp_path / str(len(overrides)), max_steps=4, **overrides)
        trainer = carrying_trainer(tiny_model(**EVERY_VARIANT[variant]), args, documents)
        trainer.train()
        assert trainer.model.is_activation_checkpointing == bool(overrides)
        return logged_losses(trainer), trainer.model

    plain, recomputed = run(), run(activation_checkpointing=True)
    assert recomputed[0] == plain[0] and len(plain[0]) == 4
    for one, other in zip(plain[1].parameters(), recomputed[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_rows_need_their_shifted_labels(tmp_path):
    args = training_arguments(tmp_path, label_names=None, max_steps=1)
    trainer = make_trainer(tiny_model(), args, StreamDataset(random_documents([20, 20]), CONTEXT_LENGTH, 2))
    with pytest.raises(ValueError, match=r"set label_names=\['shift_labels'\]"):
        trainer.train()


def test_a_stream_read_in_windows_equals_one_call():
    model = tiny_model()
    ids = torch.tensor(random_documents([45])["input_ids"][0])
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model.eval()(ids[None]).logits[0, :-1], ids[1:]).item()
        halves = [
            torch.nn.functional.cross_entropy(model(part[None, :-1]).logits[0], part[1:]).item()
            for part in (ids[:24], ids[23:])
        ]
    model.train()
    cache = TitansCache(model.config)
    comparison = compare_memory(model, ids, CONTEXT_LENGTH, cache)
    assert comparison.carried == pytest.approx(whole, rel=1e-5)
    assert comparison.num_tokens == 44 and cache.get_seq_length() == 44 and model.training
    assert abs(comparison.reset - comparison.carried) > 1e-4
    assert stream_loss(model, ids, 45) == pytest.approx(whole, rel=1e-5)
    assert stream_loss(model, ids, 23) == pytest.approx((23 * halves[0] + 21 * halves[1]) / 44, rel=1e-5)
    with pytest.raises(ValueError, match="must be .T,. with T >= 2"):
        stream_loss(model, ids[:1], 8)
    with pytest.raises(ValueError, match="context_length must be >= 1, got 0"):
        stream_loss(model, ids, 0)


if __name__ == "__main__":
    train_and_evaluate_four_streams(sys.argv[1])
