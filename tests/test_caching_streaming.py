# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A memory that keeps what it was, in pieces: split calls, rows that differ, and which token may touch which."""

import pytest
import torch

from caching_testing import (
    AGGREGATIONS,
    CHUNK,
    F64,
    LENGTH,
    LONG,
    SEGMENT,
    WAYS,
    WIDTH,
    assert_equals_oracle,
    every_aggregation,
    every_way,
    feed,
    gradients_of,
    outputs,
    random_states,
    small_layer,
    weights_of,
)
from titans_testing import TOLERANCE, assert_close
from transformers_titans.memory_state import SegmentState


EXACT = TOLERANCE[F64]
SIZES = {
    "tokens": 1,
    "three": 3,
    "segment_and_one": SEGMENT + 1,
    "mixed": [3, 2, 1, 9],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@every_way
@every_aggregation
def test_any_calls_equal_one_call(aggregation, way, sizes):
    layer, hidden_states, prefix = small_layer(aggregation, way), random_states(2, LENGTH), random_states(3, seed=1)
    with torch.no_grad():
        actual = feed(layer, hidden_states, sizes, prefix=prefix)
    assert_close("outputs", actual, outputs(layer, hidden_states, prefix_states=prefix), EXACT)


@every_way
@pytest.mark.parametrize("name", ["residual", "soup_projection", "ssc_query"])
def test_every_cut_in_two(name, way):
    layer, hidden_states = small_layer(AGGREGATIONS[name], way), random_states(1, LENGTH)
    whole = outputs(layer, hidden_states)
    with torch.no_grad():
        for cut in range(1, LENGTH):
            assert_close(f"cut at {cut}", feed(layer, hidden_states, [cut, LENGTH - cut]), whole, EXACT)


@every_way
@pytest.mark.parametrize("name", ["ssc_projection", "ssc_query"])
def test_of_segments_that_are_alike_the_latest_are_read(name, way):
    """A text that repeats itself: all segments fit a token equally, but their memories differ. Which ones are read
    must not follow from how sums were rounded, hence not from the calls nor from the other rows."""
    phrase = random_states(1, SEGMENT, seed=4)
    repeated = phrase.repeat(1, LENGTH // SEGMENT + 1, 1)[:, :LENGTH]
    layer = small_layer(AGGREGATIONS[name], way, memory_conv_kernel_size=0)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :SEGMENT] = False
    calls = (None, SIZES["tokens"], SIZES["mixed"])
    assert_equals_oracle(layer, repeated, calls=calls)
    assert_equals_oracle(layer, repeated.repeat(2, 1, 1), mask=mask, calls=calls)


@every_way
@every_aggregation
def test_gradients_pass_through_states(aggregation, way):
    """What is kept carries a graph into later calls, as the rest of the state does."""
    layer = small_layer(aggregation, way)
    results = []
    for sizes in (LENGTH, [6, 1, 8]):
        hidden_states = random_states(2, LENGTH).requires_grad_()
        loss = (feed(layer, hidden_states, sizes) * weights_of(hidden_states.shape)).sum()
        results.append(gradients_of(layer, loss, hidden_states=hidden_states))
    for name, expected in results[0].items():
        assert_close(name, results[1][name], expected, EXACT)


@every_way
@every_aggregation
def test_a_state_is_left_as_it_was(aggregation, way):
    layer, hidden_states = small_layer(aggregation, way), random_states(2, LENGTH)
    with torch.no_grad():
        state = layer(hidden_states[:, :11]).state
    first = outputs(layer, hidden_states[:, 11:], state)
    outputs(layer, random_states(2, LENGTH, seed=5), state)
    assert torch.equal(outputs(layer, hidden_states[:, 11:], state), first)


# Left, right and interior pads around every end of a chunk and of a segment, and rows of next to nothing.
MASKS = torch.ones(5, 23, dtype=torch.long)
MASKS[0, :7] = MASKS[1, 15:] = 0
MASKS[2, [0, 3, 4, 5, 8, 13, 14, 22]] = 0
MASKS[3, 1:21] = 0
MASKS[4] = 0


@every_way
@every_aggregation
def test_padded_rows_equal_the_oracle_on_their_real_tokens(aggregation, way):
    layer, prefix = small_layer(aggregation, way), random_states(3, seed=1)
    # Each segmentation and each initialization in pieces, too.
    in_pieces = way in (WAYS["constant_checkpoint"], WAYS["logarithmic_independent"])
    calls = (None, 1, [6, 6, 11]) if in_pieces else (None,)
    assert_equals_oracle(layer, random_states(5, 23), mask=MASKS, prefix=prefix, calls=calls)


@every_way
@every_aggregation
def test_rows_at_different_places_go_on_together(aggregation, way):
    layer, first, later = small_layer(aggregation, way), random_states(5, 23), random_states(5, 10, seed=3)
    with torch.no_grad():
        state = layer(first, attention_mask=MASKS).state
    together = outputs(layer, later, state)
    for row, real in enumerate(MASKS.bool()):
        alone = outputs(layer, torch.cat([first[row, real], later[row]])[None])[:, real.sum() :]
        assert_close(f"row {row}", together[row : row + 1], alone, EXACT)


@every_way
@every_aggregation
def test_a_row_in_a_batch_equals_the_row_alone(aggregation, way):
    layer, hidden_states = small_layer(aggregation, way), random_states(3, LENGTH)
    together = outputs(layer, hidden_states)
    for row in range(3):
        alone = outputs(layer, hidden_states[row : row + 1])
        assert_close(f"row {row}", together[row : row + 1], alone, 1e-12)


@every_way
@every_aggregation
def test_what_stands_at_pads_does_not_matter(aggregation, way):
    layer, hidden_states, real = small_layer(aggregation, way), random_states(5, 23), MASKS.bool()
    expected = outputs(layer, hidden_states, attention_mask=MASKS)[real]
    for garbage in (random_states(5, 23, seed=9), torch.full_like(hidden_states, float("nan"))):
        filled = torch.where(real[..., None], hidden_states, garbage)
        assert torch.equal(outputs(layer, filled, attention_mask=MASKS)[real], expected)


def moved_by_each_token(layer, length: int) -> torch.Tensor:
    """(length, length) how far each token's output (second) moves when a token (first) is another one."""
    before = random_states(1, length).repeat(length, 1, 1)
    after = before.clone()
    after[torch.arange(length), torch.arange(length)] = random_states(length, seed=8)
    return (outputs(layer, after) - outputs(layer, before)).abs().amax(-1)


@every_way
@every_aggregation
def test_no_output_moves_before_the_token_that_changes(aggregation, way):
    moved = moved_by_each_token(small_layer(aggregation, way), LENGTH)
    for j in range(LENGTH):
        assert not moved[j, :j].gt(1e-13).any(), j
        assert moved[j, j] > 1e-6, j


@every_way
@pytest.mark.parametrize("name", ["residual", "average", "grm_projection", "soup_query"])
def test_every_later_token_sees_what_is_kept(name, way):
    moved = moved_by_each_token(small_layer(AGGREGATIONS[name], way), LENGTH)
    assert moved[torch.ones_like(moved).triu().bool()].min() > 1e-9


def test_independent_segments_are_forgotten_when_they_are_dropped():
    """At most two are kept: a token reaches the rest of its segment and two further ones, and nothing else."""
    layer = small_layer(
        AGGREGATIONS["grm_projection"],
        WAYS["constant_independent"],
        memory_conv_kernel_size=0,
        cache_max_segments=2,
    )
    moved = moved_by_each_token(layer, LONG)
    for j in range(LONG):
        end = (j // SEGMENT + 3) * SEGMENT
        assert moved[j, j:end].min() > 1e-9, j
        assert not moved[j, end:].gt(1e-13).any(), j


@pytest.mark.parametrize("token", [SEGMENT - 1, SEGMENT, 2 * SEGMENT - CHUNK, LENGTH - 1])
@every_way
@pytest.mark.parametrize("name", ["residual", "soup_projection", "ssc_query"])
def test_no_gradient_comes_from_later_tokens(name, way, token):
    hidden_states = random_states(1, LENGTH).requires_grad_()
    output = small_layer(AGGREGATIONS[name], way)(hidden_states).hidden_states[:, token].sum()
    (gradient,) = torch.autograd.grad(output, hidden_states)
    assert gradient[:, token].any() and not gradient[:, token + 1 :].any()


@pytest.mark.parametrize("reads", ["writing", "reading"])
@every_way
@every_aggregation
def test_a_state_of_a_lower_precision_goes_on(aggregation, way, reads):
    """What a float32 model has kept is asked by a float64 one: in its precision, whether or not a segment ends."""
    layer, hidden_states = small_layer(aggregation, way), random_states(2, LONG)
    single = small_layer(aggregation, way, dtype=torch.float32)
    begin = 3 * SEGMENT + 1
    with torch.no_grad():
        state = single(hidden_states[:, :begin].float()).state
        exact = layer(hidden_states[:, :begin]).state
        if reads == "reading":
            state, exact = (SegmentState(s.memory.weights, s.conv_tail[..., :WIDTH], s.kept) for s in (state, exact))
        for size in (1, SEGMENT + 1):
            tokens = hidden_states[:, begin : begin + size]
            result = layer(tokens, state).hidden_states
            assert result.dtype == F64
            assert_close(f"{size} tokens", result, layer(tokens, exact).hidden_states, 1e-4)
