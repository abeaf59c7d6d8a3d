# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What one call looks like to the layers: prepared once by the model, the same for all of them."""

from dataclasses import dataclass

import torch

from .attention_layout import AttentionLayout
from .call_plan import Columns
from .configuration_titans import TitansConfig
from .layer_state import LayerCounts
from .memory_caching import CachingOptions
from .segment_plan import SegmentOptions, SegmentPlan, plan_segments
from .token_layout import TensorTable, TokenLayout


@dataclass(frozen=True)
class LayerPlan(TensorTable):
    """The layouts of one call; those that a variant does not use are None.

    Attributes:
        memory: for the memory of `lmm`, `mal` and `mag`; None also where all rows are alike, nothing was
            read and nothing is kept.
        attention: for the sliding window of `mal` and `mag`.
        position_embeddings: cos and sin, (B or 1, T, D) each, for them.
        segments: for `mac`.
    """

    memory: TokenLayout | None = None
    attention: AttentionLayout | None = None
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    segments: SegmentPlan | None = None


def plan_layers(
    config: TitansConfig,
    hidden_states: torch.Tensor,
    columns: Columns | None,
    counts: LayerCounts,
    rotary_embedding,
) -> LayerPlan:
    """Plans a call.

    Args:
        config: the model's.
        hidden_states: (B, T, hidden_size), for its shape, device and dtype.
        columns: what the columns are; None: T real tokens in each row and nothing read before.
        counts: how far the blocks have read before.
        rotary_embedding: a `TitansRotaryEmbedding`, or None in `lmm`.
    """
    shape, device = tuple(hidden_states.shape[:2]), hidden_states.device
    caching = CachingOptions.of(config)
    # What is kept grows at a segment's end, which a traced graph must know: there it has to be a matter of numbers.
    are_plain = columns is None or (caching is not None and columns.are_plain)
    mask, starts = (None, None) if are_plain else columns.exceptions()
    ragged = any(x is not None for x in (mask, starts)) or not isinstance(counts.memory, int)
    if ragged and mask is None:
        mask = columns.mask
    cos_sin = None
    if rotary_embedding is not None:
        position = torch.arange(shape[1], device=device)[None] if columns is None else columns.position
        cos_sin = rotary_embedding(hidden_states, position)
    if config.variant == "mac":
        options = SegmentOptions(
            config.segment_length,
            config.memory_chunk_size,
            config.num_persistent_tokens,
            config._attn_implementation,
            caching,
        )
        segments = plan_segments(options, shape, *counts[1:], cos_sin, mask, starts)
        return LayerPlan(segments=segments)
    memory = None
    if columns is not None or caching is not None:
        memory = TokenLayout.build(mask, starts, count=counts.memory, chunk_size=config.memory_chunk_size, shape=shape)
    if caching is not None:
        memory = caching.plan(memory, counts.kept, shape, device)
    if config.variant == "lmm":
        return LayerPlan(memory)
    kept_later = config.sliding_window - 1
    if not torch.compiler.is_compiling():
        # Only as many places as may be taken; a trace, in which lengths are compiled in, makes room for all at once.
        kept_later = min(kept_later, counts.num_kept + shape[1])
    attention = AttentionLayout.build(
        shape,
        device,
        window=config.sliding_window,
        implementation=config._attn_implementation,
        num_persistent=config.num_persistent_tokens,
        count=counts.attention,
        num_kept=counts.num_kept,
        kept_later=kept_later,
        mask=mask,
        documents=memory.documents if ragged else None,
    )
    return LayerPlan(memory, attention, cos_sin)
