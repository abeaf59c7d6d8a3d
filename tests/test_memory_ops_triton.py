# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The op on Triton kernels: padding, open chunks and documents, against the per-token form in float64."""

import sys

import pytest
import torch

from titans_testing import (
    RULES,
    assert_close,
    continue_from,
    input_gradients,
    make_inputs,
    relative_error,
    result_tensors,
    run_op,
)
from triton_testing import ALLOWED


pytest.importorskip("triton")

# One head, since heads and rows lie side by side in the kernels, but for cases that say two.
SIZES = {"heads": 1, "head_dim": 16, "hidden": 32, "chunk_size": 8, "max_step": 0.05, "max_forget": 0.05}


def padded(length: int) -> torch.Tensor:
    """Pads on the left of row 0 and inside row 1."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :5], mask[1, 6:9] = False, False
    return mask


def starts(length: int, *columns: int) -> torch.Tensor:
    documents = torch.zeros(2, length, dtype=torch.bool)
    documents[1, list(columns)] = True
    return documents


CASES = {
    "fresh": {"length": 37, "chunk_size": 16, "heads": 2},
    "whole_chunks": {"length": 16},
    "open_chunk": {"length": 5},
    "closes_a_chunk": {"length": 3, "count": 5},
    "continues": {"length": 14, "count": 5},
    "ragged": {"length": 11, "count": [7, 2], "heads": 2},
    "padded": {"length": 19, "mask": padded(19)},
    "packed": {"length": 21, "document_starts": starts(21, 3, 12)},
    "depth1": {"length": 11, "depth": 1},
    "forget_to_start": {"length": 11, "forget_to": "start"},
    "chunk_gates": {"length": 11, "count": [3, 6], "gate_granularity": "chunk", "heads": 2},
    "plain_network": {"length": 11, "norm": False, "residual": False, "hidden": 48},
    "dla": {"length": 11, "count": 3} | RULES["dla"],
    "linear_attention_packed": {"length": 21, "document_starts": starts(21, 3, 12)} | RULES["linear_attention"],
    "swla": {"length": 18, "count": 5} | RULES["swla"],
    "swla_padded": {"length": 19, "mask": padded(19), "count": [3, 5], "forget_to": "start"} | RULES["swla"],
    "swla_open_chunk": {"length": 1, "count": [3, 5]} | RULES["swla"],
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_per_token_form(case):
    exact = make_inputs(**{**SIZES, **CASES[case]}).require_grad()
    inputs = exact.to(torch.float32).require_grad()
    b = exact.chunk_size
    reference = result_tensors(run_op(exact, "recurrent", output_surprise=True), b)
    actual = result_tensors(run_op(inputs, "triton", output_surprise=True), b)
    for name, tensor in reference.items():
        assert_close(name, actual[name], tensor, ALLOWED[torch.float32])
    expected = input_gradients(reference, exact)
    for name, gradient in input_gradients(actual, inputs).items():
        assert_close(f"gradient of {name}", gradient, expected[name], 10 * ALLOWED[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs(dtype):
    """Products are rounded as the inputs are; the state stays float32, and so do the tokens of the open chunk."""
    inputs = make_inputs(**SIZES, length=19, count=[3, 5]).to(torch.float32)
    inputs.tokens = {name: t.to(dtype) if name in "qkv" else t for name, t in inputs.tokens.items()}
    result = run_op(inputs, "triton")
    reference = run_op(inputs.to(torch.float64), "recurrent")
    assert result.output.dtype == dtype
    assert {t.dtype for t in (*result.state.weights, *result.state.pending)} == {torch.float32}
    assert_close("output", result.output, reference.output, ALLOWED[dtype])
    for actual, expected in zip(result.state.weights, reference.state.weights, strict=True):
        assert_close("weights", actual, expected, ALLOWED[dtype])


def test_what_is_written_does_not_depend_on_reading():
    inputs = make_inputs(length=11, count=3, **SIZES).to(torch.float32)
    read, written = (result_tensors(run_op(inputs, "triton", read=read), 8) for read in (True, False))
    assert written.pop("output").numel() == 0
    assert all(torch.equal(tensor, read[name]) for name, tensor in written.items())


@pytest.mark.parametrize("cut", [1, 5, 8, 9, 18])
def test_two_calls_equal_one(cut):
    inputs = make_inputs(**SIZES, length=19).to(torch.float32)
    exact = run_op(inputs.to(torch.float64), "recurrent").output
    whole = run_op(inputs, "triton")
    first = run_op(inputs.columns(0, cut), "triton")
    second = run_op(continue_from(inputs.columns(cut, 19), first.state), "triton")
    output = torch.cat([first.output, second.output], 1)
    assert relative_error(output, exact) <= 4 * relative_error(whole.output, exact)
    assert_close("state", second.state.weights[0], whole.state.weights[0], ALLOWED[torch.float32])


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"depth": 3}, "depth is 3"),
        ({"head_dim": 20}, "head dimension is 20"),
        ({"hidden": 80}, "hidden width is 80"),
        ({"chunk_size": 129}, "chunk length is 129"),
    ],
    ids=str,
)
def test_sizes_that_the_kernels_do_not_take_are_named(sizes, reason):
    inputs = make_inputs(**{**SIZES, **sizes}).to(torch.float32)
    with pytest.raises(ValueError, match=f'{reason}.*backend="chunked"'):
        run_op(inputs, "triton")


def test_double_precision_is_refused():
    with pytest.raises(ValueError, match="torch.float64, expected torch.float32"):
        run_op(make_inputs(**SIZES), "triton")


def test_triton_by_name_is_never_replaced(monkeypatch):
    """Without the package, the error says what is missing, and nothing else is run in its place."""
    from transformers_titans import memory_ops

    for name in [name for name in sys.modules if name.startswith("transformers_titans.") and "triton" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(memory_ops, "chunked_memory", lambda call: pytest.fail("another form was run"))
    with pytest.raises(ImportError, match="pip install triton"):
        run_op(make_inputs(**SIZES).to(torch.float32), "triton")
