# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of a neural memory: an explicit argument and result of every call, never a module's attribute."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class PendingTokens(NamedTuple):
    """The tokens of each row's open chunk, in order, first token at index 0, zeros behind a row's last one.

    Attributes:
        k, v: keys and values, (B, P, H, D).
        theta, alpha, eta: the gates, (B, P, H), each token's own; where a chunk shares its gates, those of the first
            token count.
    """

    k: torch.Tensor
    v: torch.Tensor
    theta: torch.Tensor
    alpha: torch.Tensor
    eta: torch.Tensor


class OpenChunk(NamedTuple):
    """What the open chunk's tokens come to: it follows from `PendingTokens`, and is kept so that it is computed once.

    In rows with fewer than P tokens the coefficients behind the last one are zero.

    Attributes:
        inputs: what the tokens' keys are at the inputs of layers 2..L, each (B, H, P, D_l).
        errors: the errors at the layers' outputs, each (B, H, P, D_{l+1}).
        kept: c, what the last token's weights have of those at the chunk's start, (B, H, 1).
        mixed: d and A, what they have of the momentum at the chunk's start and of each token, (B, H, 1 + P).
        past: m and E, what the last token's momentum has of them, (B, H, 1 + P).
    """

    inputs: tuple[torch.Tensor, ...]
    errors: tuple[torch.Tensor, ...]
    kept: torch.Tensor
    mixed: torch.Tensor
    past: torch.Tensor


class MemoryState(NamedTuple):
    """What a neural memory knows of the tokens it has read.

    Weights and momentum stand at the start of each row's open chunk; the chunk's tokens are kept as they came and are
    replayed with the next call. Any split of a sequence over calls therefore computes what a single call computes,
    and taking tokens of the open chunk back means dropping them.

    Attributes:
        weights: the memory's layers W_1..W_L, each (B, H, D_in, D_out), applied as ``x @ W``.
        momentum: the past surprise S of each layer (Titans, eq. 10), same shapes.
        pending: the open chunk's tokens.
        count: how many tokens are pending: an int if it is the same in every row (then P == count), else a
            LongTensor (B,) (then P == chunk_size - 1).
        chunk: what the pending tokens come to, or None where that is not known; they alone are the truth.
    """

    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    pending: PendingTokens
    count: int | torch.Tensor
    chunk: OpenChunk | None = None

    @classmethod
    def initial(cls, weights: Sequence[torch.Tensor], batch_size: int) -> "MemoryState":
        """The state before any token: the learned start weights W_0, no momentum, nothing pending.

        Args:
            weights: one tensor (H, D_in, D_out) per layer; the first D_in and the last D_out are the head dimension.
            batch_size: number of rows.

        Returns:
            A state in float32, or float64 for float64 weights, through which gradients reach ``weights``.
        """
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        # Copied: whoever shards the parameters takes their storage back while the state lives on.
        rows = tuple(w.to(dtype, copy=True).expand(batch_size, *w.shape) for w in weights)
        num_heads, head_dim = weights[0].shape[:2]
        vectors = rows[0].new_zeros(batch_size, 0, num_heads, head_dim)
        gates = rows[0].new_zeros(batch_size, 0, num_heads)
        pending = PendingTokens(vectors, vectors, gates, gates, gates)
        return cls(rows, tuple(torch.zeros_like(w) for w in rows), pending, 0)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to each tensor; (named) tuples keep their type, other leaves stay as they are."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple):
        # A call for each leaf would be a good part of what a decoded token costs.
        leaves = [
            fn(leaf) if isinstance(leaf, torch.Tensor) else map_tensors(fn, leaf) if isinstance(leaf, tuple) else leaf
            for leaf in tree
        ]
        return tree._make(leaves) if hasattr(tree, "_fields") else tuple(leaves)
    return tree


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def iterate_tensors(tree: Any):
    """Yields (dotted name, tensor) for each tensor of a tree of (named) tuples, in a fixed order."""
    return ((name, leaf) for name, leaf in iterate_leaves(tree) if isinstance(leaf, torch.Tensor))


def iterate_leaves(tree: Any, name: str = ""):
    """Yields (dotted name, leaf) for each leaf but None."""
    if isinstance(tree, tuple):
        keys = tree._fields if hasattr(tree, "_fields") else range(len(tree))
        for key, leaf in zip(keys, tree, strict=True):
            yield from iterate_leaves(leaf, f"{name}.{key}" if name else str(key))
    elif tree is not None:
        yield name, tree


class NeuralMemoryState(NamedTuple):
    """The state of a `TitansNeuralMemory` layer.

    Attributes:
        memory: the op's state.
        conv_tail: (B, kernel_size - 1, 3 * H * D) each row's last inputs of the convolution, zeros before its first;
            None if the layer has no convolution.
        kept: the `KeptMemories` of a layer with memory caching, else None.
    """

    memory: MemoryState
    conv_tail: torch.Tensor | None
    kept: tuple | None = None

    def expand(self, batch_size: int) -> "NeuralMemoryState":
        """A state of one row as the state of ``batch_size`` equal rows."""
        return map_tensors(lambda t: t.expand(batch_size, *t.shape[1:]), self)


class SegmentState(NamedTuple):
    """What a `TitansNeuralMemory` layer needs to be read while a segment goes on (Titans, eq. 21).

    Attributes:
        segment_weights: the memory's weights at the segment's start, each (B, H, D_in, D_out).
        conv_tail: (B, kernel_size - 1, H * D) each row's last inputs of the queries' convolution, counted over the
            tokens that have been read in this way; None if the layer has no convolution.
        kept: the `KeptMemories` at the segment's start, of a layer with memory caching, else None.
    """

    segment_weights: tuple[torch.Tensor, ...]
    conv_tail: torch.Tensor | None
    kept: tuple | None = None


def number_of_rows(state: NeuralMemoryState | SegmentState) -> int:
    """B. Not a property of either state: torch.compile of 2.9 and before knows none on named tuples."""
    weights = state.segment_weights if hasattr(state, "segment_weights") else state.memory.weights
    return weights[0].shape[0]
