# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts text: exact token averages for the Trainer, and one long document read as a stream."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import EvalPrediction, PreTrainedModel

from transformers_titans import TitansCache
from transformers_titans.training.data import IGNORE_INDEX


FRESH_WINDOWS_PER_CALL = 16


def row_losses(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Reduces logits to what `token_metrics` needs, for the Trainer's ``preprocess_logits_for_metrics``.

    Args:
        logits: (B, T, vocab_size).
        shift_labels: (B, T) target of each token, -100 for none.

    Returns:
        (B, 2) float32: each row's summed negative log likelihood in nats, and its number of targets.
    """
    losses = F.cross_entropy(logits.float().transpose(1, 2), shift_labels, ignore_index=IGNORE_INDEX, reduction="none")
    return torch.stack([losses.sum(1), (shift_labels != IGNORE_INDEX).sum(1)], dim=1)


def token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Averages over tokens, for the Trainer's ``compute_metrics``.

    The Trainer's own ``eval_loss`` is the mean of the batches' means, which weighs a token in a padded batch more
    than one in a full batch. These do not.

    Args:
        prediction: its ``predictions`` are the (rows, 2) sums of `row_losses`.

    Returns:
        ``nats_per_token``, ``bits_per_token``, ``perplexity`` and ``num_tokens`` (targets counted). NaN if there is
        no target.
    """
    total, count = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0).tolist()
    nats = total / count if count else math.nan
    return {
        "nats_per_token": nats,
        "bits_per_token": nats / math.log(2),
        "perplexity": math.exp(nats) if nats < 700 else math.inf,
        "num_tokens": int(count),
    }


class StreamLoss(NamedTuple):
    """A document's average negative log likelihood in nats a token, read in two ways.

    Attributes:
        carried: with the memory carried from window to window.
        reset: with a fresh memory in every window.
        num_tokens: targets of each average: all tokens but the first.
    """

    carried: float
    reset: float
    num_tokens: int


def compare_memory(
    model: PreTrainedModel, input_ids: torch.Tensor, context_length: int, cache: TitansCache | None = None
) -> StreamLoss:
    """Reads one document twice, with the memory carried on and with it reset at every window.

    Both readings predict the same tokens, the first of each window included: by the last token of the window before.

    Args:
        model: a causal Titans model.
        input_ids: (T,) the document, T >= 2.
        context_length: tokens in a window, >= 1.
        cache: an empty cache to be left with the memory of the document but its last token, as `generate` wants it.

    Raises:
        ValueError: if there are fewer than two tokens or the window is empty.
    """
    carried = stream_loss(model, input_ids, context_length, TitansCache(model.config) if cache is None else cache)
    reset = stream_loss(model, input_ids, context_length)
    return StreamLoss(carried, reset, len(input_ids) - 1)


@torch.no_grad()
def stream_loss(
    model: PreTrainedModel, input_ids: torch.Tensor, context_length: int, cache: TitansCache | None = None
) -> float:
    """Average negative log likelihood, in nats a token, of one document read in windows; see `compare_memory`.

    With ``cache`` the memory is carried from window to window in it; without, every window starts with a fresh one.
    """
    if input_ids.dim() != 1 or len(input_ids) < 2:
        raise ValueError(f"input_ids must be (T,) with T >= 2, got shape {tuple(input_ids.shape)}")
    if context_length < 1:
        raise ValueError(f"context_length must be >= 1, got {context_length}")
    was_training = model.training
    model.eval()
    input_ids = input_ids.to(model.device)
    windows = _windows(input_ids[:-1], context_length, filler=0)
    targets = _windows(input_ids[1:], context_length, filler=IGNORE_INDEX)
    positions = torch.arange(windows.numel(), device=model.device).view_as(windows)
    # Fresh windows know nothing of each other, so several may be read at once.
    num_rows, name = (FRESH_WINDOWS_PER_CALL, "reset") if cache is None else (1, "carried")
    total = 0.0
    for start in tqdm(range(0, len(windows), num_rows), desc=f"Reading, memory {name}"):
        rows = slice(start, start + num_rows)
        is_token = targets[rows] != IGNORE_INDEX
        # Columns of padding alone are left out: the cache would count them.
        columns = slice(int(is_token.sum(1).max()))
        output = model(
            windows[rows, columns],
            attention_mask=is_token[:, columns].long(),
            position_ids=positions[rows, columns],
            cache=cache,
            use_cache=cache is not None,
        )
        total += row_losses(output.logits, targets[rows, columns])[:, 0].sum().item()
    model.train(was_training)
    return total / (len(input_ids) - 1)


def _windows(values: torch.Tensor, size: int, filler: int) -> torch.Tensor:
    """(T,) to (windows, size), the last one filled up."""
    return F.pad(values, (0, -len(values) % size), value=filler).view(-1, size)
