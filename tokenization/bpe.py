# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE: training it, reading the texts for it, and saving a tokenizer."""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from transformers_titans.tokenization.build import SPECIAL_TOKENS, wrap_tokenizer


logger = logging.getLogger(__name__)

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
DATASET_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Characters of a text file that are handed over at once; more than a line, so that merges over line ends are learned.
BLOCK_SIZE = 1 << 20
ROWS_PER_BATCH = 1000


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int = 32000, *, length: int | None = None, show_progress: bool = True
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer.

    The alphabet is all 256 bytes, so any text can be encoded, whatever it was trained on, and decoding gives it back.
    Pairs are merged inside words only, a word being what the pattern of GPT-2 takes for one. The same texts in the
    same order give the same tokenizer.

    Args:
        texts: strings in any pieces.
        vocab_size: number of tokens, special ones included, >= 259. Texts with too few different pairs give a smaller
            vocabulary, with a warning.
        length: number of texts, for the progress bar, if known.
        show_progress: whether to show progress bars.

    Returns:
        A tokenizer with ids 0 pad, 1 bos, 2 eos.

    Raises:
        ValueError: if `vocab_size` is too small, or if `texts` holds no text or anything but strings.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be an integer >= {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"got {vocab_size!r}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(_checked(texts), trainer, length=length)
    if tokenizer.get_vocab_size() < vocab_size:
        logger.warning(
            f"the texts give only {tokenizer.get_vocab_size()} tokens of the vocab_size={vocab_size} asked for"
        )
    return wrap_tokenizer(tokenizer)


def texts_from_files(paths: Iterable[str | os.PathLike], text_column: str = "text") -> Iterator[str]:
    """Reads the texts of local files: .json, .jsonl and .parquet by their column, anything else as UTF-8 text.

    Raises:
        ValueError: naming the file, if one is missing, is not UTF-8, or has no such column of strings.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"files must be existing files, got {str(path)!r}")
    return _read_files(paths, text_column)


def texts_from_dataset(
    dataset: datasets.Dataset | datasets.IterableDataset, text_column: str = "text"
) -> Iterator[str]:
    """Reads the texts of a dataset's column.

    Raises:
        ValueError: if the dataset has no such column, or if it does not hold strings.
    """
    features = dataset.features
    if features is not None:
        if text_column not in features:
            raise ValueError(f"text_column must be one of {sorted(features)}, got {text_column!r}")
        if getattr(features[text_column], "dtype", None) not in ("string", "large_string"):
            raise ValueError(
                f"text_column must name a column of strings, but {text_column!r} holds {features[text_column]}"
            )
    # A streamed dataset may not know its columns before it is read.
    return (text for batch in dataset.iter(ROWS_PER_BATCH) for text in _column(batch, text_column))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, output_dir: str | os.PathLike) -> None:
    """Saves a tokenizer so that a failure leaves what was there before: all is written beside, and then put in place.

    Args:
        tokenizer: any transformers tokenizer.
        output_dir: folder, made if absent; its other files, say a model's, stay.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=output_dir) as written:
        tokenizer.save_pretrained(written)
        for path in sorted(Path(written).iterdir()):
            os.replace(path, output_dir / path.name)


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """Passes strings through. Raises ValueError for anything else, and at the end if there was no text."""
    if isinstance(texts, str):
        raise ValueError(f"texts must be an iterable of strings, got one string, {texts[:20]!r}")
    any_text = False
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts must hold strings, but item {i} is of type {type(text).__name__}: {text!r:.50}")
        any_text = any_text or bool(text)
        yield text
    if not any_text:
        raise ValueError("texts must hold at least one string that is not empty, got none")


def _read_files(paths: list[Path], text_column: str) -> Iterator[str]:
    for path in paths:
        if path.suffix in DATASET_BUILDERS:
            loaded = datasets.load_dataset(DATASET_BUILDERS[path.suffix], data_files=str(path), split="train")
            try:
                yield from texts_from_dataset(loaded, text_column)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        else:
            yield from _read_text(path)


def _read_text(path: Path) -> Iterator[str]:
    """The file in blocks of whole lines, its line ends as they are."""
    with open(path, encoding="utf-8", newline="") as file:
        try:
            while lines := file.readlines(BLOCK_SIZE):
                yield "".join(lines)
        except UnicodeDecodeError as error:
            raise ValueError(f"files must be UTF-8 text, but {str(path)!r} is not: {error}") from error


def _column(batch: dict[str, list], text_column: str) -> list[str]:
    if text_column not in batch:
        raise ValueError(f"text_column must be one of {sorted(batch)}, got {text_column!r}")
    return batch[text_column]
