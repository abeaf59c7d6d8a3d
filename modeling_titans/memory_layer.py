# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The neural long-term memory as a layer: projections, convolution and gates around the op (Titans, section 4.4)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .blockwise import EPS, rms_norm, silu_and_unit, takes_blocks
from .configuration_titans import TitansConfig
from .inner_network import InnerNetwork
from .kept_memories import KeptMemories
from .kept_plan import KeptCounts
from .memory_caching import CachingOptions, read_segment, read_with_caching
from .memory_ops import neural_memory
from .memory_read import read_memory
from .memory_state import MemoryState, NeuralMemoryState, SegmentState, number_of_rows
from .scan_inputs import RULES
from .short_calls import TitansConvolution
from .state_pair import Products, product_dtype
from .token_layout import TokenLayout, convolution_inputs


# Where the gates start, as logits: forgetting of 0.001 memory_max_forget, half of the past surprise kept. Larger
# steps and other start weights make the untrained memory chaotic over thousands of tokens (measured in MEMORY.md).
ALPHA_START, ETA_START = -7.0, 0.0


def theta_start(depth: int) -> float:
    """The step size's start as a logit: 0.12 memory_max_lr at depth 1 and 2, less the deeper the memory is."""
    return -2.0 - 1.5 * max(depth - 2, 0)


def gates_of(config: TitansConfig) -> set[str]:
    """The gates that the memory's rule has and the config leaves it; of the others theta is 1, alpha and eta are 0."""
    gates = {"linear_attention": set(), "dla": {"theta"}}.get(config.memory_rule, {"theta", "alpha", "eta"})
    off = {"alpha": not config.memory_forgetting, "eta": not config.memory_momentum}
    return {name for name in gates if not off.get(name)}


def start_weight_std(layer: int, width: int) -> float:
    """Standard deviation of the start weights of a layer with inputs of this width.

    Keys have length 1, so a first layer of standard deviation 1 gives pre-activations of size 1; after it, gelu
    leaves about 0.65 of a standard deviation. Smaller weights would make LN divide by next to nothing, and the inner
    gradient, which contains that quotient, overshoot.
    """
    return 1.0 if layer == 0 else 1.5 * width**-0.5


class TitansRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, in float32, with a learned scale."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        if hidden_states.dtype == self.weight.dtype and hidden_states.dtype in (torch.float32, torch.float64):
            return rms_norm(hidden_states, self.weight, eps)
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        return self.weight * F.rms_norm(x, self.weight.shape, None, eps).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class TitansGate(nn.Module):
    """A gate's logits (B, T, H), which start near ``start`` whatever the token.

    transformers initialises each module by itself, also when a checkpoint lacks a single tensor of it. So whatever has
    a start value of its own is a module of its own. It is no `nn.Linear`: those are what quantizers take, and a gate
    is small and must be exact.
    """

    def __init__(self, config: TitansConfig, start: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.memory_num_heads, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.memory_num_heads))
        self.start, self.initializer_range = start, config.initializer_range
        self.initialise(nn.init)

    def initialise(self, init) -> None:
        """Fills the parameters through the functions of module ``init``."""
        init.normal_(self.weight, mean=0.0, std=self.initializer_range)
        init.constant_(self.bias, self.start)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, start={self.start}"


class TitansStartWeights(nn.Module):
    """The memory's weights before any token, W_0: parameters "0", "1", ... (H, D_in, D_out), one per layer.

    ``empty``: they start at zero, as a memory that is nothing but a sum of pairs does; they are learned all the same.
    """

    def __init__(self, num_heads: int, widths: list[int], empty: bool = False):
        super().__init__()
        self.empty = empty
        for layer, shape in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            self.register_parameter(str(layer), nn.Parameter(torch.empty(num_heads, *shape)))
        self.initialise(nn.init)

    def initialise(self, init) -> None:
        """Fills the weights through the functions of module ``init``."""
        for layer, w in enumerate(self()):
            if self.empty:
                init.zeros_(w)
            else:
                init.normal_(w, mean=0.0, std=start_weight_std(layer, w.shape[1]))

    def forward(self) -> tuple[torch.Tensor, ...]:
        # Called, not reached into: offloaded or sharded weights are there in their own module's forward only.
        return tuple(self.parameters(recurse=False))


class NeuralMemoryOutput(NamedTuple):
    """What the memory adds to the stream (B, T, hidden_size), the state after the call, inner losses (B, T, H)."""

    hidden_states: torch.Tensor
    state: NeuralMemoryState | SegmentState
    surprise: torch.Tensor | None


class TitansNeuralMemory(nn.Module):
    """A memory that learns while it reads: each token is written into a small network, which is then read.

    The layer has no mutable state of its own: what it has learned from a sequence is `NeuralMemoryState`, an argument
    and a result of every call. It can be used alone, on any embeddings.

    Args:
        config: a `TitansConfig`; the `memory_*` fields and `hidden_size` matter.
        layer_idx: which layer of a model this is.
    """

    def __init__(self, config: TitansConfig, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        num_heads, head_dim, width = config.memory_num_heads, config.memory_head_dim, config.hidden_size
        inner_width = num_heads * head_dim
        self.q_proj = nn.Linear(width, inner_width, bias=False)
        self.k_proj = nn.Linear(width, inner_width, bias=False)
        self.v_proj = nn.Linear(width, inner_width, bias=False)
        kernel_size = config.memory_conv_kernel_size
        channels = 3 * inner_width
        self.conv1d = None
        if kernel_size:
            self.conv1d = TitansConvolution(channels, channels, kernel_size, groups=channels, bias=False)
        gates, step = gates_of(config), theta_start(config.memory_depth)
        # In "swla" eta is a step size too, of the pair before: both begin alike.
        past = step if config.memory_rule == "swla" else ETA_START
        self.theta_proj = TitansGate(config, step) if "theta" in gates else None
        self.alpha_proj = TitansGate(config, ALPHA_START) if "alpha" in gates else None
        self.eta_proj = TitansGate(config, past) if "eta" in gates else None
        hidden = [config.memory_expansion * head_dim] * (config.memory_depth - 1)
        self.start_weights = TitansStartWeights(
            num_heads, [head_dim, *hidden, head_dim], RULES[config.memory_rule].linear
        )
        has_norm = config.memory_norm
        self.memory_norm_weight = nn.Parameter(torch.ones(num_heads, head_dim)) if has_norm else None
        self.memory_norm_bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if has_norm else None
        caching, self.u_proj = self.caching, None
        if caching is not None and caching.is_gated and config.connector == "projection":
            self.u_proj = nn.Linear(width, inner_width, bias=False)
        self.o_norm = TitansRMSNorm(head_dim, config.rms_norm_eps)
        self.o_gate_proj = nn.Linear(width, inner_width, bias=False)
        self.o_proj = nn.Linear(inner_width, width, bias=False)
        self.initialise(nn.init)

    def initialise(self, init) -> None:
        """Fills the layer's own parameters through the functions of module ``init``."""
        if self.memory_norm_weight is not None:
            # LN's result then has length 1, as keys have: with a scale of 1 no memory could come near any value.
            init.constant_(self.memory_norm_weight, self.config.memory_head_dim**-0.5)
            init.zeros_(self.memory_norm_bias)

    @property
    def caching(self) -> CachingOptions | None:
        """Read from the config at each call, so that a model trained without caching can be switched to `average`."""
        return CachingOptions.of(self.config)

    def start_state(self, prefix_states: torch.Tensor | None = None) -> NeuralMemoryState:
        """The state of one row before its first token.

        Args:
            prefix_states: (N_p, hidden_size) persistent tokens that the memory reads first. The last chunk they fill
                is closed, so that the text behind them begins on a chunk.

        Returns:
            A state with batch size 1, differentiable in the start weights and the prefix.
        """
        weights = self.start_weights()
        tail = None
        if self.conv1d is not None:
            channels = 3 * self.config.memory_num_heads * self.config.memory_head_dim
            tail = weights[0].new_zeros(1, self.config.memory_conv_kernel_size - 1, channels)
        memory = MemoryState.initial(weights, 1)
        kept = None if self.caching is None else KeptMemories.initial(memory.weights, self.caching.is_gated)
        state = NeuralMemoryState(memory, tail, kept)
        if prefix_states is None:
            return state
        chunk_size = self.config.memory_chunk_size
        whole = prefix_states.shape[0] // chunk_size * chunk_size
        for part, size in (
            (prefix_states[:whole], chunk_size),
            (prefix_states[whole:], prefix_states.shape[0] - whole),
        ):
            if part.shape[0]:
                layout = TokenLayout.build(count=0, chunk_size=size)
                state = self._write_and_read(part.unsqueeze(0), state, layout, None, False)[1]
        return state

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: NeuralMemoryState | SegmentState | None = None,
        attention_mask: torch.Tensor | None = None,
        layout: TokenLayout | None = None,
        prefix_states: torch.Tensor | None = None,
        output_surprise: bool = False,
    ) -> NeuralMemoryOutput:
        """Writes and reads T tokens; with a `SegmentState` reads them only, at that state's weights (Titans, eq. 21).

        Args:
            hidden_states: (B, T, hidden_size).
            state: the memory before the call, for B rows; None: every row starts from `start_state(prefix_states)`.
            attention_mask: (B, T), nonzero where a token is real; a masked token changes nothing. None: all are.
            layout: the same and more, prepared once for all layers; then ``attention_mask`` must be None.
            prefix_states: (N_p, hidden_size) persistent tokens, which the memory reads before each document, or None.
            output_surprise: whether to return each token's inner loss at the weights of its chunk's start.

        Returns:
            hidden_states (B, T, hidden_size), zero at masked tokens before the output projection; the state after the
            call; surprise (B, T, H) in at least float32, or None.

        Raises:
            ValueError: if a shape, the state or the layout does not fit.
        """
        self._check(hidden_states, state, attention_mask, layout)
        if hasattr(state, "segment_weights"):
            if prefix_states is not None or output_surprise:
                raise ValueError("prefix_states and output_surprise belong to writing; a SegmentState is read only")
            layout = self._layout(hidden_states, attention_mask, 0) if layout is None else layout
            return self._read(hidden_states, state, layout)
        if layout is None:
            layout = self._layout(hidden_states, attention_mask, 0 if state is None else state.memory.count)
        if self.caching is not None:
            layout = self._plan_kept(layout, hidden_states, state)
        # What begins anew at a segment's end need not be read in this call; what does so at a document's start is.
        begins_document = layout.document_starts is not None
        restarts = begins_document or _begins_anew(layout)
        # A trace knows no grad_fn; to attach where it is not needed changes no number.
        is_foreign = state is not None and (torch.compiler.is_compiling() or state.memory.weights[0].grad_fn is None)
        attaches = is_foreign and not begins_document and self.training and torch.is_grad_enabled()
        start_state = self.start_state(prefix_states) if state is None or restarts or attaches else None
        if state is None:
            state = start_state.expand(hidden_states.shape[0])
        elif attaches:
            state = _attach(start_state, state)
        y, state, surprise = self._write_and_read(hidden_states, state, layout, start_state, output_surprise)
        return NeuralMemoryOutput(self._output(y, hidden_states), state, surprise)

    def _layout(self, hidden_states, attention_mask, count: int | torch.Tensor) -> TokenLayout:
        shape = tuple(hidden_states.shape[:2])
        return TokenLayout.build(attention_mask, count=count, chunk_size=self.config.memory_chunk_size, shape=shape)

    def _plan_kept(self, layout: TokenLayout, hidden_states, state: NeuralMemoryState | None) -> TokenLayout:
        counts = KeptCounts(0, 0, 0) if state is None else state.kept.counts
        if layout.kept is None:
            return self.caching.plan(layout, counts, tuple(hidden_states.shape[:2]), hidden_states.device)
        if layout.kept.places != counts.places:
            raise ValueError(
                f"layout was planned for {layout.kept.places} kept memories in a row, state has {counts.places}"
            )
        return layout

    def _output(self, y: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """M's answers (B, T, H, D) -> (B, T, hidden_size)."""
        gate = F.silu(self.o_gate_proj(hidden_states)).unflatten(-1, y.shape[2:])
        return self.o_proj((self.o_norm(y) * gate).flatten(2))

    def _read(self, hidden_states, state: SegmentState, layout: TokenLayout) -> NeuralMemoryOutput:
        x, tail = self.q_proj(hidden_states), state.conv_tail
        if self.conv1d is not None:
            number, tail = x.shape[-1], tail.to(x.dtype)
            if not isinstance(self.conv1d, TitansConvolution):
                # An adapter in its place takes all channels. It is depthwise: those of keys and values may be empty.
                x, tail = (F.pad(t, (0, 2 * number)) for t in (x, tail))
            x, tail = self._convolve(x, tail, None, layout)
            x, tail = x[..., :number], tail[..., :number]
        (q,) = self._activate(x)
        if self.caching is not None:
            network = self._network(q, torch.promote_types(q.dtype, state.segment_weights[0].dtype))
            exact, u = self._exact(q, hidden_states, network, None)
            with torch.autocast(q.device.type, enabled=False):
                y = read_segment(self.caching, exact, u, state.segment_weights, state.kept, network)
            y = y.to(q.dtype)
            return NeuralMemoryOutput(self._output(y, hidden_states), state._replace(conv_tail=tail), None)
        y = read_memory(
            q,
            state.segment_weights,
            norm_weight=self.memory_norm_weight,
            norm_bias=self.memory_norm_bias,
            residual=self.config.memory_residual,
        )
        return NeuralMemoryOutput(self._output(y, hidden_states), state._replace(conv_tail=tail), None)

    def _write_and_read(self, hidden_states, state, layout, start_state, output_surprise):
        """Returns M's answers (B, T, H, D), the new state and the inner losses."""
        q, k, v, tail = self._project(hidden_states, state, layout, start_state)
        gates, config = self._gates(hidden_states), self.config
        forget_to = self.start_weights() if config.memory_forget_to == "start" else None

        def write(memory: MemoryState, segments=None, **options):
            return neural_memory(
                q,
                k,
                v,
                *gates,
                memory,
                chunk_size=layout.chunk_size,
                norm_weight=self.memory_norm_weight,
                norm_bias=self.memory_norm_bias,
                residual=config.memory_residual,
                forget_to_weights=forget_to,
                rule=config.memory_rule,
                gate_granularity=config.memory_gate_granularity,
                layout=layout,
                start_state=None if start_state is None else start_state.memory,
                output_surprise=output_surprise,
                backend=config.memory_backend,
                segments=segments,
                **options,
            )

        kept = state.kept
        if layout.kept is None:
            result = write(state.memory)
        else:
            network = self._network(q, torch.promote_types(q.dtype, state.memory.weights[0].dtype))
            exact, u = self._exact(q, hidden_states, network, layout.mask)
            # As in the op: products with a state in float32 are not to be taken in a lower precision.
            with torch.autocast(q.device.type, enabled=False):
                result, kept = read_with_caching(
                    self.caching, write, exact, u, state.memory, kept, layout.kept, network
                )
        return result.output.to(q.dtype), NeuralMemoryState(result.state, tail, kept), result.surprise

    def _network(self, q: torch.Tensor, dtype: torch.dtype) -> InnerNetwork:
        """M of H heads, for reading kept memories in ``dtype``."""
        norm = [
            None if t is None else t.to(dtype).unsqueeze(1) for t in (self.memory_norm_weight, self.memory_norm_bias)
        ]
        return InnerNetwork(self.config.memory_residual, *norm, 1e-6, Products(product_dtype(q, dtype), dtype))

    def _exact(self, q: torch.Tensor, hidden_states: torch.Tensor, network: InnerNetwork, mask):
        """Queries (B, T, H, D) and connectors u (Memory Caching, eq. 10) in the state's dtype, zero at masked tokens;
        u is None where reads are not gated."""
        dtype = torch.promote_types(q.dtype, network.products.result)
        u = None
        if self.caching.is_gated:
            u = q
            if self.config.connector == "projection":
                if self.u_proj is None:
                    raise ValueError(
                        f"memory_caching={self.config.memory_caching!r} with connector='projection' needs u_proj, and "
                        "this layer was built without: load the model with these fields, or use connector='query'"
                    )
                u = self.u_proj(hidden_states).unflatten(-1, q.shape[2:])
        if mask is not None:
            q, u = (t if t is None else torch.where(mask[:, :, None, None], t, 0) for t in (q, u))
        return q.to(dtype), None if u is None else u.to(dtype)

    def _project(self, hidden_states, state, layout, start_state):
        """Queries, keys and values (B, T, H, D), the first two of length 1, and the convolution's new tail."""
        x = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], -1)
        tail = state.conv_tail
        if self.conv1d is not None:
            start_tail = None if start_state is None else start_state.conv_tail.to(x.dtype)
            x, tail = self._convolve(x, tail.to(x.dtype), start_tail, layout)
        return *self._activate(x), tail

    def _activate(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """silu(x) of x (B, T, parts * H * D), a tensor (B, T, H, D) for each part: queries or queries and keys, both
        brought to length 1, and values."""
        x = x.unflatten(-1, (-1, self.config.memory_num_heads, self.config.memory_head_dim))
        if takes_blocks(x):
            return silu_and_unit(x).unbind(2)
        x = F.silu(x)
        return *_unit(x[:, :, :2]).unbind(2), *x[:, :, 2:].unbind(2)

    def _convolve(self, x, tail, start_tail, layout) -> tuple[torch.Tensor, torch.Tensor]:
        """x (B, T, 3 H D) behind its tail -> the convolution's result, and the tail behind x."""
        inputs, place, tail = convolution_inputs(x, tail, start_tail, layout)
        x = self.conv1d(inputs.mT).mT
        if place is not None:
            x = torch.gather(x, 1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return x, tail

    def _gates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """theta, alpha, eta (B, T, H), in float32 at least: a small forgetting must not round to none."""
        config = self.config
        if self.theta_proj is None:
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            theta = hidden_states.new_ones(*hidden_states.shape[:2], config.memory_num_heads, dtype=dtype)
        else:
            theta = config.memory_max_lr * _sigmoid(self.theta_proj(hidden_states))
        alpha = eta = torch.zeros_like(theta)
        if self.alpha_proj is not None:
            alpha = config.memory_max_forget * _sigmoid(self.alpha_proj(hidden_states))
        if self.eta_proj is not None:
            eta = _sigmoid(self.eta_proj(hidden_states))
            eta = config.memory_max_lr * eta if config.memory_rule == "swla" else eta
        return theta, alpha, eta

    def _check(self, hidden_states, state, attention_mask, layout) -> None:
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.config.hidden_size or 0 in hidden_states.shape:
            raise ValueError(
                f"hidden_states must be (B, T, hidden_size={self.config.hidden_size}) with at least one token, "
                f"got {tuple(hidden_states.shape)}"
            )
        # Both kinds have a tail, which a block's state, or the op's, has not.
        if state is not None and not hasattr(state, "conv_tail"):
            raise ValueError(f"state must be a NeuralMemoryState or SegmentState, got {type(state).__name__}")
        if state is not None and number_of_rows(state) != hidden_states.shape[0]:
            raise ValueError(f"state is of {number_of_rows(state)} rows, hidden_states of {hidden_states.shape[0]}")
        if state is not None and (state.kept is None) != (self.caching is None):
            raise ValueError(
                f"state was made {'without' if state.kept is None else 'with'} memory caching, but this layer's "
                f"memory_caching is {self.config.memory_caching!r}"
            )
        if attention_mask is not None and layout is not None:
            raise ValueError("attention_mask and layout cannot both be given: the layout contains the mask")
        if attention_mask is not None and attention_mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"attention_mask must be (B, T) = {tuple(hidden_states.shape[:2])}, got {tuple(attention_mask.shape)}"
            )


def _begins_anew(layout: TokenLayout) -> bool:
    """Whether segments end in a call that begin at the start state."""
    return layout.kept is not None and layout.kept.ends.restarts and len(layout.kept.ends.chunks) > 0


def _attach(start_state: NeuralMemoryState, state: NeuralMemoryState) -> NeuralMemoryState:
    """``state``, on which the start state's parameters have a gradient of zero.

    A step in which every row goes on from a memory it was given uses none of them, but whoever reduces gradients over
    processes waits for each parameter's.
    """
    memory = state.memory
    never = torch.zeros((), dtype=torch.bool, device=memory.weights[0].device)

    def attach(group, starts):
        return tuple(torch.where(never, start, tensor) for start, tensor in zip(starts, group, strict=True))

    weights = attach(memory.weights, start_state.memory.weights)
    momentum = attach(memory.momentum, start_state.memory.momentum)
    return state._replace(memory=memory._replace(weights=weights, momentum=momentum))


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x with length 1 in its last dimension."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact / torch.linalg.vector_norm(exact, dim=-1, keepdim=True).clamp_min(EPS)).to(x.dtype)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))


__all__ = ["NeuralMemoryOutput", "TitansNeuralMemory"]
