# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""One block of each of the paper's architectures (Titans, section 4)."""

from typing import NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_titans import TitansAttention
from .configuration_titans import TitansConfig
from .layer_plan import LayerPlan
from .layer_state import AttentionState, Sealed, TitansLayerState
from .memory_layer import TitansNeuralMemory, TitansRMSNorm
from .memory_state import SegmentState
from .segment_state import enter_piece, leave_piece


class TitansLayerOutput(NamedTuple):
    """A block's result: the stream (B, T, hidden_size), the state behind it (a `TitansLayerState`), inner losses,
    attention weights."""

    hidden_states: torch.Tensor
    state: Sealed
    surprise: torch.Tensor | None
    attentions: torch.Tensor | None


class TitansMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of {tuple(ACT2FN)}, got {config.hidden_act!r}")
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class TitansPersistentTokens(nn.Module):
    """Learned tokens (N_p, hidden_size) in front of every document (Titans, eq. 19)."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_persistent_tokens, config.hidden_size))
        self.initializer_range = config.initializer_range
        self.initialise(nn.init)

    def initialise(self, init) -> None:
        """Fills the tokens through the functions of module ``init``."""
        init.normal_(self.weight, mean=0.0, std=self.initializer_range)

    def forward(self) -> torch.Tensor:
        return self.weight


class TitansCombination(nn.Module):
    """Attention gated by memory: RMSNorm(y) * act(RMSNorm(m)) (Titans, eq. 25 and 28), with learned scales."""

    def __init__(self, config: TitansConfig):
        super().__init__()
        self.attention_norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.memory_norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.act_fn = ACT2FN[config.memory_gating]

    def forward(self, normed_attention: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden_size) each, the first one already through ``attention_norm``."""
        return normed_attention * self.act_fn(self.memory_norm(memory))


class TitansDecoderLayer(GradientCheckpointingLayer):
    """One block: pre-norm, memory and attention as the variant wires them, then the MLP, added to the stream.

    The block has no mutable state: what it has read is `TitansLayerState`, an argument and a result of every call.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.variant = config.variant
        self.persistent_tokens = None
        if config.num_persistent_tokens:
            self.persistent_tokens = TitansPersistentTokens(config)
        self.input_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.memory = TitansNeuralMemory(config, layer_idx)
        if config.variant != "lmm":
            self.self_attn = TitansAttention(config, layer_idx)
        if config.variant == "mal":
            self.pre_attention_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        elif config.variant in ("mag", "mac"):
            self.combination = TitansCombination(config)
        self.pre_mlp_layernorm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TitansMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: Sealed,
        plan: Sealed,
        output_surprise: bool = False,
        output_attentions: bool = False,
        only_state: bool = False,
    ) -> TitansLayerOutput:
        """One block over the stream (B, T, hidden_size), from a state to the next.

        Args:
            hidden_states: (B, T, hidden_size).
            state: the `TitansLayerState` before the call, or None before any token.
            plan: the call's `LayerPlan`.
            output_surprise: whether to return inner losses.
            output_attentions: whether to return attention weights, which eager attention has.
            only_state: whether nothing but the state of the result will be used.
        """
        mixer = getattr(self, f"_{self.variant}")
        mixed, state, surprise, attentions = mixer(hidden_states, state.content, plan.content, output_surprise)
        if not only_state:
            hidden_states = hidden_states + mixed
            hidden_states = hidden_states + self.mlp(self.pre_mlp_layernorm(hidden_states))
        return TitansLayerOutput(hidden_states, Sealed(state), surprise, attentions if output_attentions else None)

    def _prefix(self, norm: nn.Module) -> torch.Tensor | None:
        return None if self.persistent_tokens is None else norm(self.persistent_tokens())

    def _remember(self, normed, prefix, state, plan: LayerPlan, output_surprise: bool):
        """The memory over [P; x]."""
        memory = None if state is None else state.memory
        return self.memory(normed, memory, layout=plan.memory, prefix_states=prefix, output_surprise=output_surprise)

    def _attend(self, normed, prefix, state, plan: LayerPlan):
        """Sliding-window attention over [P; x]."""
        kept = None if state is None else state.attention
        return self.self_attn(normed, plan.position_embeddings, plan.attention, kept, prefix)

    def _lmm(self, hidden_states, state, plan, output_surprise):
        """The memory alone."""
        normed, prefix = self.input_layernorm(hidden_states), self._prefix(self.input_layernorm)
        memory = self._remember(normed, prefix, state, plan, output_surprise)
        return memory.hidden_states, TitansLayerState(memory.state), memory.surprise, None

    def _mal(self, hidden_states, state, plan, output_surprise):
        """Memory as a layer: the memory, then attention (Titans, eq. 29-31)."""
        normed, prefix = self.input_layernorm(hidden_states), self._prefix(self.input_layernorm)
        memory = self._remember(normed, prefix, state, plan, output_surprise)
        remembered, norm = memory.hidden_states, self.pre_attention_layernorm
        y, weights, kept = self._attend(norm(hidden_states + remembered), self._prefix(norm), state, plan)
        return remembered + y, TitansLayerState(memory.state, kept), memory.surprise, weights

    def _mag(self, hidden_states, state, plan, output_surprise):
        """Memory as a gate: both read the same (Titans, eq. 26-28)."""
        normed, prefix = self.input_layernorm(hidden_states), self._prefix(self.input_layernorm)
        y, weights, kept = self._attend(normed, prefix, state, plan)
        memory = self._remember(normed, prefix, state, plan, output_surprise)
        mixed = self.combination(self.combination.attention_norm(y), memory.hidden_states)
        return mixed, TitansLayerState(memory.state, kept), memory.surprise, weights

    def _mac(self, hidden_states, state, plan, output_surprise):
        """Memory as a context, segment after segment (Titans, eq. 21-25)."""
        normed, prefix = self.input_layernorm(hidden_states), self._prefix(self.input_layernorm)
        start = None
        if state is None or any(piece.restart is not None for piece in plan.segments.pieces):
            start = self._start(hidden_states)
        state = start if state is None else state
        mixed, surprises = [], []
        for piece, x in zip(plan.segments.pieces, plan.segments.cut(normed), strict=True):
            state = enter_piece(state, start, piece)
            retrieved = self.memory(x, state.segment, layout=piece.memory)
            y, _, kept = self.self_attn(
                x,
                piece.position_embeddings,
                piece.attention,
                state.attention,
                prefix,
                self.input_layernorm(retrieved.hidden_states),
            )
            y = self.combination.attention_norm(y)
            memory = self.memory(y, state.memory, layout=piece.memory, output_surprise=output_surprise)
            mixed.append(self.combination(y, memory.hidden_states))
            surprises.append(memory.surprise)
            state = leave_piece(TitansLayerState(memory.state, kept, retrieved.state), piece)
        surprise = plan.segments.join(surprises) if output_surprise else None
        return plan.segments.join(mixed), state, surprise, None

    def _start(self, hidden_states: torch.Tensor) -> TitansLayerState:
        """The state before any token, for every row; in `mac` the memory does not read the persistent tokens."""
        batch_size = hidden_states.shape[0]
        memory = self.memory.start_state().expand(batch_size)
        tail = memory.conv_tail
        if tail is not None:
            tail = tail[..., : tail.shape[-1] // 3]
        attention = self.self_attn
        none = hidden_states.new_zeros(batch_size, attention.num_key_value_heads, 0, attention.head_dim)
        kept = AttentionState(none, none, none, none, 0)
        return TitansLayerState(memory, kept, SegmentState(memory.memory.weights, tail, memory.kept))
