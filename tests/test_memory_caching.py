# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A memory that keeps what it was: equal to the oracle in outputs and gradients (arXiv 2602.24281, section 3)."""

import pytest
import torch

from caching_oracle import CachingMemory
from caching_testing import (
    AGGREGATIONS,
    CHUNK,
    F64,
    LENGTH,
    LONG,
    SEGMENT,
    WAYS,
    assert_equals_oracle,
    every_aggregation,
    every_way,
    like,
    outputs,
    random_states,
    small_layer,
)
from titans_testing import MATRIX_MEMORY, TOLERANCE, assert_close


EXACT = TOLERANCE[F64]
GRM, SOUP, SSC = (AGGREGATIONS[f"{name}_projection"] for name in ("grm", "soup", "ssc"))


def test_without_caching_equals_the_oracle():
    assert_equals_oracle(small_layer(), random_states(2, LENGTH), prefix=random_states(3, seed=1))


@every_way
@every_aggregation
def test_equals_the_oracle(aggregation, way):
    layer = small_layer(aggregation, way)
    assert_equals_oracle(layer, random_states(2, LENGTH), prefix=random_states(3, seed=1))


# Inside a chunk, a segment's first and last chunk, and on both sides of the ends of one segment, of two and of four.
LENGTHS = [1, CHUNK, 3, SEGMENT, SEGMENT + 1, 2 * SEGMENT - 1, 2 * SEGMENT, 2 * SEGMENT + 1, 4 * SEGMENT, 18]


@pytest.mark.parametrize("length", LENGTHS, ids="T{}".format)
@pytest.mark.parametrize("way", ["constant_checkpoint", "logarithmic_independent"])
@pytest.mark.parametrize("aggregation", [GRM, SOUP, SSC], ids=["grm", "soup", "ssc"])
def test_equals_the_oracle_at_each_length(aggregation, way, length):
    assert_equals_oracle(small_layer(aggregation, WAYS[way]), random_states(1, length))


# (chunk, segment)
SIZES = {"segment_of_one_token": (1, 1), "chunk_of_one_token": (1, 3), "segment_of_a_chunk": (4, 4), "long": (2, 10)}


# Each aggregation meets all sizes and all ways, in turn.
IN_TURN = [
    pytest.param((GRM, SOUP, SSC)[(i + j) % 3], way, *SIZES[size], id=f"{size}-{name}")
    for i, size in enumerate(SIZES)
    for j, (name, way) in enumerate(WAYS.items())
]


@pytest.mark.parametrize(("aggregation", "way", "chunk", "segment"), IN_TURN)
def test_equals_the_oracle_for_other_sizes(aggregation, way, chunk, segment):
    layer = small_layer(aggregation, way, memory_chunk_size=chunk, cache_segment_length=segment)
    assert_equals_oracle(layer, random_states(1, 23), prefix=random_states(chunk + 1, seed=1))


OPTIONS = {
    "matrix": {"memory_depth": 1},
    "depth_3": {"memory_depth": 3},
    "no_norm": {"memory_norm": False},
    "no_residual": {"memory_residual": False},
    "bare_matrix": {"memory_depth": 1, "memory_norm": False, "memory_residual": False},
    "no_conv": {"memory_conv_kernel_size": 0},
    "no_momentum": {"memory_momentum": False},
    "no_forgetting": {"memory_forgetting": False},
    "gates_by_chunk": {"memory_gate_granularity": "chunk"},
    "forget_to_start": {"memory_forget_to": "start"},
    "other_heads": {"memory_num_heads": 3, "memory_head_dim": 5},
    "one_head": {"memory_num_heads": 1, "memory_head_dim": 8},
    "dla": {"memory_rule": "dla"},
    "linear_attention": {"memory_rule": "linear_attention"} | MATRIX_MEMORY,
    "swla": {"memory_rule": "swla"} | MATRIX_MEMORY,
}


# Each option meets every aggregation that mixes memories, both segmentations and both initializations.
MIXED = [(GRM, "logarithmic_checkpoint"), (SOUP, "constant_independent"), (SSC, "constant_checkpoint")]


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("aggregation", "way"), MIXED, ids=["grm", "soup", "ssc"])
def test_equals_the_oracle_for_each_option(aggregation, way, option):
    layer = small_layer(aggregation, WAYS[way], option)
    assert_equals_oracle(layer, random_states(1, LENGTH), prefix=random_states(3, seed=1))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6, 50], ids="k{}".format)
@every_way
def test_each_number_of_selected_memories_equals_the_oracle(way, top_k):
    assert_equals_oracle(small_layer(SSC, way, cache_top_k=top_k), random_states(1, LONG))


@pytest.mark.parametrize(
    ("initialization", "most"),
    [("checkpoint", 1), ("checkpoint", 6), ("independent", 2), ("independent", 50)],
    ids=lambda value: value if type(value) is str else f"at_most_{value}",
)
@every_aggregation
def test_the_oldest_memories_are_dropped(aggregation, initialization, most):
    layer = small_layer(aggregation, cache_initialization=initialization, cache_max_segments=most)
    assert_equals_oracle(layer, random_states(1, LONG), calls=([7, 6, 10, 4],))


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@pytest.mark.parametrize("way", ["constant_checkpoint", "logarithmic_independent"])
@every_aggregation
def test_every_backend_equals_the_oracle(aggregation, way, backend):
    layer = small_layer(aggregation, WAYS[way], memory_backend=backend)
    assert_equals_oracle(layer, random_states(1, 15), calls=([6, 9],))


@every_way
@every_aggregation
def test_float32_is_as_exact_as_its_type(aggregation, way):
    layer, exact = small_layer(aggregation, way, dtype=torch.float32), small_layer(aggregation, way)
    for parameter, narrow in zip(exact.parameters(), layer.parameters(), strict=True):
        parameter.data.copy_(narrow.data)
    hidden_states = random_states(2, LENGTH).float()
    actual, expected = outputs(layer, hidden_states), outputs(exact, hidden_states.double())
    assert actual.dtype == torch.float32
    assert_close("outputs", actual, expected, TOLERANCE[torch.float32])


@every_aggregation
def test_only_what_compares_by_a_projection_has_one(aggregation):
    layer = small_layer(aggregation)
    has = aggregation.get("connector") == "projection"
    assert ("u_proj.weight" in dict(layer.named_parameters())) == has
    if has:
        assert layer.u_proj.weight.shape == (12, 12) and layer.u_proj.bias is None


@pytest.mark.parametrize("length", [1, 3 * SEGMENT + 1], ids="T{}".format)
@every_way
@every_aggregation
def test_every_parameter_has_a_gradient(aggregation, way, length):
    """Also where nothing is kept yet: whoever reduces gradients over processes waits for each one."""
    layer = small_layer(aggregation, way)
    layer(random_states(1, length)).hidden_states.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        is_used = length > SEGMENT or name not in ("u_proj.weight", "eta_proj.weight", "eta_proj.bias")
        assert parameter.grad.any() or not is_used, name


# Identities.


@pytest.mark.parametrize("length", [1, SEGMENT - 1, SEGMENT], ids="T{}".format)
@every_way
@every_aggregation
def test_in_the_first_segment_it_is_the_memory_without_caching(aggregation, way, length):
    layer, hidden_states = small_layer(aggregation, way), random_states(2, length)
    expected = outputs(like(layer, memory_caching=None), hidden_states)
    assert_close("outputs", outputs(layer, hidden_states), expected, EXACT)


@every_aggregation
@pytest.mark.parametrize("segmentation", ["constant", "logarithmic"])
def test_checkpoints_do_not_change_what_is_written(aggregation, segmentation):
    layer, hidden_states = small_layer(aggregation, cache_segmentation=segmentation), random_states(2, LENGTH)
    plain = like(layer, memory_caching=None)(hidden_states, output_surprise=True).surprise
    assert_close("surprise", layer(hidden_states, output_surprise=True).surprise, plain, EXACT)


@every_aggregation
@pytest.mark.parametrize("segmentation", ["constant", "logarithmic"])
def test_independent_segments_are_surprised_as_if_they_came_first(aggregation, segmentation):
    """Without a convolution nothing but the memory reaches from one segment into the next."""
    layer = small_layer(
        aggregation,
        cache_segmentation=segmentation,
        cache_initialization="independent",
        memory_conv_kernel_size=0,
    )
    hidden_states, prefix = random_states(2, LENGTH), random_states(3, seed=1)
    plain = like(layer, memory_caching=None)
    expected = [
        plain(part, prefix_states=prefix, output_surprise=True).surprise for part in hidden_states.split(SEGMENT, 1)
    ]
    actual = layer(hidden_states, prefix_states=prefix, output_surprise=True).surprise
    assert_close("surprise", actual, torch.cat(expected, 1), EXACT)


class SummedMatrix(CachingMemory):
    """Reads one matrix, the sum of all memories. Memory Caching, eq. 13."""

    def _aggregate(self, q, u, kept, running):
        total = sum(member.weights[0] for member in [*kept, running])
        return torch.einsum("hi,hio->ho", q, total)


@every_way
def test_residual_caching_of_matrices_is_one_summed_matrix(way):
    layer, hidden_states = small_layer(AGGREGATIONS["residual"], way, OPTIONS["bare_matrix"]), random_states(1, LENGTH)
    oracle = SummedMatrix(dict(layer.named_parameters()), layer.config, None)
    assert_close("outputs", outputs(layer, hidden_states)[0], oracle.run(hidden_states[0]), EXACT)


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "bare"])
@pytest.mark.parametrize("connector", ["projection", "query"])
@every_way
def test_soup_of_matrices_without_norm_is_grm(way, connector, residual):
    matrix = {"memory_depth": 1, "memory_norm": False, "memory_residual": residual, "connector": connector}
    layer, hidden_states = small_layer(SOUP, way, matrix), random_states(2, LENGTH)
    other = like(layer, memory_caching="grm")
    assert_close("outputs", outputs(layer, hidden_states), outputs(other, hidden_states), EXACT)


@pytest.mark.parametrize("network", [{}, {"memory_norm": False}, {"memory_depth": 1}], ids=["deep", "no_norm", "norm"])
@every_way
def test_soup_of_other_memories_is_not_grm(way, network):
    layer, hidden_states = small_layer(SOUP, way, network), random_states(2, LENGTH)
    difference = (outputs(layer, hidden_states) - outputs(like(layer, memory_caching="grm"), hidden_states)).abs()
    # Behind the first segment's end the two memories are nearly the same one: a difference of second order.
    assert difference[:, :SEGMENT].max() <= 1e-13
    assert difference[:, SEGMENT:].amax(-1).min() > 1e-9


@pytest.mark.parametrize("connector", ["projection", "query"])
@every_way
def test_selecting_all_memories_is_grm(way, connector):
    layer, hidden_states = small_layer(SSC, way, cache_top_k=6, connector=connector), random_states(2, LONG)
    other = like(layer, memory_caching="grm")
    assert_close("outputs", outputs(layer, hidden_states), outputs(other, hidden_states), EXACT)


@every_way
def test_equal_scores_are_an_average(way):
    layer, hidden_states = small_layer(GRM, way), random_states(2, LENGTH)
    layer.u_proj.weight.data.zero_()
    other = like(layer, memory_caching="average")
    assert_close("outputs", outputs(layer, hidden_states), outputs(other, hidden_states), EXACT)


@pytest.mark.parametrize("initialization", ["checkpoint", "independent"])
@every_aggregation
def test_a_block_is_a_longer_segment(aggregation, initialization):
    """Behind 2 (4) segments logarithmic ones are one block, as constant ones of 2 (4) times the length are."""
    way, hidden_states = WAYS[f"logarithmic_{initialization}"], random_states(2, LONG)
    layer = small_layer(aggregation, way)
    actual = outputs(layer, hidden_states)
    for times in (1, 2, 4):
        begin = times * SEGMENT
        constant = like(layer, cache_segmentation="constant", cache_segment_length=begin)
        expected = outputs(constant, hidden_states)[:, begin : begin + SEGMENT]
        assert_close(f"{times} segments", actual[:, begin : begin + SEGMENT], expected, EXACT)


@pytest.mark.parametrize("initialization", ["checkpoint", "independent"])
@pytest.mark.parametrize("aggregation", [GRM, SOUP, SSC], ids=["grm", "soup", "ssc"])
def test_37_segments_are_blocks_of_32_and_4_and_1(aggregation, initialization):
    way = WAYS[f"logarithmic_{initialization}"]
    layer = small_layer(aggregation, way, memory_chunk_size=1, cache_segment_length=1)
    assert_equals_oracle(layer, random_states(1, 39))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("memory_caching", "avarage", "memory_caching must be one of .*'average'.*, got 'avarage'"),
        ("cache_initialization", "start", "cache_initialization must be one of .*, got 'start'"),
        ("cache_segmentation", "log", "cache_segmentation must be one of .*, got 'log'"),
        ("connector", "key", "connector must be one of .*, got 'key'"),
        ("cache_segment_length", CHUNK + 1, f"cache_segment_length must be a multiple of .*={CHUNK}, got {CHUNK + 1}"),
    ],
)
def test_a_loaded_model_is_not_switched_to_what_cannot_be(field, value, said):
    """Fields of caching are read at each call, and a config says nothing when they are assigned."""
    layer, hidden_states = small_layer({"memory_caching": "average"}), random_states(1, LENGTH)
    setattr(layer.config, field, value)
    with pytest.raises(ValueError, match=said):
        outputs(layer, hidden_states)
