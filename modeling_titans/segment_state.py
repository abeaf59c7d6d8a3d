# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""How a `mac` block's state enters a piece of a call and leaves it (Titans, section 4.1)."""

import torch
import torch.nn.functional as F

from .layer_state import AttentionState, TitansLayerState
from .memory_state import MemoryState, NeuralMemoryState, SegmentState, map_tensors
from .segment_plan import SegmentPiece


def enter_piece(state: TitansLayerState, start: TitansLayerState | None, piece: SegmentPiece) -> TitansLayerState:
    """The state with which a piece begins.

    Where rows differ, what they have pending and kept is brought into the places that the piece has for it, and rows
    that begin a document go back to ``start``, the state before any token (needed if there are such rows).
    """
    if piece.mask is None:
        return state
    memory, pending = state.memory.memory, state.memory.memory.pending
    missing = piece.memory.chunk_size - 1 - pending.k.shape[1]
    if missing:
        pending = map_tensors(lambda t: F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing)), pending)
    # What pending tokens come to has as many places as they have.
    chunk = None if missing else memory.chunk
    memory = MemoryState(memory.weights, memory.momentum, pending, piece.memory.count, chunk)
    attention = _widened(state.attention, piece)
    state = TitansLayerState(state.memory._replace(memory=memory), attention, state.segment)
    if piece.restart is None:
        return state
    kept, segment = state.memory.kept, state.segment
    if kept is not None:
        kept, segment_kept = (k.restart(piece.restart, *start.memory.memory[:2]) for k in (kept, segment.kept))
        segment = segment._replace(kept=segment_kept)
    weights, momentum = _where(piece.restart, start.memory.memory[:2], memory[:2])
    pending = map_tensors(lambda t: _where(piece.restart, torch.zeros_like(t), t), memory.pending)
    memory = MemoryState(weights, momentum, pending, piece.memory.count)
    tail = _where(piece.restart, start.memory.conv_tail, state.memory.conv_tail)
    segment = SegmentState(*_where(piece.restart, start.segment[:2], segment[:2]), segment.kept)
    return TitansLayerState(NeuralMemoryState(memory, tail, kept), state.attention, segment)


def _widened(attention: AttentionState, piece: SegmentPiece) -> AttentionState:
    """Kept keys (B, G, K, D) right-aligned in as many places as the piece has for them."""
    missing = piece.attention.num_kept - attention.keys.shape[2]
    kept = [F.pad(t, (0, 0, missing, 0)) if missing else t for t in attention[:4]]
    return AttentionState(*kept, piece.attention.count)


def leave_piece(state: TitansLayerState, piece: SegmentPiece) -> TitansLayerState:
    """At a segment's end the memory's weights, and what it has kept, become what the next segment reads."""
    if piece.closed is False:
        return state
    weights, kept = state.memory.memory.weights, state.memory.kept
    if kept is not None:
        kept = kept._replace(runners=())
    if piece.closed is not True:
        weights = _where(piece.closed, weights, state.segment.segment_weights)
        if kept is not None:
            kept = kept.where(piece.closed, state.segment.kept)
    return state._replace(segment=state.segment._replace(segment_weights=weights, kept=kept))


def _where(rows: torch.Tensor, chosen, other):
    """By row: ``chosen`` where ``rows`` (B,) is true, else ``other``; tensors, tuples of them, or None."""
    if other is None:
        return None
    if isinstance(other, tuple):
        return tuple(_where(rows, *pair) for pair in zip(chosen, other, strict=True))
    return torch.where(rows.view(-1, *(1,) * (other.dim() - 1)), chosen.to(other.dtype), other)
