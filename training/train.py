# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a causal language model: ``python -m transformers_titans.training.train config.yaml [key=value ...]``."""

import gc
import logging
import sys
from pathlib import Path

import datasets
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from transformers_titans import TitansConfig, TitansForCausalLM
from transformers_titans.tokenization import byte_tokenizer, dna_tokenizer
from transformers_titans.training.arguments import (
    ARGUMENT_CLASSES,
    DataArguments,
    ModelArguments,
    check_carry_arguments,
    check_names,
    parse_arguments,
)
from transformers_titans.training.card import write_model_card
from transformers_titans.training.carry import CarryMemory, StreamDataset
from transformers_titans.training.data import (
    RowCollator,
    cut_documents,
    load_texts,
    pack_documents,
    split_documents,
    tokenize_documents,
)
from transformers_titans.training.evaluation import row_losses, token_metrics


logger = logging.getLogger(__name__)

# What a run may have otherwise than the checkpoint from which it goes on.
FREE_FIELDS = {
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "memory_backend",
    "pad_token_id",
    "use_cache",
}

USAGE = "titans-train [config.yaml] [key=value ...]"


def main(argv: list[str] | None = None) -> None:
    """The command: reads the arguments (``argv``, or the command line's; see `parse_arguments`) and trains."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word in ("-h", "--help") for word in argv):
        HfArgumentParser(ARGUMENT_CLASSES, prog="titans-train", usage=USAGE).print_help()
        return
    try:
        model_args, data_args, training_args = parse_arguments(argv)
        prepare_training_arguments(training_args, data_args.carry_memory)
    except ValueError as error:
        raise SystemExit(f"titans-train: {error}") from error
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("transformers_titans").setLevel(logging.INFO if training_args.should_log else logging.ERROR)
    train(model_args, data_args, training_args)


def train(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> dict[str, float]:
    """Trains a model, going on from the last checkpoint if there is one, and saves it with its model card.

    Args:
        model_args: which model.
        data_args: on what.
        training_args: how; prepared by `prepare_training_arguments`.

    Returns:
        The metrics of training and, if there are evaluation data, of the final evaluation.
    """
    set_seed(training_args.seed)
    checkpoint = find_checkpoint(training_args)
    tokenizer = load_tokenizer(model_args)
    model = load_model(model_args, tokenizer)
    if checkpoint is not None:
        check_checkpoint(checkpoint, model.config)
    with training_args.main_process_first(desc="preparing the data"):
        train_documents, eval_documents = load_documents(data_args, tokenizer, training_args.seed)
        trainer = build_trainer(model, tokenizer, train_documents, eval_documents, data_args, training_args)
    metrics = run(trainer, checkpoint)
    if trainer.is_world_process_zero():
        write_model_card(training_args.output_dir, model, data_args, metrics)
    finish(trainer)
    return metrics


def prepare_training_arguments(args: TrainingArguments, carry_memory: bool) -> None:
    """Sets, in place, what the rows of this package need, and refuses what would not work with them.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if args.label_names not in (None, ["shift_labels"]):
        raise ValueError(f"label_names must be None or ['shift_labels'], got {args.label_names}")
    args.label_names = ["shift_labels"]
    if args.label_smoothing_factor:
        # The Trainer shifts labels only for architectures that transformers itself lists.
        raise ValueError(f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}")
    if carry_memory:
        if args.train_sampling_strategy == "random":
            args.train_sampling_strategy = "sequential"
        check_carry_arguments(args)


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer that the arguments name."""
    name = args.tokenizer_name_or_path or args.model_name_or_path or "bytes"
    built_in = {"bytes": byte_tokenizer, "dna": dna_tokenizer}
    return built_in[name]() if name in built_in else AutoTokenizer.from_pretrained(name)


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The checkpoint that the arguments name, or a new model whose vocabulary is the tokenizer's.

    Raises:
        ValueError: if ``config_overrides`` names no field of TitansConfig, or gives one a value that is not allowed,
            or if the vocabulary is smaller than the tokenizer's.
    """
    if args.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    else:
        check_names("config_overrides", args.config_overrides, TitansConfig.__dataclass_fields__)
        fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        try:
            config = TitansConfig(**{"vocab_size": len(tokenizer), **fields, **args.config_overrides})
        except StrictDataclassError as error:
            raise ValueError(f"config_overrides: {error}") from error
        model = TitansForCausalLM(config)
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"vocab_size must be at least the tokenizer's {len(tokenizer)} tokens, got {model.config.vocab_size}"
        )
    return model


def load_documents(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The documents to train on, and those to evaluate on or None."""
    train, evaluation = (
        None if texts is None else tokenize_documents(texts, tokenizer, args.text_column, args.max_document_tokens)
        for texts in load_texts(args)
    )
    if args.validation_fraction:
        train, evaluation = split_documents(train, args.validation_fraction, seed)
    return train, evaluation


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_documents: datasets.Dataset,
    eval_documents: datasets.Dataset | None,
    data_args: DataArguments,
    training_args: TrainingArguments,
) -> Trainer:
    """A stock Trainer over the documents' rows.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; pads rows and is saved with the model.
        train_documents: from `load_documents`.
        eval_documents: from `load_documents`, or None.
        data_args: how documents are laid into rows.
        training_args: prepared by `prepare_training_arguments`.
    """

    def rows(documents: datasets.Dataset, batch_size: int):
        if data_args.carry_memory:
            return StreamDataset(documents, data_args.context_length, batch_size * training_args.world_size)
        if data_args.packing:
            return pack_documents(documents, data_args.context_length)
        return cut_documents(documents, data_args.context_length)

    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Trainer(
        model=model,
        args=training_args,
        data_collator=RowCollator(data_args.context_length, pad_token_id),
        train_dataset=rows(train_documents, training_args.train_batch_size),
        eval_dataset=None if eval_documents is None else rows(eval_documents, training_args.eval_batch_size),
        processing_class=tokenizer,
        callbacks=[CarryMemory()] if data_args.carry_memory else None,
        compute_metrics=token_metrics,
        preprocess_logits_for_metrics=row_losses,
    )


def find_checkpoint(args: TrainingArguments) -> str | None:
    """The checkpoint to go on from: the one asked for, or else the last one in ``output_dir``, if there is any.

    Raises:
        ValueError: if the checkpoint asked for is not there.
    """
    if args.resume_from_checkpoint is not None:
        if not Path(args.resume_from_checkpoint).is_dir():
            raise ValueError(
                f"resume_from_checkpoint must be a checkpoint's folder, got {args.resume_from_checkpoint!r}"
            )
        return args.resume_from_checkpoint
    checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if checkpoint is not None:
        logger.info(f"going on from {checkpoint}; another output_dir starts anew")
    return checkpoint


def check_checkpoint(checkpoint: str, config: TitansConfig) -> None:
    """Raises a ValueError if the checkpoint is of a model that was built in another way."""
    saved = TitansConfig.from_pretrained(checkpoint)
    for name in sorted(set(TitansConfig.__annotations__) - FREE_FIELDS):
        if getattr(saved, name) != getattr(config, name):
            raise ValueError(
                f"{checkpoint} is of a model with {name}={getattr(saved, name)!r}, and this run's has "
                f"{getattr(config, name)!r}; another output_dir starts anew"
            )


def run(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    """Trains, saves model, tokenizer and state to ``output_dir``, and evaluates. Returns all metrics."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, CarryMemory) and checkpoint is not None:
            callback.resume_from(checkpoint)
    metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    if trainer.eval_dataset is not None:
        eval_metrics = trainer.evaluate()
        trainer.log_metrics("eval", eval_metrics)
        trainer.save_metrics("eval", eval_metrics)
        metrics.update(eval_metrics)
    return metrics


def finish(trainer: Trainer) -> None:
    """Ends the trainer's trackers and its process group; it cannot be used afterwards."""
    # The distributed wrapper must go first: a gloo group that dies with it can wait for its own thread for ever.
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    gc.collect()
    trainer.end()


if __name__ == "__main__":
    main()
