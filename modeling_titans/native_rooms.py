# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""States in which C++ goes on where they lie: nothing is copied from token to token, and no tensor made.

A token is written behind those of its chunk, and its keys behind those that are kept. What it changes as a whole has
two places that take turns. So the state before a token is still there behind it; who holds it any longer has it copied
out before the next token.

Shapes: L blocks, B rows.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .chunk_decode import empty_chunk
from .layer_state import NOTHING_READ, AttentionState, LayerCounts, Sealed, TitansLayerState
from .memory_state import MemoryState, NeuralMemoryState, OpenChunk, PendingTokens
from .native_library import pointers


class _Extent(NamedTuple):
    """What is in use of a tensor: ``number`` places of a dimension from the ``first`` on, None: all. ``turns``: of how
    many such tensors."""

    dim: int
    first: int
    number: int | None
    turns: int = 1


class Rooms:
    """The states of all blocks in one chunk, with room for its other tokens.

    Args:
        states: of L blocks, alike in their shapes, with their open chunks.
        places: how many tokens a chunk has.

    Attributes:
        start: the states, without what attention has kept.
        dtype: of their numbers.
        places, kept_places: for how many tokens, and for how many keys, there is room.
        columns: the rooms (L, turns, ...) for each tensor that changes with a token, or None.
        pointers: where the numbers lie, for each block in the order of `titans::BlockState`.
        newest, former: weak references to the last two steps.
    """

    def __init__(self, states: Sequence[TitansLayerState], places: int):
        counts = Sealed(states[0]).counts
        self.start = [state._replace(attention=None) for state in states]
        self.dtype = states[0].memory.memory.weights[0].dtype
        self.places, self.kept_places = places, counts.num_kept + places - counts.memory
        filled = self.extents(counts.memory, 0, counts.num_kept)
        room = self.extents(places, 0, self.kept_places)
        columns = zip(*map(_changing, states), strict=True)
        self.columns = [_room(*column) for column in zip(columns, filled, room, strict=True)]
        # Copies of what does not lie in one piece must live as long as the pointers.
        self._fixed = [[None if t is None else t.contiguous() for t in _fixed(state)] for state in states]
        rooms = zip(*([None] * len(states) if column is None else column for column in self.columns), strict=True)
        self.pointers = pointers(t for pair in zip(self._fixed, rooms, strict=True) for part in pair for t in part)
        self.newest = self.former = _nobody

    def extents(self, count: int, first_kept: int, kept: int) -> list[_Extent]:
        """What is in use of each column where ``count`` tokens are pending, and ``kept`` keys are there."""
        depth = len(self.start[0].memory.memory.weights)
        tokens = [_Extent(1, 0, count)] * 5 + [_Extent(2, 0, count)] * (2 * depth - 1)
        coefficients = [_Extent(2, 0, 1)] + [_Extent(2, 0, 1 + count)] * 2
        turning = [extent._replace(turns=2) for extent in (*coefficients, *[_Extent(0, 0, None)] * 2)]
        return [*tokens, *[_Extent(2, first_kept, kept)] * 4, *turning]


class Step:
    """What all blocks know behind a token.

    Args:
        rooms: where it lies.
        count: tokens pending.
        first_kept, kept: which keys are there.
        turn: which of two places is the present one.
    """

    def __init__(self, rooms: Rooms, count: int, first_kept: int, kept: int, turn: int):
        self.rooms, self.count, self.turn = rooms, count, turn
        self.first_kept, self.kept = first_kept, kept
        self._states: list[TitansLayerState] | None = None

    def copied_out(self) -> list[TitansLayerState]:
        """The blocks' states."""
        if self._states is None:
            extents = self.rooms.extents(self.count, self.first_kept, self.kept)
            self._states = [self._state(index, extents) for index in range(len(self.rooms.start))]
        return self._states

    def sealed(self) -> list[Sealed]:
        """The blocks' states, each copied out when it is asked for."""
        return [StepState(self, index) for index in range(len(self.rooms.start))]

    def begin(self) -> None:
        """To be called before a token is written behind this step, where the former one's numbers are."""
        former = self.rooms.former()
        if former is not None:
            former.copied_out()

    def next(self, kept: int) -> "Step":
        """The step behind a token that has been written, with ``kept`` keys."""
        first_kept = self.first_kept + self.kept + 1 - kept
        step = Step(self.rooms, self.count + 1, first_kept, kept, 1 - self.turn)
        self.rooms.former, self.rooms.newest = self.rooms.newest, weakref.ref(step)
        return step

    def closed(self, nexts: Sequence[Sequence[torch.Tensor]]) -> list[TitansLayerState]:
        """The blocks' states where the last token has ended its chunk.

        Args:
            nexts: each block's weights behind the chunk, for each layer of its memory, and then its momentum.
        """
        extents, states = self.rooms.extents(0, self.first_kept, self.kept), []
        for index, own in enumerate(nexts):
            state, depth = self._state(index, extents), len(own) // 2
            memory = MemoryState(tuple(own[:depth]), tuple(own[depth:]), state.memory.memory.pending, 0)
            states.append(state._replace(memory=state.memory._replace(memory=memory)))
        return states

    def _state(self, index: int, extents: list[_Extent]) -> TitansLayerState:
        start, columns = self.rooms.start[index], self.rooms.columns
        parts = (_taken(column, index, self.turn, extent) for column, extent in zip(columns, extents, strict=True))

        def take(number: int) -> tuple[torch.Tensor | None, ...]:
            return tuple(itertools.islice(parts, number))

        memory, segment, depth = start.memory.memory, start.segment, len(start.memory.memory.weights)
        pending, inputs, errors, keys = PendingTokens(*take(5)), take(depth - 1), take(depth), take(4)
        chunk = OpenChunk(inputs, errors, *take(3))
        tail, segment_tail = take(2)
        memory = MemoryState(memory.weights, memory.momentum, pending, self.count, chunk)
        attention = None if keys[0] is None else AttentionState(*keys, self.kept)
        if segment is not None:
            segment = segment._replace(conv_tail=segment_tail)
        return TitansLayerState(NeuralMemoryState(memory, tail), attention, segment)


class StepState(Sealed):
    """A block's state behind a token, copied out when somebody asks for its content."""

    __slots__ = ("step", "index")

    def __init__(self, step: Step, index: int):
        self.step, self.index, self.is_owned = step, index, True

    @property
    def content(self) -> TitansLayerState:
        return self.step.copied_out()[self.index]

    @property
    def counts(self) -> LayerCounts:
        return LayerCounts(self.step.count, self.step.kept, self.step.kept, NOTHING_READ.kept)

    def __reduce__(self):
        # A copy is on its own: it does not go on in these rooms.
        return Sealed, (self.content, True)


def step_of(states: Sequence[Sealed]) -> Step | None:
    """The step that the blocks' states are of, if a token can be written behind it where it lies."""
    first = states[0]
    if type(first) is not StepState or len(states) != len(first.step.rooms.start):
        return None
    step = first.step
    are_its = all(type(s) is StepState and s.step is step and s.index == index for index, s in enumerate(states))
    return step if are_its and step.rooms.newest() is step else None


def first_step(states: Sequence[TitansLayerState], places: int) -> Step:
    """The step that these states, alike in their shapes, are, in new rooms for a chunk of ``places`` tokens."""
    rooms, counts = Rooms(states, places), Sealed(states[0]).counts
    step = Step(rooms, counts.memory, 0, counts.num_kept, 0)
    rooms.newest = weakref.ref(step)
    return step


def with_chunk(state: TitansLayerState) -> TitansLayerState:
    """Says that no token is pending where that is so and not said."""
    memory = state.memory.memory
    if memory.chunk is not None:
        return state
    return state._replace(memory=state.memory._replace(memory=memory._replace(chunk=empty_chunk(memory.weights))))


def tensors_of(state: TitansLayerState) -> list[torch.Tensor | None]:
    """As `titans::BlockState` reads them."""
    return _fixed(state) + _changing(state)


def _fixed(state: TitansLayerState) -> list[torch.Tensor | None]:
    """What a token leaves as it is, unless it ends the chunk."""
    memory, segment = state.memory.memory, state.segment
    return [*memory.weights, *memory.momentum, *([None] * len(memory.weights) if segment is None else segment[0])]


def _changing(state: TitansLayerState) -> list[torch.Tensor | None]:
    memory, attention, segment = state.memory.memory, state.attention, state.segment
    keys = [None] * 4 if attention is None else attention[:4]
    tails = state.memory.conv_tail, None if segment is None else segment.conv_tail
    return [*memory.pending, *memory.chunk.inputs, *memory.chunk.errors, *keys, *memory.chunk[2:], *tails]


def _room(column: Sequence[torch.Tensor | None], filled: _Extent, room: _Extent) -> torch.Tensor | None:
    """L tensors (...) in the first of the turns of an otherwise empty (L, turns, ...)."""
    if column[0] is None:
        return None
    shape = list(column[0].shape)
    if room.number is not None:
        shape[room.dim] = room.number
    result = _empty(column[0], len(column), room.turns, *shape)
    for place, t in zip(result[:, 0], column, strict=True):
        _used(place, filled).copy_(t)
    return result


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape)


def _taken(column: torch.Tensor | None, index: int, turn: int, extent: _Extent) -> torch.Tensor | None:
    if column is None:
        return None
    place = column[index, turn if extent.turns == 2 else 0]
    return _used(place, extent).clone(memory_format=torch.contiguous_format)


def _used(t: torch.Tensor, extent: _Extent) -> torch.Tensor:
    return t if extent.number is None else t.narrow(extent.dim, extent.first, extent.number)


def _nobody() -> None:
    """A weak reference to nothing."""
