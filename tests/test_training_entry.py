# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The training command from a YAML file to a checkpoint that loads, and the model card it writes."""

import json
import math

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from transformers_titans.tokenization import byte_tokenizer
from transformers_titans.training import demo, train
from transformers_titans.training.arguments import ModelArguments
from transformers_titans.training.evaluation import StreamLoss


RUN = """
dataset: {folder}/*.txt
sample_by: paragraph
validation_fraction: 0.2
context_length: 16
output_dir: {folder}/run
max_steps: 4
per_device_train_batch_size: 2
per_device_eval_batch_size: 2
save_steps: 2
logging_steps: 1
eval_strategy: steps
eval_steps: 2
disable_tqdm: true
use_cpu: true
dataloader_pin_memory: false
config_overrides:
  hidden_size: 16
  intermediate_size: 32
  num_hidden_layers: 1
  num_attention_heads: 2
  memory_chunk_size: 8
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    paragraphs = [f"Paragraph {number} tells of {'this and that, ' * number}the end." for number in range(1, 11)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path), encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["packing=false"],
        ["carry_memory=true"],
        ["config_overrides.variant=mag", "config_overrides.sliding_window=5"],
        ["config_overrides.variant=mac", "config_overrides.segment_length=16", "carry_memory=true"],
    ],
    ids=["packed", "cut", "carried", "mag_packed", "mac_carried"],
)
def test_a_run_trains_evaluates_saves_and_goes_on(run_file, words):
    train.main([str(run_file), *words])
    output_dir = run_file.parent / "run"
    metrics = json.loads((output_dir / "all_results.json").read_text())
    assert 0 < metrics["eval_nats_per_token"] < 10 and 0 < metrics["train_loss"] < 10
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_nats_per_token"]))
    assert list(output_dir.glob("**/events.out.tfevents.*"))
    assert (output_dir / "checkpoint-2" / "memory_cache").is_dir() == ("carry_memory=true" in words)

    model = AutoModelForCausalLM.from_pretrained(output_dir)
    variants = [word.split("=")[1] for word in words if word.startswith("config_overrides.variant")]
    assert [model.config.variant] == (variants or ["lmm"])
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    prompt = tokenizer("Paragraph", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, min_new_tokens=3).shape[1] == len("Paragraph") + 3

    train.main([str(run_file), *words, "max_steps=6"])
    state = json.loads((output_dir / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_command_equals_an_unbroken_one(run_file):
    words = ["carry_memory=true", "lr_scheduler_type=constant"]
    folder = run_file.parent
    train.main([str(run_file), *words, "max_steps=6", f"output_dir={folder}/unbroken"])
    train.main([str(run_file), *words])
    train.main([str(run_file), *words, "max_steps=6"])
    unbroken = AutoModelForCausalLM.from_pretrained(folder / "unbroken").state_dict()
    resumed = AutoModelForCausalLM.from_pretrained(folder / "run").state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())


def test_a_checkpoint_is_trained_further_and_one_can_be_named(run_file):
    folder = run_file.parent
    train.main([str(run_file)])
    lines = [line for line in run_file.read_text().splitlines() if not line.startswith((" ", "config_overrides"))]
    (folder / "further.yaml").write_text("\n".join(lines), encoding="utf-8")
    further = [str(folder / "further.yaml"), f"model_name_or_path={folder}/run", f"output_dir={folder}/further"]
    train.main([*further, "max_steps=2"])
    assert (folder / "further" / "checkpoint-2").is_dir()
    resumed = [str(run_file), f"resume_from_checkpoint={folder}/run/checkpoint-2", f"output_dir={folder}/other"]
    train.main(resumed)
    history = json.loads((folder / "other" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="resume_from_checkpoint must be a checkpoint's folder"):
        train.main([str(run_file), f"resume_from_checkpoint={folder}/absent"])


def test_the_model_card_says_what_was_trained_and_measured(run_file):
    train.main([str(run_file), "max_steps=1", "carry_memory=true"])
    metrics = json.loads((run_file.parent / "run" / "eval_results.json").read_text())
    card = ModelCard.load(run_file.parent / "run" / "README.md")
    assert card.data.library_name == "transformers"
    assert "{{" not in card.content and "{%" not in card.content
    assert f"| eval_nats_per_token | {metrics['eval_nats_per_token']:.4g} |" in card.content
    assert "*.txt" in card.content and str(run_file.parent) not in card.content


def test_errors_of_the_command_line_are_one_line(capsys):
    with pytest.raises(SystemExit, match="titans-train: the arguments: there is no field 'learning_rat'"):
        train.main(["output_dir=out", "dataset=a.txt", "learning_rat=1"])
    with pytest.raises(SystemExit, match="label_smoothing_factor must be 0, got 0.1"):
        train.main(["output_dir=out", "dataset=a.txt", "label_smoothing_factor=0.1"])
    train.main(["--help"])
    out = capsys.readouterr().out
    assert "--carry_memory" in out and "--learning_rate" in out


def test_models_and_tokenizers_that_do_not_fit_are_refused(tmp_path):
    args = ModelArguments(config_overrides={"hiden_size": 16})
    tokenizer = train.load_tokenizer(args)
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        train.load_model(args, tokenizer)
    with pytest.raises(ValueError, match="vocab_size must be at least the tokenizer's"):
        train.load_model(ModelArguments(config_overrides={"vocab_size": 10, "hidden_size": 24}), tokenizer)
    training_args = TrainingArguments(output_dir=str(tmp_path), label_names=["labels"])
    with pytest.raises(ValueError, match="label_names must be None or"):
        train.prepare_training_arguments(training_args, carry_memory=False)


def test_the_dna_tokenizer_can_be_named():
    assert train.load_tokenizer(ModelArguments(tokenizer_name_or_path="dna")).vocab_size < 64


def test_the_novel_is_cut_into_its_chapters():
    chapters = demo.read_chapters()
    assert len(chapters) > 20
    assert all(chapter.lower().startswith("chapter ") for chapter in chapters)
    assert min(len(chapter) for chapter in chapters) > 1000


@pytest.mark.parametrize("carried, code", [(1.5, 0), (1.75, 1)], ids=["helps", "does-not-help"])
def test_the_demonstration_fails_if_the_memory_does_not_help(tmp_path, monkeypatch, capsys, carried, code):
    def compare_memory(model, input_ids, context_length, cache):
        model(input_ids[None, :-1], cache=cache)
        return StreamLoss(carried, 1.75, len(input_ids) - 1)

    monkeypatch.setattr(demo, "read_chapters", lambda: [f"Chapter {number}: {'so on, ' * 9}" for number in range(9)])
    monkeypatch.setattr(demo, "compare_memory", compare_memory)
    monkeypatch.setattr(demo, "NUM_NEW_TOKENS", 5)
    assert demo.main(["--output_dir", str(tmp_path), "--max_steps", "1"]) == code
    captured = capsys.readouterr()
    assert f"{carried:.4f} nats per byte" in captured.out and "bytes on disk, loaded back" in captured.out
    assert ("FAILED" in captured.err) == (code == 1)


def test_a_checkpoint_of_another_architecture_is_not_gone_on_from(run_file):
    train.main([str(run_file)])
    with pytest.raises(
        ValueError, match="of a model with variant='lmm', and this run's has 'mag'; another output_dir"
    ):
        train.main([str(run_file), "max_steps=6", "config_overrides.variant=mag"])
    train.main([str(run_file), "max_steps=6", "config_overrides.use_cache=false"])


def test_a_bad_override_is_named():
    with pytest.raises(ValueError, match="(?s)config_overrides: .*variant must be one of"):
        train.load_model(ModelArguments(config_overrides={"variant": "mak"}), byte_tokenizer())
