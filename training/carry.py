# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Training with the memory carried on from window to window, around the stock Trainer.

Truncated backpropagation through time: a document's windows come one after another in the same row of consecutive
batches, the memory that a window leaves is where the next one starts, and the gradient stops between them. Two parts:

- `StreamDataset` lays documents out so that reading its items in order, one batch after another, gives such batches;
- `CarryMemory` hands the memory from each batch to the next and keeps it in the Trainer's checkpoints.

A new document on a row needs no care: its positions start at 0, so the model itself starts that row afresh.
"""

import heapq
import logging
import os
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import TrainerCallback

from transformers_titans import TitansCache
from transformers_titans.training.arguments import check_carry_arguments
from transformers_titans.training.data import ROW_FEATURES, cut_documents


logger = logging.getLogger(__name__)

MEMORY_FOLDER = "memory_cache"
EMPTY_ROW = {name: [] for name in ROW_FEATURES}


def arrange_streams(windows_per_document: np.ndarray, num_streams: int) -> np.ndarray:
    """Lays documents, each whole, on parallel streams of nearly the same length.

    The longest documents are dealt out first, each to the stream that is shortest so far; within a stream the
    documents then stand in their own order.

    Args:
        windows_per_document: (N,) number of windows of each document, >= 1.
        num_streams: number of streams R, >= 1.

    Returns:
        (S, R) int64: the window that stream r holds at step s, counted through all documents; -1 behind a stream's
        end. The windows of a document stand below each other without a gap.

    Raises:
        ValueError: if ``num_streams`` is less than 1.
    """
    if num_streams < 1:
        raise ValueError(f"num_streams must be >= 1, got {num_streams}")
    streams: list[list[int]] = [[] for _ in range(num_streams)]
    shortest = [(0, stream) for stream in range(num_streams)]
    for document in np.argsort(-windows_per_document, kind="stable").tolist():
        length, stream = shortest[0]
        streams[stream].append(document)
        heapq.heapreplace(shortest, (length + int(windows_per_document[document]), stream))
    order = np.full((max(length for length, _ in shortest), num_streams), -1, dtype=np.int64)
    ends = np.cumsum(windows_per_document)
    for column, documents in zip(order.T, streams, strict=True):
        parts = [np.arange(ends[i] - windows_per_document[i], ends[i]) for i in sorted(documents)]
        windows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        column[: len(windows)] = windows
    return order


class StreamDataset(torch.utils.data.Dataset):
    """Windows in the order in which the memory can be carried: item ``s * num_streams + r`` is step s of stream r.

    A stream that ends before the others is filled up with empty rows, which the collator pads whole and the model
    passes by.

    Args:
        documents: from `tokenize_documents`.
        context_length: tokens in a window.
        num_streams: rows of a batch times the number of processes. Batches that are dealt out to processes in turn,
            as accelerate does, then give each process its own streams.
    """

    def __init__(self, documents: datasets.Dataset, context_length: int, num_streams: int):
        self.windows = cut_documents(documents, context_length, continue_positions=True)
        self.num_streams = num_streams
        lengths = documents.select_columns("length").with_format("numpy")[:]["length"]
        self.order = arrange_streams(-(-lengths // context_length), num_streams).reshape(-1)
        num_empty = len(self.order) - len(self.windows)
        if num_empty > 0.1 * len(self.order):
            logger.warning(
                f"{num_empty} of {len(self.order)} rows are empty: {len(documents)} documents do not fill "
                f"{num_streams} streams evenly. Fewer rows in a batch, or max_document_tokens, use them better."
            )

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict:
        window = int(self.order[index])
        return self.windows[window] if window >= 0 else EMPTY_ROW


class CarryMemory(TrainerCallback):
    """Hands each batch the memory that the batch before it has left, detached.

    Training and evaluation have a memory each. Only batches with ``shift_labels`` and without a cache are served, as
    `RowCollator` makes them; other calls of the model, `generate` among them, are left alone. The memory is written to
    ``checkpoint-N/memory_cache/rank_R`` and read back from there when the run is resumed.

    Give it to a stock Trainer with a `StreamDataset`, a `RowCollator` and ``train_sampling_strategy="sequential"``.
    """

    def __init__(self):
        self.caches: dict[str, TitansCache] = {}
        self.checkpoint: Path | None = None
        self.handles: list = []
        self.model = None

    def resume_from(self, checkpoint: str | os.PathLike) -> None:
        """Names the checkpoint whose memory training goes on with; needed only if it lies outside ``output_dir``."""
        self.checkpoint = Path(checkpoint)

    def on_init_end(self, args, state, control, model=None, **kwargs):
        check_carry_arguments(args)
        self._attach(model)

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        _check_streams(train_dataloader, args.train_batch_size, args.world_size)
        self._attach(model)
        self.caches.pop("train", None)
        if state.global_step > 0:
            checkpoint = self.checkpoint or Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder = checkpoint / MEMORY_FOLDER / f"rank_{args.process_index}"
            if not folder.is_dir():
                raise ValueError(
                    f"the run is resumed at step {state.global_step}, but there is no memory at {folder}; "
                    "a checkpoint outside output_dir must be named to CarryMemory.resume_from"
                )
            self.caches["train"] = TitansCache.from_pretrained(folder, config=model.config).to(args.device)
        self.checkpoint = None

    def on_epoch_begin(self, args, state, control, **kwargs):
        # A resumed run begins its epoch in the middle, with the memory that was read back.
        if float(state.epoch or 0).is_integer():
            self.caches.pop("train", None)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        _check_streams(eval_dataloader, args.eval_batch_size, args.world_size)

    def on_save(self, args, state, control, **kwargs):
        cache = self.caches.get("train")
        if cache is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / MEMORY_FOLDER
            cache.save_pretrained(folder / f"rank_{args.process_index}")

    def on_train_end(self, args, state, control, **kwargs):
        self.caches.pop("train", None)

    def on_evaluate(self, args, state, control, **kwargs):
        self.caches.pop("eval", None)

    def on_predict(self, args, state, control, metrics, **kwargs):
        self.caches.pop("eval", None)

    def detach_from_model(self) -> None:
        """Takes the callback's hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.model = [], None

    def _attach(self, model) -> None:
        if model is self.model:
            return
        self.detach_from_model()
        self.model = model
        self.handles = [
            model.register_forward_pre_hook(self._hand_in, with_kwargs=True),
            model.register_forward_hook(self._take_back, with_kwargs=True),
        ]

    def _hand_in(self, model, args, kwargs):
        if "shift_labels" not in kwargs or kwargs.get("cache") is not None:
            return None
        cache = self.caches.setdefault("train" if model.training else "eval", TitansCache(model.config))
        return args, {**kwargs, "cache": cache, "use_cache": True}

    def _take_back(self, model, args, kwargs, output):
        # In place and before the backward pass: the loss holds its own graph, the next batch must not reach into it.
        for cache in self.caches.values():
            if kwargs.get("cache") is cache:
                cache.detach()


def _check_streams(dataloader, batch_size: int, world_size: int) -> None:
    dataset = dataloader.dataset
    if not isinstance(dataset, StreamDataset):
        raise ValueError(
            f"the dataset must be a StreamDataset when the memory is carried, got {type(dataset).__name__}"
        )
    if dataset.num_streams != batch_size * world_size:
        raise ValueError(
            f"num_streams must be rows of a batch x processes = {batch_size} x {world_size}, got {dataset.num_streams}"
        )
