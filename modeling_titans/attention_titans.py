# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over a sliding window, or over the open segment, with persistent tokens in front (Titans, section 4).

Persistent tokens have no position. Their scores therefore come from the query before its rotation, and keys that are
rotated and keys that are not must share one softmax. flash-attn computes both parts, merged by their log-sum-exp. The
other implementations are given queries and keys with P more dimensions: the query's scores with the P persistent
tokens there, and unit vectors as those tokens' keys.

Shapes: B rows, T tokens, H query heads, G key heads, D head dimension, K kept keys, P persistent tokens.
"""

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .attention_layout import FLASH, AttentionLayout, Blocks, interleave
from .blockwise import takes_blocks
from .configuration_titans import TitansConfig
from .layer_state import AttentionState
from .merged_flash_attention import AttentionPart, merged_flash_attention
from .short_calls import FEW
from .token_layout import round_up, take_or_zero


logger = logging.get_logger(__name__)

IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", *FLASH)


class TitansRotaryEmbedding(nn.Module):
    """Cosine and sine of each token's position times RoPE's frequencies.

    In float64 where the device has it: a window far into a text then has the phases of one at its start.
    """

    def __init__(self, config: TitansConfig):
        super().__init__()
        config.validate_attention()
        self.config = config

    def forward(self, hidden_states: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``position`` (B or 1, T) -> cos, sin (B or 1, T, D), float64 for float64 ``hidden_states``, else float32."""
        dtype = torch.float32 if position.device.type == "mps" else torch.float64
        target = torch.promote_types(hidden_states.dtype, torch.float32)
        frequencies, _ = rope_frequencies(self.config, position.device, dtype)
        angles = position.unsqueeze(-1) * torch.cat([frequencies, frequencies])
        return torch.cos(angles).to(target), torch.sin(angles).to(target)


def rope_frequencies(config: TitansConfig, device=None, dtype=torch.float64) -> tuple[torch.Tensor, float]:
    """RoPE's angles per position (D / 2,), and the factor on queries and keys that goes with them."""
    parameters = config.rope_parameters
    if parameters["rope_type"] not in ("default", "linear"):
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)
        return frequencies.to(dtype), scale
    number, theta = config.head_dim // 2, parameters["rope_theta"]
    frequencies = torch.logspace(0, 1 / number - 1, number, base=theta, device=device, dtype=dtype)
    return (frequencies / parameters["factor"] if parameters["rope_type"] == "linear" else frequencies), 1.0


def check_implementation(implementation: str) -> None:
    """Raises a ValueError for an attention function that does not know what an `AttentionLayout` says."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attn_implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def returns_weights(config: TitansConfig, output_attentions: bool | None) -> bool:
    """Whether a model has attention weights to return and is asked to; None stands for what the config says."""
    wanted = config.output_attentions if output_attentions is None else output_attentions
    if not wanted:
        return False
    if config.variant not in ("mal", "mag"):
        logger.warning_once(f"variant {config.variant!r} has no attention weights over the text to return")
        return False
    if config._attn_implementation != "eager":
        logger.warning_once(
            f"attn_implementation={config._attn_implementation!r} keeps no attention weights, so there are none to "
            "return: call model.set_attn_implementation('eager') first"
        )
        return False
    return True


def rotate(parts: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """RoPE on each x (B, heads, T, D) with cos and sin (B or 1, T, D), halves as pairs; rounded once, to x's dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if torch.is_grad_enabled() and takes_blocks(parts[0], cos):
        return [_Rotation.apply(x, cos, sin) for x in parts]
    x = torch.cat(parts, 1)
    first, second = x.chunk(2, -1)
    x = (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
    return x.split([part.shape[1] for part in parts], 1)


class _Rotation(torch.autograd.Function):
    """Both halves of an angle's sine are the same number, so the gradient is turned back by the same angle."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_bar: torch.Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(y_bar, cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x * cos
    halves = (t.chunk(2, -1) for t in (x.to(y.dtype), sin, y))
    (x_first, x_second), (sin_first, sin_second), (y_first, y_second) = halves
    y_first.addcmul_(x_second, sin_first, value=-1)
    y_second.addcmul_(x_first, sin_second)
    return y.to(x.dtype)


def repeat_kv(x: torch.Tensor, copies: int) -> torch.Tensor:
    """(B, G, S, D) -> (B, G * copies, S, D)."""
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    num_persistent: int = 0,
    query_mask: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as it is written down.

    Args:
        module: the `TitansAttention` that attends.
        query: (B, H, T, E); key: (B, G, S, E); value: (B, G, S, F).
        attention_mask: (B or 1, 1, T, S), added to the scores.
        scaling, dropout: of the scores, and of the weights in training.
        num_persistent: P, keys in front whose weights are not returned.
        query_mask: (B, T) real tokens, or None; the weights of others are zero.

    Returns:
        The output (B, T, H, F), and the weights (B, H, T, S - P) that it has been made with.
    """
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.mT * scaling + attention_mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    persistent, weights = weights.split([num_persistent, weights.shape[-1] - num_persistent], -1)
    if query_mask is not None:
        weights = torch.where(query_mask[:, None, :, None], weights, 0)
    output = torch.cat([persistent, weights], -1) @ value
    return output.transpose(1, 2).contiguous(), weights


class _Heads(NamedTuple):
    """The heads of one call; persistent and retrieved ones are None where there are none.

    Attributes:
        query, plain_query: (B, H, T, D), rotated and as projected.
        keys, values: (B, G, K + T, D) kept and new ones.
        persistent_keys, persistent_values: (G, P, D).
        retrieved_keys, retrieved_values: as ``keys``.
    """

    query: torch.Tensor
    plain_query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    persistent_keys: torch.Tensor | None
    persistent_values: torch.Tensor | None
    retrieved_keys: torch.Tensor | None
    retrieved_values: torch.Tensor | None


class TitansAttention(nn.Module):
    """Multi-head attention with grouped keys over what an `AttentionLayout` lets each token see."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = config.head_dim
        # YaRN's factor is a temperature of the whole softmax: persistent tokens, which are not rotated, have it too.
        self.scaling = self.head_dim**-0.5 * rope_frequencies(config)[1] ** 2
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        state: AttentionState | None = None,
        prefix_states: torch.Tensor | None = None,
        retrieved_states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, AttentionState]:
        """Attends.

        Args:
            hidden_states: (B, T, hidden_size).
            position_embeddings: cos and sin, (B or 1, T, D) each.
            layout: what each token sees, built for this state's count.
            state: the keys kept from earlier calls; None: none.
            prefix_states: (P, hidden_size) persistent tokens, visible to all and without a position, or None.
            retrieved_states: (B, T, hidden_size) tokens beside the call's own, visible from the same token on and at
                the same position, or None.

        Returns:
            The output (B, T, hidden_size) and, with eager attention, the weights (B, H, T, K + T) of kept and new
            tokens (then of what was retrieved for them), else None, both zero at masked tokens; and the keys to keep.

        Raises:
            ValueError: if the attention implementation is none of `IMPLEMENTATIONS`.
        """
        heads = self._project(hidden_states, position_embeddings, layout, state, prefix_states, retrieved_states)
        implementation = self.config._attn_implementation
        check_implementation(implementation)
        weights = None
        if implementation in FLASH:
            output = self._flash(heads, layout, implementation)
        else:
            output, weights = self._masked(heads, layout, implementation)
        output = self.o_proj(output.flatten(2))
        if layout.mask is not None:
            output = torch.where(layout.mask.unsqueeze(-1), output, 0)
        kept = [None if t is None else layout.keep(t) for t in (heads.keys, heads.values, *heads[-2:])]
        return output, weights, AttentionState(*kept, layout.kept_count)

    def _project(self, hidden_states, position_embeddings, layout, state, prefix_states, retrieved_states) -> _Heads:
        plain_query = self._split(self.q_proj(hidden_states))
        streams = [hidden_states] if retrieved_states is None else [hidden_states, retrieved_states]
        if prefix_states is None:
            new, persistent = self._keys_and_values(streams), (None, None)
        else:
            *new, persistent = self._keys_and_values([*streams, prefix_states.unsqueeze(0)])
            persistent = [t.squeeze(0) for t in persistent]
        query, *new_keys = rotate([plain_query, *(keys for keys, _ in new)], *position_embeddings)
        kept = (None,) * 4 if state is None else state[:4]

        def behind_kept(keys, values, kept_keys, kept_values):
            if layout.mask is not None:
                # Whatever stands at a masked token must not even be multiplied by zero.
                keys, values = (torch.where(layout.mask[:, None, :, None], t, 0) for t in (keys, values))
            if kept_keys is None or not kept_keys.shape[2]:
                return keys, values
            return torch.cat([kept_keys.to(keys.dtype), keys], 2), torch.cat([kept_values.to(keys.dtype), values], 2)

        keys, values = behind_kept(new_keys[0], new[0][1], *kept[:2])
        retrieved = (None, None) if len(new) == 1 else behind_kept(new_keys[1], new[1][1], *kept[2:])
        return _Heads(query, plain_query, keys, values, *persistent, *retrieved)

    def _keys_and_values(self, streams: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values (B, G, ., D) of each stream (B, ., hidden_size), in which B may differ."""
        shapes = [x.shape[:2] for x in streams]
        lengths = [rows * tokens for rows, tokens in shapes]
        if torch.is_grad_enabled() or sum(lengths) > FEW:
            return [(self._split(self.k_proj(x)), self._split(self.v_proj(x))) for x in streams]
        # So few that one product for all of them costs as much as one for each.
        tokens = torch.cat([x.flatten(0, 1) for x in streams]).unsqueeze(0)
        parts = [proj(tokens).squeeze(0).split(lengths) for proj in (self.k_proj, self.v_proj)]
        return [
            tuple(self._split(t.unflatten(0, shape)) for t in pair)
            for *pair, shape in zip(*parts, shapes, strict=True)
        ]

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """(..., T, heads * D) -> (..., heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def _masked(self, heads: _Heads, layout: AttentionLayout, implementation: str):
        """Through transformers' attention interface; returns the output (B, T, H, D) and weights or None."""
        query, keys, values = heads.query, heads.keys, heads.values
        if layout.blocks is not None:
            query, keys, values = _to_blocks(query, keys, values, layout.blocks)
        keys, values = [keys], [values]
        if heads.retrieved_keys is not None:
            keys = interleave(*keys, heads.retrieved_keys, layout.parts, 2)
            values = interleave(*values, heads.retrieved_values, layout.parts, 2)
        num_persistent = 0
        if heads.persistent_keys is not None:
            num_persistent = heads.persistent_keys.shape[1]
            scores = self._persistent_scores(heads)
            if layout.blocks is not None:
                scores = _queries_to_blocks(scores, layout.blocks)
            query, keys, values = _prepend(query, keys, values, scores, heads.persistent_values)
        else:
            keys, values = (torch.cat(parts, 2) if len(parts) > 1 else parts[0] for parts in (keys, values))
        attention = functools.partial(
            ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward),
            self,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            num_persistent=num_persistent,
            query_mask=layout.mask,
        )
        if len(layout.parts) == 1:
            output, weights = attention(query, keys, values, layout.attention_mask)
        else:
            output, weights = _by_part(attention, query, keys, values, layout, num_persistent), None
        output = output[..., : self.head_dim]
        if layout.blocks is not None:
            output = _from_blocks(output, layout.blocks, (heads.query.shape[0], heads.query.shape[2]))
        return output, weights if implementation == "eager" else None

    def _persistent_scores(self, heads: _Heads) -> torch.Tensor:
        """(B, H, T, P) products of unrotated queries and persistent keys."""
        return heads.plain_query @ repeat_kv(heads.persistent_keys[None], self.num_key_value_groups).mT

    def _flash(self, heads: _Heads, layout: AttentionLayout, implementation: str) -> torch.Tensor:
        """Windowed, retrieved and persistent keys one after another, merged; returns (B, T, H, D)."""
        table = layout.sequences

        def flat(x, index):
            x = x.transpose(1, 2).flatten(0, 1)
            return x if index is None else x[index]

        query, plain_query = flat(heads.query, table.queries), flat(heads.plain_query, table.queries)
        lengths = (table.cu_queries, table.cu_keys, table.max_queries, table.max_keys)
        groups = [(heads.keys, heads.values)]
        if heads.retrieved_keys is not None:
            groups.append((heads.retrieved_keys, heads.retrieved_values))
        parts = [
            AttentionPart(query, flat(k, table.keys), flat(v, table.keys), *lengths, True, layout.window)
            for k, v in groups
        ]
        if heads.persistent_keys is not None:
            keys, values = (x.transpose(0, 1) for x in (heads.persistent_keys, heads.persistent_values))
            number = keys.shape[0]
            borders = torch.tensor([0, number], dtype=torch.int32, device=keys.device)
            lengths = (table.total, borders, query.shape[0], number)
            parts.append(AttentionPart(plain_query, keys, values, *lengths, False, None))
        dropout = self.attention_dropout if self.training else 0.0
        output = merged_flash_attention(parts, self.scaling, implementation, dropout)
        shape = heads.query.transpose(1, 2).shape
        if table.queries is not None:
            whole = output.new_zeros(shape[0] * shape[1], *output.shape[1:])
            output = whole.index_copy(0, table.queries, output)
        return output.view(shape)


def _by_part(attention, query, keys, values, layout: AttentionLayout, num_persistent: int) -> torch.Tensor:
    """A segment's attention (B, T, H, D), in which the queries of each part are given the keys up to its end."""
    lengths = [layout.parts[0] - layout.num_kept, *layout.parts[1:]]
    numbers = [num_persistent + 2 * end for end in itertools.accumulate(layout.parts)]
    prefixes = (_Prefixes.apply(t, numbers) for t in (keys, values))
    parts = zip(query.split(lengths, 2), *prefixes, layout.attention_mask.split(lengths, 2), strict=True)
    return torch.cat([attention(q, k, v, mask[..., : k.shape[2]])[0] for q, k, v, mask in parts], 1)


class _Prefixes(torch.autograd.Function):
    """The first ``numbers[i]`` keys of x (B, G, S, D) for each i; the last number is S.

    A slice's own gradient would be as long as x, whose gradient would be the sum of all of them.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, numbers: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(x[:, :, :number] for number in numbers)

    @staticmethod
    def backward(ctx, *bars: torch.Tensor):
        x_bar = bars[-1].clone()
        for bar in bars[:-1]:
            x_bar[:, :, : bar.shape[2]] += bar
        return x_bar, None


def _prepend(query, keys: list, values: list, scores, persistent_values):
    """Puts P persistent tokens in front of keys and values, which are given in parts (B, G, ., D): their scores
    (B, H, T, P) enter through P more dimensions.

    All dimensions are filled up with zeros to one multiple of 8, which fused kernels ask for.
    """
    number, head_dim = scores.shape[-1], query.shape[-1]
    more = round_up(head_dim + number, 8) - head_dim
    batch_size, num_heads = keys[0].shape[:2]
    # Rows may stand among the heads: see `_to_blocks`.
    persistent_values = persistent_values.repeat(num_heads // persistent_values.shape[0], 1, 1)
    values = torch.cat([persistent_values.expand(batch_size, -1, -1, -1), *values], 2)
    keys = torch.cat([torch.zeros_like(values[:, :, :number], dtype=keys[0].dtype), *keys], 2)
    zero = keys.new_zeros(()).expand(batch_size, num_heads, keys.shape[2], more)
    unit = torch.eye(number, more, dtype=keys.dtype, device=keys.device)
    unit = F.pad(unit, (0, 0, 0, keys.shape[2] - number)).expand(batch_size, num_heads, -1, -1)
    keys, values = torch.cat([keys, unit], -1), torch.cat([values, zero], -1)
    zero = query.new_zeros(()).expand(*query.shape[:-1], more - number)
    return torch.cat([query, scores, zero], -1), keys, values


def _to_blocks(query, keys, values, blocks: Blocks):
    """(B, heads, T, D) queries and (B, heads, K + T, D) keys in blocks of W queries and 2 W keys.

    Rows that differ become (B * N, heads, ., D). Rows that are alike share their masks, so they become further heads:
    (N, B * heads, ., D).
    """
    num_kept = keys.shape[2] - query.shape[2]

    def windows(x):
        kept = F.pad(x[:, :, :num_kept], (0, 0, blocks.size - num_kept, 0))
        x = torch.cat([kept, _in_order(x[:, :, num_kept:], blocks)], 2)
        return _blocks_first(x.unfold(2, 2 * blocks.size, blocks.size).transpose(3, 4), blocks)

    return _queries_to_blocks(query, blocks), windows(keys), windows(values)


def _queries_to_blocks(query: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return _blocks_first(_in_order(query, blocks).unflatten(2, (blocks.number, blocks.size)), blocks)


def _blocks_first(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """(B, heads, N, ., D) -> (B * N, heads, ., D), or (N, B * heads, ., D) for rows that are alike."""
    if blocks.source is None:
        return x.movedim(2, 0).flatten(1, 2)
    return x.transpose(1, 2).flatten(0, 1)


def _in_order(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """(B, heads, T, D) -> (B, heads, N * W, D): real tokens first, zeros behind them."""
    if blocks.source is None:
        return F.pad(x, (0, 0, 0, blocks.number * blocks.size - x.shape[2]))
    return take_or_zero([x.transpose(1, 2)], blocks.source).transpose(1, 2)


def _from_blocks(output: torch.Tensor, blocks: Blocks, shape: tuple[int, int]) -> torch.Tensor:
    """What attention makes of the blocks' queries, heads behind tokens, -> (B, T, H, D); ``shape`` is (B, T)."""
    if blocks.source is None:
        output = output.unflatten(2, (shape[0], -1)).movedim(2, 0).flatten(1, 2)
        return output[:, : shape[1]]
    output = output.unflatten(0, (-1, blocks.number)).flatten(1, 2)
    return take_or_zero([output], blocks.place)
