# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding through torch.compile: ``generate(..., compile_config=CompileConfig())``.

What is compiled is the blocks' reading of one token that closes no chunk, hence no segment: of a text, all tokens but
one or two in a chunk. The call is planned before, in eager mode, so that the graph is that of the plain case, in which
only lengths differ from token to token. Every other call is read in eager mode, as without compilation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.generation.configuration_utils import CompileConfig

from .layer_plan import LayerPlan
from .layer_state import Sealed


def read_blocks(
    layers: nn.ModuleList, hidden_states: torch.Tensor, states: Sequence[Sealed], plan: Sealed, *options: bool
) -> tuple[list[torch.Tensor], list[tuple]]:
    """All blocks over (B, T, hidden_size): each one's input, the last one's output behind them, and their outputs.

    Args:
        layers: `TitansDecoderLayer`s.
        states: the `TitansLayerState` of each.
        plan: the call's `LayerPlan`.
        options: ``output_surprise`` and ``output_attentions``.
    """
    streams, outputs = [hidden_states], []
    for layer, state in zip(layers, states, strict=True):
        output = layer(streams[-1], state, plan, *options)
        streams.append(output[0])
        outputs.append(output)
    return streams, outputs


class BlocksReader(NamedTuple):
    """Another form of `read_blocks`, for calls that it fits.

    Attributes:
        fits: of hidden_states (B, T, hidden_size), the call's plan and the first block's state, whether it may read.
        read: in place of `read_blocks`.
    """

    fits: Callable[[torch.Tensor, LayerPlan, Sealed], bool]
    read: Callable


def compiled_reader(config: CompileConfig, device: torch.device) -> BlocksReader:
    """`read_blocks` compiled as ``config`` says, for models on ``device``.

    Its ``mode`` "reduce-overhead", the default, stands for none: CUDA graphs write a call's results over the last
    one's, and states are both. Without ``options``, products with a single row are no calls of a library on a CPU.
    """
    options = config.to_dict()
    if options["mode"] == "reduce-overhead":
        options["mode"] = None
    on_cpu = device.type == "cpu" and options["backend"] == "inductor"
    if on_cpu and options["options"] is None and options["mode"] is None:
        options["options"] = {"post_grad_custom_pre_pass": _vector_products_pass()}
    compiled = torch.compile(read_blocks, **options)

    def read(layers: nn.ModuleList, hidden_states: torch.Tensor, states: Sequence[Sealed], *rest):
        # Where C++ has put a state would be a part of the graph.
        return compiled(layers, hidden_states, [Sealed(state.content) for state in states], *rest)

    return BlocksReader(stays_open, read)


def stays_open(hidden_states: torch.Tensor, plan: LayerPlan, state: Sealed) -> bool:
    """Whether a call is one that the compiled form is for: a token in each row behind others of its open chunk."""
    if hidden_states.shape[1] != 1 or state.content is None or state.content.memory.memory.chunk is None:
        return False
    layout = plan.memory
    if plan.segments is not None:
        (piece,) = plan.segments.pieces
        layout = piece.memory
        if piece.restart is not None or piece.closed is not False:
            return False
    if layout.slots is not None:
        return layout.slots.stays_open
    # Compilers take lengths of 0 and 1 for cases of their own.
    return 2 <= layout.count < layout.chunk_size - 1


@functools.cache
def _vector_products_pass():
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class VectorProducts(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            replace_vector_products(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return VectorProducts()


def replace_vector_products(graph: torch.fx.Graph) -> None:
    """Writes products of a single row (1, K) with a matrix (K, N), to which a bias may be added, as sums over K, in
    place.

    Of 384 x 1,280 float32 weights, as a linear layer holds them, a core of an EPYC then reads 18 GB/s; of what the
    library's matrix product reads, 8.
    """
    aten = torch.ops.aten
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, row, matrix = node.args
            if row.meta["val"].shape[0] != 1 or node.kwargs:
                continue
            with graph.inserting_before(node):
                result = _sum_of_products(graph, row, matrix)
                if bias:
                    result = _call(graph, aten.add.Tensor, result, *bias)
            node.replace_all_uses_with(result)
            graph.erase_node(node)


def _sum_of_products(graph: torch.fx.Graph, row: torch.fx.Node, matrix: torch.fx.Node) -> torch.fx.Node:
    aten = torch.ops.aten
    if _is_computed(row):
        # Where strides are asked for, the row is written down first, not computed again for each column.
        row = _call(graph, aten.as_strided.default, row, list(row.meta["val"].shape), [row.meta["val"].shape[1], 1])
    product = _call(graph, aten.mul.Tensor, row, _call(graph, aten.permute.default, matrix, [1, 0]))
    return _call(graph, aten.unsqueeze.default, _call(graph, aten.sum.dim_IntList, product, [1]), 0)


def _is_computed(node: torch.fx.Node) -> bool:
    """Whether a tensor is a whole result of an element by element computation, maybe under another shape."""
    aten = torch.ops.aten
    while node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default):
        node = node.args[0]
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and node.meta["val"].is_contiguous()


def _call(graph: torch.fx.Graph, target: Callable, *args) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args))
    return node
