# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's arguments: YAML, overrides, and errors that say what to write instead."""

from pathlib import Path

import pytest

from transformers_titans.training.arguments import check_carry_arguments, parse_arguments


REQUIRED = ["output_dir=out", "dataset=corpus.txt"]


def write_yaml(tmp_path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "run.yaml")


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write_yaml(
        tmp_path,
        """
        output_dir: out
        dataset: [a.txt, b.txt]
        context_length: 64
        learning_rate: 3e-4
        config_overrides: {hidden_size: 64, num_hidden_layers: 2}
        """,
    )
    argv = [path, "context_length=32", "--max-steps", "7", "--carry_memory", "config_overrides.hidden_size=128"]
    model_args, data_args, training_args = parse_arguments(argv)
    assert data_args.dataset == ["a.txt", "b.txt"]
    assert (data_args.context_length, data_args.carry_memory, data_args.packing) == (32, True, True)
    assert model_args.config_overrides == {"hidden_size": 128, "num_hidden_layers": 2}
    assert (training_args.learning_rate, training_args.max_steps) == (3e-4, 7)
    assert training_args.report_to == ["tensorboard"]


@pytest.mark.parametrize(
    "word, value",
    [("learning_rate=1e-3", 1e-3), ("--learning_rate=1", 1.0), ("learning_rate=2.5E-4", 2.5e-4)],
)
def test_numbers_are_read_as_everybody_means_them(word, value):
    learning_rate = parse_arguments([*REQUIRED, word])[2].learning_rate
    assert learning_rate == value and isinstance(learning_rate, float)


def test_whole_floats_serve_as_integers_and_a_bare_key_means_true():
    _, data_args, training_args = parse_arguments([*REQUIRED, "max_steps=1e2", "--carry_memory", "packing=false"])
    assert training_args.max_steps == 100 and isinstance(training_args.max_steps, int)
    assert data_args.carry_memory is True and data_args.packing is False


@pytest.mark.parametrize(
    "words, message",
    [
        (["learning_rat=1"], "no field 'learning_rat'; did you mean 'learning_rate'"),
        (["max_steps=1.5"], "max_steps must be of type int, got 1.5"),
        (["carry_memory=3"], "carry_memory must be of type bool, got 3"),
        (["context_length=1"], "context_length must be >= 2, got 1"),
        (["context_length=many"], "context_length must be of type int, got 'many'"),
        (["max_document_tokens=0"], "max_document_tokens must be None or >= 2, got 0"),
        (["validation_fraction=1"], "validation_fraction must be >= 0 and < 1, got 1.0"),
        (["sample_by=word"], r"sample_by must be one of \('document', 'paragraph', 'line'\), got 'word'"),
        (["eval_split=test", "validation_fraction=0.1"], "must come from one of"),
        (["model_name_or_path=m", "config_overrides.hidden_size=8"], "give one of the two"),
        (["config_overrides=3"], "config_overrides must be of type"),
        (["packing.deep=3"], "packing must be of type bool"),
        (["packing=true", "packing.deep=3"], "packing is not a mapping"),
        (["loose"], "an override must read key=value"),
        (["run_name=[1"], "run_name: .* is not a YAML value"),
    ],
)
def test_bad_arguments_name_the_field_and_what_is_allowed(words, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments([*REQUIRED, *words])


def test_required_arguments_and_the_file_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="output_dir must name"):
        parse_arguments(["dataset=a.txt"])
    with pytest.raises(ValueError, match="dataset must name"):
        parse_arguments(["output_dir=out"])
    with pytest.raises(ValueError, match="no file 'absent.yaml'"):
        parse_arguments(["absent.yaml"])
    with pytest.raises(ValueError, match="must hold a mapping"):
        parse_arguments([write_yaml(tmp_path, "- 1")])
    with pytest.raises(ValueError, match="is not valid YAML"):
        parse_arguments([write_yaml(tmp_path, "a: [1")])


@pytest.mark.parametrize(
    "word, message",
    [
        ("auto_find_batch_size=true", "auto_find_batch_size must be False"),
        ("torch_compile=true", "torch_compile must be False"),
        ("dataloader_in_order=false", "dataloader_in_order must be True"),
        ("train_sampling_strategy=group_by_length", "train_sampling_strategy must be 'sequential'"),
        ("accelerator_config={split_batches: true}", "split_batches must be False"),
    ],
)
def test_what_would_break_a_carried_memory_is_refused(word, message):
    words = [*REQUIRED, word] if "strategy" in word else [*REQUIRED, word, "train_sampling_strategy=sequential"]
    training_args = parse_arguments(words)[2]
    with pytest.raises(ValueError, match=message):
        check_carry_arguments(training_args)


def test_every_recipe_parses():
    import transformers_titans.training

    recipes = sorted((Path(transformers_titans.training.__file__).parent / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        parse_arguments([str(recipe)])
