# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""From text to rows of tokens: documents are read, tokenized, and cut or packed into rows of one context length.

A row is a dict of three lists of one length, at most the context length:

- ``input_ids``;
- ``position_ids``, which start again at 0 where a document begins: by this the model knows where to start afresh;
- ``shift_labels``, the token that follows each token in its own document, -100 behind a document's last token.

Targets stand in ``shift_labels``, already shifted, because the target of a row's last token is the first token of the
next row: no label of its own row could say it. So every token but the first of each document is a target exactly once.
"""

import glob
import logging
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from transformers_titans.training.arguments import DataArguments


logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
DOCUMENT_FEATURES = datasets.Features(
    {"input_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int64")}
)
ROW_FEATURES = datasets.Features(
    {
        name: datasets.List(datasets.Value(kind))
        for name, kind in (("input_ids", "int32"), ("position_ids", "int64"), ("shift_labels", "int32"))
    }
)
# The last row that a call of the packing function fills is cut short; with this many rows to a call it hardly counts.
ROWS_PER_CALL = 256


def load_texts(args: DataArguments) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Reads the training texts and, if `eval_dataset` or `eval_split` names any, the evaluation texts.

    Returns:
        Two datasets of the one string column ``args.text_column``, the second None if no evaluation data are named.

    Raises:
        ValueError: if a file is missing, or of a kind that is not supported, or lacks the text column, or if the
            column does not hold strings.
    """
    train = _load(args.dataset, args, args.train_split)
    evaluation = None
    if args.eval_dataset:
        evaluation = _load(args.eval_dataset, args, "train")
    elif args.eval_split is not None:
        evaluation = _load(args.dataset, args, args.eval_split)
    return train, evaluation


def tokenize_documents(
    texts: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    text_column: str = "text",
    max_document_tokens: int | None = None,
) -> datasets.Dataset:
    """Turns texts into documents of tokens, in the order of the texts.

    Args:
        texts: dataset with a column of strings; empty ones and nulls are left out.
        tokenizer: called without its special tokens; its end-of-sequence token closes every document.
        text_column: name of the column.
        max_document_tokens: longer documents are cut into documents of this many tokens and one of the rest.

    Returns:
        Dataset of ``input_ids`` (int32 list) and ``length`` (int64).

    Raises:
        ValueError: if the tokenizer has no end-of-sequence token, or no text is left.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer must have an eos_token: it marks the end of a document")
    documents = texts.map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "column": text_column, "limit": max_document_tokens},
        batched=True,
        remove_columns=texts.column_names,
        features=DOCUMENT_FEATURES,
        desc="Tokenizing",
    )
    if len(documents) == 0:
        raise ValueError(f"column {text_column!r} holds no text: all of its {len(texts)} rows are empty")
    return documents


def split_documents(
    documents: datasets.Dataset, fraction: float, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Draws ``fraction`` (> 0 and < 1) of the documents, at least one, for evaluation; both parts keep their order.

    Raises:
        ValueError: if there are fewer than two documents.
    """
    count = len(documents)
    if count < 2:
        raise ValueError(
            f"validation_fraction={fraction} needs at least 2 documents, got {count}; "
            "set max_document_tokens to cut long ones, or name eval_dataset"
        )
    num_drawn = min(max(round(count * fraction), 1), count - 1)
    is_drawn = np.zeros(count, dtype=bool)
    is_drawn[np.random.default_rng(seed).permutation(count)[:num_drawn]] = True
    return documents.select(np.flatnonzero(~is_drawn)), documents.select(np.flatnonzero(is_drawn))


def pack_documents(documents: datasets.Dataset, context_length: int) -> datasets.Dataset:
    """Lays documents end to end into rows of ``context_length`` tokens, in order.

    A document that reaches the end of a row goes on in the next row, as a sequence of its own (its positions start
    again at 0, because the model will start that row with a fresh memory). Rows are full but for the last of each
    group of about `ROWS_PER_CALL`.
    """
    lengths = documents.select_columns("length").with_format("numpy")[:]["length"]
    return documents.map(
        _pack,
        fn_kwargs={"context_length": context_length},
        batched=True,
        batch_size=max(1, round(ROWS_PER_CALL * context_length / lengths.mean())),
        remove_columns=documents.column_names,
        features=ROW_FEATURES,
        desc="Packing",
    )


def cut_documents(
    documents: datasets.Dataset, context_length: int, continue_positions: bool = False
) -> datasets.Dataset:
    """Cuts every document into windows of ``context_length`` tokens and a shorter last one, one window to a row.

    Args:
        documents: from `tokenize_documents`.
        context_length: tokens in a window.
        continue_positions: whether a window's positions go on from the window before (for a memory that is carried
            on) or start at 0.
    """
    return documents.map(
        _cut,
        fn_kwargs={"context_length": context_length, "continue_positions": continue_positions},
        batched=True,
        batch_size=16,
        remove_columns=documents.column_names,
        features=ROW_FEATURES,
        desc="Cutting windows",
    )


class RowCollator:
    """Makes a batch of rows: pads on the right to ``context_length`` and adds the attention mask and the labels.

    Args:
        context_length: length T to which all rows are padded, so that all batches have one shape.
        pad_token_id: the id to pad with; any id will do, padding is masked.

    Called with a list of B rows, it returns int64 tensors of shape (B, T): ``input_ids``, ``position_ids``,
    ``attention_mask`` (1 for tokens, 0 for padding), ``labels`` (the row's own tokens, -100 for padding and the first
    token of a document) and ``shift_labels``, which the stock causal loss uses in place of shifting ``labels``.

    Raises:
        ValueError: if the rows lack a column, as they do when the Trainer drops ``shift_labels``, which no model names
            in its signature, or if a row is longer than ``context_length``.
    """

    def __init__(self, context_length: int, pad_token_id: int):
        self.context_length = context_length
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        missing = [name for name in ROW_FEATURES if name not in rows[0]]
        if missing:
            raise ValueError(
                f"rows must have the columns {list(ROW_FEATURES)}, but {missing} are missing. "
                "With a Trainer, set label_names=['shift_labels'] in its TrainingArguments."
            )
        batch = {
            "input_ids": self._pad([row["input_ids"] for row in rows], self.pad_token_id),
            "position_ids": self._pad([row["position_ids"] for row in rows], 0),
            "attention_mask": self._pad([[1] * len(row["input_ids"]) for row in rows], 0),
            "shift_labels": self._pad([row["shift_labels"] for row in rows], IGNORE_INDEX),
        }
        is_target = (batch["position_ids"] > 0) & (batch["attention_mask"] == 1)
        batch["labels"] = batch["input_ids"].masked_fill(~is_target, IGNORE_INDEX)
        return batch

    def _pad(self, values: list[list[int]], filler: int) -> torch.Tensor:
        padded = torch.full((len(values), self.context_length), filler, dtype=torch.int64)
        for row, row_values in zip(padded, values, strict=True):
            if len(row_values) > self.context_length:
                raise ValueError(
                    f"a row has {len(row_values)} tokens, more than the collator's "
                    f"context_length={self.context_length}"
                )
            row[: len(row_values)] = torch.as_tensor(row_values, dtype=torch.int64)
        return padded


def _load(names: list[str], args: DataArguments, split: str) -> datasets.Dataset:
    files = _local_files(names)
    if files:
        loader = _loader(files)
        options = {"sample_by": args.sample_by} if loader == "text" else {}
        loaded = datasets.load_dataset(loader, data_files=files, split="train", **options)
        column = "text" if loader == "text" else args.text_column
    else:
        if len(names) != 1:
            raise ValueError(f"dataset must be one dataset on the Hub or a list of local files, got {names}")
        loaded = datasets.load_dataset(names[0], args.dataset_config, split=split)
        column = args.text_column
    if column not in loaded.column_names:
        raise ValueError(f"text_column={column!r} is not in {names}; its columns are {loaded.column_names}")
    kind = loaded.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"text_column={column!r} must hold strings, but in {names} it holds {kind}")
    texts = loaded.select_columns([column])
    return texts if column == args.text_column else texts.rename_column(column, args.text_column)


def _local_files(names: list[str]) -> list[str]:
    """The files that ``names`` stand for, in order; none if they name a dataset instead."""
    files, others = [], []
    for name in names:
        found = [path for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file()]
        if not found and Path(name).suffix in LOADERS:
            raise ValueError(f"dataset names a file that is not there: {name!r}")
        files += found
        others += [] if found else [name]
    if files and others:
        raise ValueError(f"dataset must name local files only or one dataset; these are not files: {others}")
    return files


def _loader(files: list[str]) -> str:
    suffixes = sorted({Path(file).suffix for file in files})
    kinds = {LOADERS.get(suffix) for suffix in suffixes}
    if len(kinds) > 1 or None in kinds:
        raise ValueError(f"local files must be of one kind among {tuple(LOADERS)}, got {suffixes}")
    return kinds.pop()


def _tokenize(batch: dict, tokenizer: PreTrainedTokenizerBase, column: str, limit: int | None) -> dict:
    texts = [text for text in batch[column] if text]
    if not texts:
        return {"input_ids": [], "length": []}
    documents = []
    # verbose: a document is not one sequence, so the tokenizer's warning about its length would mislead.
    for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
        ids = [*ids, tokenizer.eos_token_id]
        size = limit or len(ids)
        documents += [ids[start : start + size] for start in range(0, len(ids), size)]
    return {"input_ids": documents, "length": [len(document) for document in documents]}


def _targets(ids: np.ndarray) -> np.ndarray:
    return np.append(ids[1:], IGNORE_INDEX)


def _pack(batch: dict, context_length: int) -> dict:
    documents = [np.asarray(ids, dtype=np.int64) for ids in batch["input_ids"]]
    tokens = np.concatenate(documents)
    targets = np.concatenate([_targets(document) for document in documents])
    places = np.arange(len(tokens))
    starts = np.cumsum([0] + [len(document) for document in documents[:-1]])
    # A token counts from its document's start or its row's, whichever is nearer.
    begins_at = np.zeros_like(places)
    begins_at[starts] = starts
    begins_at[::context_length] = places[::context_length]
    positions = places - np.maximum.accumulate(begins_at)
    return _rows([(tokens, positions, targets)], context_length)


def _cut(batch: dict, context_length: int, continue_positions: bool) -> dict:
    documents = []
    for ids in batch["input_ids"]:
        ids = np.asarray(ids, dtype=np.int64)
        positions = np.arange(len(ids))
        documents.append((ids, positions if continue_positions else positions % context_length, _targets(ids)))
    return _rows(documents, context_length)


def _rows(stretches: list[tuple[np.ndarray, ...]], context_length: int) -> dict:
    """Cuts each stretch of tokens, positions and targets into rows."""
    columns = {name: [] for name in ROW_FEATURES}
    for stretch in stretches:
        for column, values in zip(columns.values(), stretch, strict=True):
            column += [values[start : start + context_length] for start in range(0, len(values), context_length)]
    return columns
