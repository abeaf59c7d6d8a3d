# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding in C++ on a CPU: all blocks at one token of each row, in one call (`native_blocks.cpp`).

Of a token's time in PyTorch nearly all goes into the calls of hundreds of operations. Here a token takes little more
than the weights take to be read. It is for whole models with ``memory_backend="native"`` whose modules are what
`TitansModel` has made of them: where hooks, adapters, quantizers or a distribution have changed one, PyTorch reads.

Shapes: B rows, H heads, D head dimension, P tokens in the open chunk, K kept keys.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from .attention_titans import TitansAttention
from .blockwise import EPS
from .chunk_decode import empty_chunk
from .compiled_decoding import BlocksReader, read_blocks
from .configuration_titans import CHOICES, TitansConfig
from .decoder_layer import (
    TitansCombination,
    TitansDecoderLayer,
    TitansLayerOutput,
    TitansMLP,
    TitansPersistentTokens,
)
from .layer_plan import LayerPlan
from .layer_state import AttentionState, Sealed, TitansLayerState
from .memory_layer import TitansGate, TitansNeuralMemory, TitansRMSNorm, TitansStartWeights
from .memory_state import MemoryState, NeuralMemoryState, OpenChunk, PendingTokens, SegmentState
from .native_library import native_library, pointers
from .scan_inputs import RULES
from .short_calls import TitansConvolution, is_short
from .token_layout import TokenLayout


SOURCE = "native_blocks.cpp"
SILU, SIGMOID = (type(ACT2FN[name]) for name in ("silu", "sigmoid"))
# What a block consists of. An adapter's or quantizer's layer has a class of its own.
PLAIN = {
    nn.Linear,
    SILU,
    SIGMOID,
    TitansAttention,
    TitansCombination,
    TitansConvolution,
    TitansDecoderLayer,
    TitansGate,
    TitansMLP,
    TitansNeuralMemory,
    TitansPersistentTokens,
    TitansRMSNorm,
    TitansStartWeights,
}


class Sizes(ctypes.Structure):
    """`titans::BlockSizes`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("variant", "rows", "width", "intermediate", "persistent")),
        *((name, ctypes.c_int64) for name in ("heads", "dim", "hidden", "depth", "taps", "pending")),
        *((name, ctypes.c_int64) for name in ("dot", "sliding", "chunk_gates", "residual", "silu_gating", "closes")),
        *((name, ctypes.c_int64) for name in ("attention_heads", "key_value_heads", "head_dim", "kept", "kept_later")),
        *((name, ctypes.c_double) for name in ("rms_eps", "norm_eps", "unit_eps", "max_lr", "max_forget", "scaling")),
    ]


def native_reader(config: TitansConfig) -> BlocksReader | None:
    """`read_blocks_natively` for the models that C++ reads, else None."""
    is_native = config.memory_backend == "native" and config.memory_caching is None
    return BlocksReader(suits, read_blocks_natively) if is_native else None


def suits(hidden_states: torch.Tensor, plan: LayerPlan, state: TitansLayerState | None) -> bool:
    """Whether a call is one that C++ reads: a token in each of a few rows that are alike, without gradients."""
    if torch.compiler.is_compiling():
        return False
    few = hidden_states.shape[1] == 1 and is_short(hidden_states.shape[0])
    if not few or type(hidden_states) is not torch.Tensor or hidden_states.device.type != "cpu":
        return False
    if hidden_states.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return False
    if state is None or _layout(plan).slots is not None:
        return False
    # What the pending tokens come to is computed by the first call that needs it.
    memory = state.memory.memory
    return isinstance(memory.count, int) and (memory.count == 0 or memory.chunk is not None)


def read_blocks_natively(
    layers: nn.ModuleList, hidden_states: torch.Tensor, states: Sequence[Sealed], plan: Sealed, *options: bool
) -> tuple[list[torch.Tensor], list[tuple]]:
    """`read_blocks` over (B, 1, hidden_size), for calls that suit.

    Raises:
        ImportError, RuntimeError: as `native_library`.
        MemoryError: there is no memory for the buffers.
    """
    before = [_with_chunk(state.content) for state in states]
    tensors = None if any(options) or not _are_plain(layers) else _given(layers, before)
    if tensors is None or not _are_usable(tensors, hidden_states.dtype):
        return read_blocks(layers, hidden_states, states, plan, *options)
    library, sizes = native_library(SOURCE), _sizes(layers[0], hidden_states, before[0], plan.content)
    after = _room_behind(before, sizes)
    # Kept until the call is over: what is copied here belongs to nobody else.
    tensors = [
        t if t is None or t.is_contiguous() else t.contiguous()
        for given, state in zip(tensors, after, strict=True)
        for t in (*given, *_tensors(state))
    ]
    hidden_states, *cos_sin = (t.contiguous() for t in (hidden_states, *_position_embeddings(plan, hidden_states)))
    streams = hidden_states.new_empty(len(layers), *hidden_states.shape)
    failed = library.titans_read_blocks(
        ctypes.byref(sizes),
        ctypes.c_int64(len(layers)),
        ctypes.c_int64(hidden_states.element_size()),
        pointers(tensors),
        *(ctypes.c_void_p(t.data_ptr()) for t in (*cos_sin, hidden_states, streams)),
        ctypes.c_int64(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("decoding in C++ found no memory for its buffers")
    after = [Sealed(_settled(state, plan.content, sizes), is_owned=True) for state in after]
    streams = streams.unbind()
    outputs = [TitansLayerOutput(x, state, None, None) for x, state in zip(streams, after, strict=True)]
    return [hidden_states, *streams], outputs


def _layout(plan: LayerPlan) -> TokenLayout:
    return plan.memory if plan.segments is None else plan.segments.pieces[0].memory


def _with_chunk(state: TitansLayerState) -> TitansLayerState:
    memory = state.memory.memory
    if memory.chunk is not None:
        return state
    return state._replace(memory=state.memory._replace(memory=memory._replace(chunk=empty_chunk(memory.weights))))


def _are_plain(layers: nn.ModuleList) -> bool:
    """Whether the blocks compute what their modules' classes say, with the activations that C++ knows."""
    if _has_any_global_hook() or not all(type(layer) is TitansDecoderLayer for layer in layers):
        return False
    modules = list(layers)
    # As `nn.Module.modules` does, at a tenth of its time.
    for module in modules:
        own = module.__dict__
        if type(module) not in PLAIN or own["training"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
        # transformers' own look at outputs only while somebody has asked for them, and then `read_blocks` reads.
        hooks = own["_forward_hooks"].values()
        if hooks and any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks):
            return False
        if own["_modules"]:
            modules += [child for child in own["_modules"].values() if child is not None]
    return all(type(layer.mlp.act_fn) is SILU for layer in layers)


def _given(layers: nn.ModuleList, states: list[TitansLayerState]) -> list[list[torch.Tensor | None]]:
    """Each block's weights and state."""
    return [_parameters(layer) + _tensors(state) for layer, state in zip(layers, states, strict=True)]


def _are_usable(tensors: list[list[torch.Tensor | None]], dtype: torch.dtype) -> bool:
    """Whether C++ may take them as they lie: plain ones of one dtype on a CPU, of the same shapes in all blocks."""
    kinds = {(type(t), t.dtype, t.is_cpu) for given in tensors for t in given if t is not None}
    if not kinds <= {(nn.Parameter, dtype, True), (torch.Tensor, dtype, True)}:
        return False
    shapes = [[None if t is None else t.shape for t in given] for given in tensors]
    return all(own == shapes[0] for own in shapes)


def _sizes(layer: TitansDecoderLayer, hidden_states: torch.Tensor, state: TitansLayerState, plan: LayerPlan) -> Sizes:
    memory, tail, persistent = state.memory.memory, state.memory.conv_tail, layer.persistent_tokens
    _, heads, dim, hidden = memory.weights[0].shape
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
        depth=len(memory.weights),
        taps=1 if tail is None else tail.shape[1] + 1,
        pending=memory.count,
        dot=rule.dot,
        sliding=rule.sliding,
        chunk_gates=fields["memory_gate_granularity"] == "chunk",
        residual=fields["memory_residual"],
        silu_gating=fields["memory_gating"] == "silu",
        closes=memory.count + 1 == _layout(plan).chunk_size,
        rms_eps=fields["rms_norm_eps"],
        norm_eps=1e-6,
        unit_eps=EPS,
        max_lr=fields["memory_max_lr"],
        max_forget=fields["memory_max_forget"],
    )
    if state.attention is not None:
        attention = layer.self_attn
        layout = plan.attention if plan.segments is None else plan.segments.pieces[0].attention
        sizes.attention_heads, sizes.key_value_heads = attention.num_heads, attention.num_key_value_heads
        sizes.head_dim, sizes.scaling = attention.head_dim, attention.scaling
        sizes.kept, sizes.kept_later = state.attention.keys.shape[2], layout.kept_count
    return sizes


def _position_embeddings(plan: Sealed, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """cos and sin (B, 1, D) where there is attention."""
    plan = plan.content
    pair = plan.position_embeddings if plan.segments is None else plan.segments.pieces[0].position_embeddings
    if pair is None:
        return hidden_states, hidden_states
    return tuple(t.expand(hidden_states.shape[0], -1, -1) for t in pair)


def _parameters(layer: TitansDecoderLayer) -> list[torch.Tensor | None]:
    """As `titans::BlockWeights` reads them."""
    memory, config = layer.memory, layer.memory.config
    own, linears = memory._parameters, ("q_proj", "k_proj", "v_proj", "theta_proj", "alpha_proj", "eta_proj")
    tensors = [_parameter(layer, "input_layernorm"), _parameter(layer, "persistent_tokens")]
    tensors += _linears(memory, *linears, "o_gate_proj", "o_proj")
    tensors += [_parameter(memory, "conv1d"), own.get("memory_norm_weight"), own.get("memory_norm_bias")]
    tensors.append(_parameter(memory, "o_norm"))
    starts = config.memory_forget_to == "start"
    tensors += memory.start_weights._parameters.values() if starts else [None] * config.memory_depth
    tensors += _linears(layer._modules.get("self_attn"), "q_proj", "k_proj", "v_proj", "o_proj")
    combination = layer._modules.get("combination")
    tensors.append(_parameter(layer, "pre_attention_layernorm"))
    tensors += [_parameter(combination, "attention_norm"), _parameter(combination, "memory_norm")]
    tensors.append(_parameter(layer, "pre_mlp_layernorm"))
    return tensors + _linears(layer.mlp, "gate_proj", "up_proj", "down_proj")


def _parameter(module: nn.Module | None, child: str) -> torch.Tensor | None:
    """Past `nn.Module.__getattr__`, which would take longer than all else."""
    child = None if module is None else module._modules.get(child)
    return None if child is None else child._parameters.get("weight")


def _linears(module: nn.Module | None, *children: str) -> list[torch.Tensor | None]:
    tensors, modules = [], {} if module is None else module._modules
    for child in map(modules.get, children):
        own = {} if child is None else child._parameters
        tensors += own.get("weight"), own.get("bias")
    return tensors


def _tensors(state: TitansLayerState) -> list[torch.Tensor | None]:
    """As `titans::BlockState` reads them."""
    memory, attention, segment = state.memory.memory, state.attention, state.segment
    chunk = memory.chunk
    tensors = [*memory.weights, *memory.momentum, *memory.pending]
    tensors += [*chunk.inputs, *chunk.errors, *chunk[2:], state.memory.conv_tail]
    tensors += [None] * 4 if attention is None else attention[:4]
    return tensors + ([None] * (len(memory.weights) + 1) if segment is None else [*segment[0], segment.conv_tail])


def _room_behind(states: list[TitansLayerState], sizes: Sizes) -> list[TitansLayerState]:
    """The states behind the call, without their numbers. What the call leaves as it is, is there already.

    A tensor of all blocks is one allocation: they are made and given up together, at each token.
    """
    memory, tail, attention, segment = states[0].memory.memory, states[0].memory.conv_tail, *states[0][1:]
    shape = () if attention is None else (*attention.keys.shape[:2], sizes.kept_later, sizes.head_dim)
    kept = [None] * 4 if attention is None else attention[:4]
    tails = [tail, None if segment is None else segment.conv_tail]
    columns = [
        *(_room(t, len(states), _longer(t, 1)) for t in memory.pending),
        *(_room(t, len(states), _longer(t, 2)) for t in (*memory.chunk.inputs, *memory.chunk.errors)),
        _room(memory.chunk.kept, len(states), memory.chunk.kept.shape),
        *(_room(t, len(states), _longer(t, 2)) for t in memory.chunk[3:]),
        *(_room(t, len(states), shape) for t in kept),
        *(_room(t, len(states), () if t is None else t.shape) for t in tails),
    ]
    return [_state_in(state, iter(room), sizes) for state, *room in zip(states, *columns, strict=True)]


def _longer(t: torch.Tensor, dim: int) -> list[int]:
    shape = list(t.shape)
    shape[dim] += 1
    return shape


def _room(t: torch.Tensor | None, number: int, shape: Sequence[int]) -> Sequence[torch.Tensor | None]:
    return [None] * number if t is None else t.new_empty(number, *shape).unbind()


def _state_in(state: TitansLayerState, room: Iterator[torch.Tensor | None], sizes: Sizes) -> TitansLayerState:
    """A block's state behind the call in the room that is made for it."""

    def take(number: int) -> tuple[torch.Tensor | None, ...]:
        return tuple(itertools.islice(room, number))

    memory, attention, segment = state.memory.memory, state.attention, state.segment
    weights, momentum = memory.weights, memory.momentum
    if sizes.closes:
        weights, momentum = (tuple(map(torch.empty_like, group)) for group in (weights, momentum))
    pending = PendingTokens(*take(5))
    chunk = OpenChunk(take(len(weights) - 1), take(len(weights)), *take(3))
    memory = MemoryState(weights, momentum, pending, memory.count + 1, chunk)
    *kept, tail, segment_tail = room
    if attention is not None:
        attention = AttentionState(*kept, sizes.kept_later)
    if segment is not None:
        segment = segment._replace(conv_tail=segment_tail)
    return TitansLayerState(NeuralMemoryState(memory, tail), attention, segment)


def _settled(state: TitansLayerState, plan: LayerPlan, sizes: Sizes) -> TitansLayerState:
    """Where the token has closed its chunk, nothing is pending any more; where it has closed a segment, the next one
    reads the memory as it is now."""
    if not sizes.closes:
        return state
    memory = state.memory.memory
    pending = PendingTokens(*(t[:, :0].clone() for t in memory.pending))
    memory = MemoryState(memory.weights, memory.momentum, pending, 0)
    segment = state.segment
    if segment is not None and plan.segments.pieces[0].closed:
        segment = SegmentState(memory.weights, segment.conv_tail)
    return state._replace(memory=state.memory._replace(memory=memory), segment=segment)
