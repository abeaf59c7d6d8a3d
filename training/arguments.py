# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run is told: dataclasses, a YAML file, and overrides on the command line."""

import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments


BUILT_IN_TOKENIZERS = ("bytes", "dna")
SAMPLE_BY = ("document", "paragraph", "line")


@dataclasses.dataclass
class ModelArguments:
    """Which model is trained, and with which tokenizer."""

    model_name_or_path: str | None = dataclasses.field(
        default=None, metadata={"help": "Checkpoint to train further. None: a new model, from config_overrides."}
    )
    config_overrides: dict | None = dataclasses.field(
        default=None,
        metadata={"help": "Fields of TitansConfig for a new model. On the command line: config_overrides.NAME=VALUE."},
    )
    tokenizer_name_or_path: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "A tokenizer's Hub name or folder, 'bytes' or 'dna'. "
            "None: the tokenizer of model_name_or_path, or 'bytes' for a new model."
        },
    )

    def __post_init__(self):
        if self.config_overrides is None:
            self.config_overrides = {}
        if self.model_name_or_path is not None and self.config_overrides:
            raise ValueError(
                f"config_overrides describes a new model, but model_name_or_path={self.model_name_or_path!r} "
                "brings its own configuration; give one of the two"
            )


@dataclasses.dataclass
class DataArguments:
    """What is read, and how it is laid into sequences."""

    dataset: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"help": "One dataset on the Hub, or local .txt, .json, .jsonl or .parquet files (globs allowed)."},
    )
    dataset_config: str | None = dataclasses.field(
        default=None, metadata={"help": "Configuration of a Hub dataset that has several."}
    )
    train_split: str = dataclasses.field(default="train", metadata={"help": "Split of a Hub dataset to train on."})
    eval_split: str | None = dataclasses.field(
        default=None, metadata={"help": "Split of a Hub dataset to evaluate on."}
    )
    eval_dataset: list[str] = dataclasses.field(default_factory=list, metadata={"help": "Local files to evaluate on."})
    validation_fraction: float = dataclasses.field(
        default=0.0,
        metadata={"help": "Share of the training documents, drawn by seed, to evaluate on; >= 0 and < 1."},
    )
    text_column: str = dataclasses.field(default="text", metadata={"help": "Column that holds the text."})
    sample_by: str = dataclasses.field(
        default="document",
        metadata={"help": "What one document of a .txt file is: the file ('document'), a 'paragraph' or a 'line'."},
    )
    max_document_tokens: int | None = dataclasses.field(
        default=None,
        metadata={"help": "Longer documents are cut into documents of at most this many tokens. None: never."},
    )
    context_length: int = dataclasses.field(default=1024, metadata={"help": "Tokens in one sequence, >= 2."})
    packing: bool = dataclasses.field(
        default=True, metadata={"help": "Whether several documents may share a sequence (each keeps to itself)."}
    )
    carry_memory: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Train consecutive windows of one document with the memory carried on, detached between windows. "
            "Otherwise every sequence starts with a fresh memory."
        },
    )

    def __post_init__(self):
        for name in ("dataset", "eval_dataset"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        if not self.dataset:
            raise ValueError("dataset must name a dataset on the Hub or at least one local file, got nothing")
        if self.sample_by not in SAMPLE_BY:
            raise ValueError(f"sample_by must be one of {SAMPLE_BY}, got {self.sample_by!r}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be >= 0 and < 1, got {self.validation_fraction}")
        if self.context_length < 2:
            raise ValueError(f"context_length must be >= 2, got {self.context_length}")
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise ValueError(f"max_document_tokens must be None or >= 2, got {self.max_document_tokens}")
        self._check_evaluation()

    def _check_evaluation(self):
        sources = {
            "eval_dataset": bool(self.eval_dataset),
            "eval_split": self.eval_split is not None,
            "validation_fraction": self.validation_fraction > 0,
        }
        given = [name for name, is_given in sources.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"the evaluation data must come from one of {tuple(sources)}, got {given}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; this loader reads it as the number that everybody means."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)

ARGUMENT_CLASSES = (ModelArguments, DataArguments, TrainingArguments)


def parse_arguments(argv: list[str]) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """Reads the arguments of a run.

    Args:
        argv: optionally a YAML file first, then overrides, each as ``key=value``, ``--key=value`` or ``--key value``
            (a bare ``--key`` means true). A dot reaches into a mapping: ``config_overrides.hidden_size=128``. Values
            are read as YAML.

    Returns:
        The model, data and training arguments; overrides win over the file, the file over the defaults. Unlike bare
        `TrainingArguments`, a run logs to TensorBoard unless ``report_to`` says otherwise.

    Raises:
        ValueError: naming the field, the value and what is allowed; for an unknown field, its nearest name.
    """
    values: dict[str, Any] = {"report_to": "tensorboard"}
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        values.update(_read_yaml(argv[0]))
        argv = argv[1:]
    for key, value in _read_overrides(argv):
        _assign(values, key, value)
    hints = {name: hint for cls in ARGUMENT_CLASSES for name, hint in typing.get_type_hints(cls).items()}
    fields = [field.name for cls in ARGUMENT_CLASSES for field in dataclasses.fields(cls) if field.init]
    check_names("the arguments", values, fields)
    coerced = {key: _coerce(key, value, hints[key]) for key, value in values.items()}
    if not coerced.get("output_dir"):
        raise ValueError("output_dir must name the folder for checkpoints and logs, got nothing")
    return HfArgumentParser(ARGUMENT_CLASSES).parse_dict(coerced)


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises a ValueError for the first of ``names`` that is not among ``allowed``, naming the nearest that is."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{what}: there is no field {name!r}{hint}")


def check_carry_arguments(args: TrainingArguments) -> None:
    """Raises a ValueError if the training arguments do not allow the memory to be carried from batch to batch."""
    needs = {
        "torch_compile": (bool(args.torch_compile), False, "the memory is handed on outside the compiled graph"),
        "auto_find_batch_size": (bool(args.auto_find_batch_size), False, "the rows of a batch are fixed streams"),
        "accelerator_config.split_batches": (args.accelerator_config.split_batches, False, "rows would be reordered"),
        "dataloader_in_order": (args.dataloader_in_order, True, "windows must arrive in the order of the text"),
        "train_sampling_strategy": (args.train_sampling_strategy, "sequential", "windows must arrive in order"),
    }
    for name, (value, allowed, reason) in needs.items():
        if value != allowed:
            raise ValueError(f"{name} must be {allowed!r} when the memory is carried ({reason}), got {value!r}")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process must drive one device when the memory is carried, got {args.n_gpu} devices in one process; "
            "start the run with torchrun or accelerate launch"
        )


def _read_yaml(path: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"the first argument must be a YAML file or key=value, but there is no file {path!r}")
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of argument names to values, got {type(values).__name__}")
    return values


def _read_overrides(argv: list[str]) -> list[tuple[str, Any]]:
    overrides, position = [], 0
    while position < len(argv):
        word = argv[position]
        position += 1
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and not word.startswith("--"):
            raise ValueError(f"an override must read key=value, --key=value or --key value, got {word!r}")
        if not equals:
            follows = position < len(argv) and not re.match(r"--|[\w.-]+=", argv[position])
            value = argv[position] if follows else "true"
            position += follows
        try:
            overrides.append((key.replace("-", "_"), yaml.load(value, _Loader)))
        except yaml.YAMLError as error:
            raise ValueError(f"{key}: {value!r} is not a YAML value: {error}") from error
    return overrides


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    for name in path:
        if values.get(name) is None:
            values[name] = {}
        values = values[name]
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {name} is not a mapping, so it has no field {leaf!r}")
    values[leaf] = value


def _coerce(key: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` allows: whole numbers serve as floats, 1e3 as an integer, one word as a list."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(option) or option for option in options)
    if typing.Literal in kinds or any(issubclass(kind, enum.Enum) for kind in kinds):
        return value
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if float in kinds and is_number:
        return float(value)
    if int in kinds and is_number and float(value).is_integer():
        return int(value)
    if str in kinds and is_number:
        return str(value)
    if list in kinds and isinstance(value, str):
        return [value]
    raise ValueError(f"{key} must be of type {_spell(hint)}, got {value!r}")


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
