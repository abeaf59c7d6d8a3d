# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding in C++ on a CPU: all blocks at one token of each row, in one call (`native_blocks.cpp`).

Of a token's time in PyTorch nearly all goes into the calls of hundreds of operations. Here a token takes little more
than the weights take to be read. It is for whole models with ``memory_backend="native"`` whose modules are what
`TitansModel` has made of them: where hooks, adapters, quantizers or a distribution have changed one, PyTorch reads.

Shapes: B rows, H heads, D head dimension, P tokens in the open chunk, K kept keys.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from .blockwise import EPS
from .compiled_decoding import BlocksReader, read_blocks
from .configuration_titans import CHOICES, TitansConfig
from .decoder_layer import TitansDecoderLayer, TitansLayerOutput
from .layer_plan import LayerPlan
from .layer_state import Sealed
from .native_library import native_library, pointers
from .native_parameters import are_alike, plain_parameters
from .native_rooms import Step, StepState, first_step, step_of, tensors_of, with_chunk
from .scan_inputs import RULES
from .segment_state import leave_piece
from .short_calls import is_short
from .token_layout import TokenLayout


SOURCE = "native_blocks.cpp"


class Sizes(ctypes.Structure):
    """`titans::BlockSizes`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("variant", "rows", "width", "intermediate", "persistent")),
        *((name, ctypes.c_int64) for name in ("heads", "dim", "hidden", "depth", "taps", "pending", "places", "turn")),
        *((name, ctypes.c_int64) for name in ("dot", "sliding", "chunk_gates", "to_start")),
        *((name, ctypes.c_int64) for name in ("residual", "silu_gating", "closes")),
        *((name, ctypes.c_int64) for name in ("attention_heads", "key_value_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("first_kept", "kept", "kept_places")),
        *((name, ctypes.c_double) for name in ("rms_eps", "norm_eps", "unit_eps", "max_lr", "max_forget", "scaling")),
    ]


def native_reader(config: TitansConfig) -> BlocksReader | None:
    """`read_blocks_natively` for the models that C++ reads, else None."""
    is_native = config.memory_backend == "native" and config.memory_caching is None
    return BlocksReader(suits, read_blocks_natively) if is_native else None


def suits(hidden_states: torch.Tensor, plan: LayerPlan, state: Sealed) -> bool:
    """Whether a call is one that C++ reads: a token in each of a few rows that are alike, without gradients."""
    if torch.compiler.is_compiling():
        return False
    few = hidden_states.shape[1] == 1 and is_short(hidden_states.shape[0])
    if not few or type(hidden_states) is not torch.Tensor or hidden_states.device.type != "cpu":
        return False
    if hidden_states.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return False
    if type(state) is StepState:
        return _layout(plan).slots is None
    if state.content is None or _layout(plan).slots is not None:
        return False
    # What the pending tokens come to is computed by the first call that needs it.
    memory = state.content.memory.memory
    return isinstance(memory.count, int) and (memory.count == 0 or memory.chunk is not None)


def read_blocks_natively(
    layers: nn.ModuleList, hidden_states: torch.Tensor, states: Sequence[Sealed], plan: Sealed, *options: bool
) -> tuple[list[torch.Tensor], list[tuple]]:
    """`read_blocks` over (B, 1, hidden_size), for calls that suit.

    Raises:
        ImportError, RuntimeError: as `native_library`.
        MemoryError: there is no memory for the buffers.
    """
    parameters = None if any(options) else plain_parameters(layers, hidden_states.dtype)
    step = None if parameters is None else _step(states, plan.content, hidden_states.dtype)
    if step is None:
        return read_blocks(layers, hidden_states, states, plan, *options)
    library, sizes = native_library(SOURCE), _sizes(layers[0], hidden_states, step, plan.content)
    nexts = [_room_behind(step, sizes) for _ in layers]
    # Kept until the call is over: what is copied here belongs to nobody else.
    parameters = [t if t is None or t.is_contiguous() else t.contiguous() for given in parameters for t in given]
    hidden_states, *cos_sin = (t.contiguous() for t in (hidden_states, *_position_embeddings(plan, hidden_states)))
    streams = hidden_states.new_empty(len(layers), *hidden_states.shape)
    step.begin()
    failed = library.titans_read_blocks(
        ctypes.byref(sizes),
        ctypes.c_int64(len(layers)),
        ctypes.c_int64(hidden_states.element_size()),
        pointers(parameters),
        step.rooms.pointers,
        pointers(t for own in nexts for t in own),
        *(ctypes.c_void_p(t.data_ptr()) for t in (*cos_sin, hidden_states, streams)),
        ctypes.c_int64(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("decoding in C++ found no memory for its buffers")
    after = _behind(step, nexts, sizes, plan.content)
    streams = streams.unbind()
    outputs = [TitansLayerOutput(x, state, None, None) for x, state in zip(streams, after, strict=True)]
    return [hidden_states, *streams], outputs


def _step(states: Sequence[Sealed], plan: LayerPlan, dtype: torch.dtype) -> Step | None:
    """Behind which step to write, or None for states that C++ does not take."""
    step = step_of(states)
    if step is None:
        contents = [with_chunk(state.content) for state in states]
        if not are_alike([tensors_of(state) for state in contents], (torch.Tensor, dtype, True)):
            return None
        return first_step(contents, _layout(plan).chunk_size)
    return step if step.rooms.dtype == dtype else None


def _layout(plan: LayerPlan) -> TokenLayout:
    return plan.memory if plan.segments is None else plan.segments.pieces[0].memory


def _sizes(layer: TitansDecoderLayer, hidden_states: torch.Tensor, step: Step, plan: LayerPlan) -> Sizes:
    rooms, state, persistent = step.rooms, step.rooms.start[0], layer.persistent_tokens
    weights, tail = state.memory.memory.weights, state.memory.conv_tail
    _, heads, dim, hidden = weights[0].shape
    # Past transformers' way to look fields up, which would take longer than all else.
    fields = vars(layer.memory.config)
    rule = RULES[fields["memory_rule"]]
    sizes = Sizes(
        variant=CHOICES["variant"].index(layer.variant),
        rows=hidden_states.shape[0],
        width=hidden_states.shape[2],
        intermediate=layer.mlp.gate_proj.weight.shape[0],
        persistent=0 if persistent is None else persistent.weight.shape[0],
        heads=heads,
        dim=dim,
        hidden=hidden,
        depth=len(weights),
        taps=1 if tail is None else tail.shape[1] + 1,
        pending=step.count,
        places=rooms.places,
        turn=step.turn,
        dot=rule.dot,
        sliding=rule.sliding,
        chunk_gates=fields["memory_gate_granularity"] == "chunk",
        to_start=fields["memory_forget_to"] == "start",
        residual=fields["memory_residual"],
        silu_gating=fields["memory_gating"] == "silu",
        closes=step.count + 1 == rooms.places,
        rms_eps=fields["rms_norm_eps"],
        norm_eps=1e-6,
        unit_eps=EPS,
        max_lr=fields["memory_max_lr"],
        max_forget=fields["memory_max_forget"],
    )
    if layer.variant != "lmm":
        attention = layer.self_attn
        sizes.attention_heads, sizes.key_value_heads = attention.num_heads, attention.num_key_value_heads
        sizes.head_dim, sizes.scaling = attention.head_dim, attention.scaling
        sizes.first_kept, sizes.kept, sizes.kept_places = step.first_kept, step.kept, rooms.kept_places
    return sizes


def _position_embeddings(plan: Sealed, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """cos and sin (B, 1, D) where there is attention."""
    plan = plan.content
    pair = plan.position_embeddings if plan.segments is None else plan.segments.pieces[0].position_embeddings
    if pair is None:
        return hidden_states, hidden_states
    return tuple(t.expand(hidden_states.shape[0], -1, -1) for t in pair)


def _room_behind(step: Step, sizes: Sizes) -> list[torch.Tensor | None]:
    """A block's weights and momentum behind the chunk, without their numbers, if the token ends it."""
    weights = step.rooms.start[0].memory.memory.weights
    return [torch.empty(w.shape, dtype=w.dtype) if sizes.closes else None for w in (*weights, *weights)]


def _behind(step: Step, nexts: list[list[torch.Tensor]], sizes: Sizes, plan: LayerPlan) -> list[Sealed]:
    """The blocks' states behind the token that has been written."""
    layout = plan.attention if plan.segments is None else plan.segments.pieces[0].attention
    after = step.next(0 if layout is None else layout.kept_count)
    if not sizes.closes:
        return after.sealed()
    closed = after.closed(nexts)
    if plan.segments is not None:
        closed = [leave_piece(state, plan.segments.pieces[0]) for state in closed]
    return [Sealed(state, is_owned=True) for state in closed]
