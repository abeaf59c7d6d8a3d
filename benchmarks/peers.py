# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The peer's modules, set up to compute what ours compute: pip install "transformers-titans[bench]".

titans-pytorch learns as the papers say where it is told to: momentum is on, every chunk decays its weights by a gate
of its own, keys and queries are normalised, queries, keys and values go through SiLU. Its momentum and decay are one
per chunk, taken from the mean over the chunk's tokens; ours are each token's.

Its inner gradients are taken at the weights that the last *batch* of tokens left. By default there is no batch, and
all gradients of a call are taken at the start weights W_0: that is fast, and not Titans' equation 16, which takes them
at the weights of the chunk's start. `exact=True` makes a chunk the batch, as equation 16 has it. Steps of up to 1, its
default, then make the memory diverge within 1,000 tokens; steps of up to 0.001 do not, and cost the same.
"""

from typing import Any

from torch import nn


try:
    from titans_pytorch import MemoryAsContextTransformer, MemoryMLP, NeuralMemory
except ImportError as error:
    raise SystemExit(f'not timed: {error}; pip install "transformers-titans[bench]"') from error


def memory_options(heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "heads": heads,
        "dim_head": head_dim,
        "momentum": True,
        "qk_rmsnorm": True,
        "activation": nn.SiLU(),
        "default_step_transform_max_lr": 0.001,
    }


def memory_network(head_dim: int) -> MemoryMLP:
    """The default memory network of both sides: two layers, four times as wide in between."""
    return MemoryMLP(head_dim, depth=2, expansion_factor=4.0)


def memory_layer(width: int, heads: int, chunk_size: int, exact: bool) -> NeuralMemory:
    head_dim = width // heads
    return NeuralMemory(
        dim=width,
        chunk_size=chunk_size,
        batch_size=chunk_size if exact else None,
        model=memory_network(head_dim),
        **memory_options(heads, head_dim),
    )


def mac_model(width: int, heads: int, layers: int, segment: int, chunk_size: int, exact: bool):
    """A model with memory as a context in every layer, plain residual streams as ours, and 4 + 4 learned tokens."""
    head_dim = width // heads
    return MemoryAsContextTransformer(
        num_tokens=256,
        dim=width,
        depth=layers,
        segment_len=segment,
        neural_memory_segment_len=chunk_size,
        neural_memory_batch_size=chunk_size if exact else None,
        num_longterm_mem_tokens=4,
        num_persist_mem_tokens=4,
        dim_head=head_dim,
        heads=heads,
        num_residual_streams=1,
        neural_memory_model=memory_network(head_dim),
        neural_memory_kwargs=memory_options(heads, head_dim),
    )
