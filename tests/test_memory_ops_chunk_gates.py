# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Gates shared inside a chunk (Titans, section 3.2): the op against the oracle, and models that stream and pad."""

import pytest
import torch

from test_memory_ops import DOCUMENTS, MASKS, assert_equals_oracle, assert_same, bits, both_backends
from titans_testing import (
    GATES,
    RULES,
    TOLERANCE,
    assert_close,
    logits_of,
    make_inputs,
    random_ids,
    result_tensors,
    run_op,
    tiny_model,
)


CHUNK_GATES = {
    "fresh": {},
    "chunk1": {"chunk_size": 1},
    "many_chunks": {"chunk_size": 2, "length": 71, "max_step": 0.05, "max_forget": 0.05},
    "no_whole_chunk": {"chunk_size": 8, "length": 3, "count": 2},
    "closes_the_chunk": {"chunk_size": 8, "length": 1, "count": 7},
    "three_pending": {"count": 3},
    "ragged": {"count": [0, 3, 1], "batch": 3, "length": 6},
    "ragged_open": {"count": [1, 3], "length": 1},
    "padded": {"mask": MASKS["mixed"], "count": [1, 2]},
    "left": {"mask": MASKS["left"]},
    "row_of_padding": {"mask": MASKS["one_row_empty"], "count": 3},
    "packed": {"mask": DOCUMENTS["around_gaps"][0], "document_starts": DOCUMENTS["around_gaps"][1], "count": [2, 1]},
    "every_token_a_document": {"document_starts": DOCUMENTS["every_token"][1]},
    "depth1": {"depth": 1, "heads": 3, "length": 11},
    "depth3_forget_to_start": {"depth": 3, "hidden": 7, "forget_to": "start"},
    "dla": {"count": 3} | RULES["dla"],
    "swla": {"count": [1, 3]} | RULES["swla"],
    "swla_packed": {"document_starts": DOCUMENTS["mid_chunk"][1], "count": 3} | RULES["swla"],
}


@pytest.mark.parametrize("options", CHUNK_GATES.values(), ids=CHUNK_GATES)
def test_chunk_gates_equal_oracle(options):
    assert_equals_oracle(make_inputs(gate_granularity="chunk", **options))


@both_backends
def test_chunk_gates_are_those_of_the_first_real_token(backend):
    """Row 0 has its first real tokens of chunks at 2, 7 and 11, row 1 one token pending: at 4, 8 and 12."""
    mask = bits("0011011111111", "0111111111111")
    first = bits("0010000100010", "0000100010001")
    inputs = make_inputs(mask=mask, count=[0, 1], gate_granularity="chunk").require_grad()
    result = run_op(inputs, backend)
    loss = result.output.square().sum() + sum(
        w.square().sum() for w in (*result.state.weights, *result.state.momentum)
    )
    gates = [inputs.tokens[name] for name in GATES]
    for name, gradient in zip(GATES, torch.autograd.grad(loss, gates), strict=True):
        assert torch.equal(gradient != 0, first[..., None].expand_as(gradient)), name

    # Gates that repeat their chunk's first: the same numbers, whichever way they are shared.
    shared = make_inputs(length=12, gate_granularity="chunk")
    for name in GATES:
        shared.tokens[name] = shared.tokens[name][:, ::4].repeat_interleave(4, 1)
    expected = result_tensors(run_op(shared, backend, gate_granularity="token"), 4)
    assert_same(result_tensors(run_op(shared, backend), 4), expected, 1e-14)


@both_backends
@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_a_chunk_moves_the_chunk_and_nothing_before(backend, name):
    """Section 3.2: three tokens of a chunk are pending, so tokens 1, 5 and 9 begin one and speak for it."""
    inputs = make_inputs(length=10, chunk_size=4, count=3, batch=1, gate_granularity="chunk")
    expected = run_op(inputs, backend).output
    for j in range(10):
        changed = inputs.tokens[name].clone()
        changed[:, j] = 0.5 * changed[:, j] + 0.01
        output = run_op(inputs, backend, **{name: changed}).output
        assert torch.equal(output[:, :j], expected[:, :j]), j
        assert torch.equal(output, expected) == (j not in (1, 5, 9)), j


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float64, memory_gate_granularity="chunk")


def test_the_option_reaches_the_memory(model):
    ids = random_ids(2, 13)
    by_token = tiny_model(dtype=torch.float64)
    expected = logits_of(by_token, ids)
    assert not torch.allclose(logits_of(model, ids), expected, atol=1e-3)
    # In chunks of one token the two are the same.
    single = {"dtype": torch.float64, "memory_chunk_size": 1}
    shared = tiny_model(memory_gate_granularity="chunk", **single)
    assert torch.equal(logits_of(shared, ids), logits_of(tiny_model(**single), ids))


@pytest.mark.parametrize("sizes", [[1] * 21, [3, 4, 5, 9], [20, 1]], ids=str)
def test_a_streamed_text_equals_one_call(model, sizes):
    ids = random_ids(2, 21)
    cache, pieces = None, []
    for piece in ids.split(sizes, 1):
        with torch.no_grad():
            outputs = model(piece, cache=cache, use_cache=True)
        cache = outputs.cache
        pieces.append(outputs.logits)
    assert_close("logits", torch.cat(pieces, 1), logits_of(model, ids), TOLERANCE[torch.float64])


@pytest.mark.parametrize("cut", [13, 5], ids="cut{}".format)
def test_a_padded_row_equals_the_row_alone(model, cut):
    mask = bits("0001111111111", "1110110111001", "1111111111111").long()
    ids, later = random_ids(3, 13), random_ids(3, 6, seed=1)
    with torch.no_grad():
        first = model(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True)
        padded = model(
            torch.cat([ids[:, cut:], later], 1),
            cache=first.cache,
            attention_mask=torch.nn.functional.pad(mask, (0, 6), value=1),
        )
    logits = torch.cat([first.logits, padded.logits], 1)
    for row, real in enumerate(torch.nn.functional.pad(mask, (0, 6), value=1).bool()):
        alone = logits_of(model, torch.cat([ids, later], 1)[row : row + 1, real])
        assert_close(f"row {row}", logits[row : row + 1, real], alone, TOLERANCE[torch.float64])


def test_a_cropped_open_chunk_keeps_its_gates(model):
    ids, other = random_ids(2, 14), random_ids(2, 3, seed=1)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).cache
        cache.activate_past_recording()
        model(torch.cat([ids[:, 5:10], other], 1), cache=cache)
        cache.crop(-3)
        actual = model(ids[:, 10:], cache=cache).logits
    assert_close("logits", actual, logits_of(model, ids)[:, 10:], TOLERANCE[torch.float64])
