# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A scan that hands out weights at the ends of segments is the scans of its segments, one after another."""

import functools

import pytest
import torch

from titans_testing import assert_close
from transformers_titans import chunk_forward
from transformers_titans.chunk_scan import chunk_scan, compiled_chunk_scan
from transformers_titans.kept_plan import SegmentEnds
from transformers_titans.scan_inputs import ScanInputs, ScanOptions, ScanResult
from transformers_titans.segmented_scan import scan_segments
from triton_testing import map_inputs, scan_inputs, scan_options


CHUNKS = 7
# Segments of one chunk and of several, the last of which is complete, or is not.
ENDS = [(0, 2, 6), (1, 4), (6,)]


def in_one(inputs: ScanInputs, options: ScanOptions, ends: tuple[int, ...], scan=chunk_scan) -> ScanResult:
    return scan(inputs, options._replace(ends=ends))


def by_segment(inputs: ScanInputs, options: ScanOptions, ends: tuple[int, ...]) -> ScanResult:
    return scan_segments(chunk_scan, inputs, options, SegmentEnds(ends, None, restarts=False), None)


def results_and_gradients(run, inputs: ScanInputs, options: ScanOptions, ends) -> dict[str, torch.Tensor]:
    """All that a scan returns, and what a loss of all but the inner losses has as gradient in each input."""
    inputs = map_inputs(lambda t: t.detach().clone().requires_grad_(), inputs)
    result = run(inputs, options, ends)
    differentiable = [result.output, *result.weights, *result.momentum, *result.kept]
    leaves = [t for t in inputs.flatten() if t is not None and t.requires_grad]
    loss = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in differentiable)
    gradients = torch.autograd.grad(loss, leaves)
    named = {f"result {i}": t for i, t in enumerate([*differentiable, result.surprise])}
    return named | {f"gradient {i}": t for i, t in enumerate(gradients)}


def assert_same(inputs: ScanInputs, ends: tuple[int, ...], run=in_one) -> None:
    options = scan_options(inputs)
    expected = results_and_gradients(by_segment, inputs, options, ends)
    actual = results_and_gradients(run, inputs, options, ends)
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        assert_close(name, actual[name], reference, 1e-10)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(
    "facts",
    [{}, {"depth": 1}, {"depth": 3, "norm": False}, {"forget_to": True}, {"full": True}, {"restart": True}],
    ids=str,
)
@pytest.mark.parametrize("elements", [1, chunk_forward.CPU_ELEMENTS], ids=["chunk by chunk", "spans of several"])
def test_equals_the_scans_of_its_segments(elements, facts, ends, monkeypatch):
    monkeypatch.setattr(chunk_forward, "CPU_ELEMENTS", elements)
    torch.manual_seed(0)
    assert_same(scan_inputs(CHUNKS, 2, 8, 4, **facts), ends)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_without_autograd(ends):
    torch.manual_seed(0)
    inputs = scan_inputs(CHUNKS, 2, 8, 4)
    options = scan_options(inputs)
    for actual, wanted in zip(in_one(inputs, options, ends).kept, by_segment(inputs, options, ends).kept, strict=True):
        assert_close("kept", actual, wanted, 1e-12)


def test_compiled_spans_hand_out_the_same(monkeypatch):
    monkeypatch.setattr(chunk_forward, "_compiled", lambda function: torch.compile(function, backend="aot_eager"))
    torch.manual_seed(0)
    run = functools.partial(in_one, scan=compiled_chunk_scan)
    assert_same(scan_inputs(CHUNKS, 2, 8, 4), ENDS[0], run)


def test_weights_handed_out_alone_have_a_gradient():
    torch.manual_seed(0)
    inputs = map_inputs(torch.Tensor.requires_grad_, scan_inputs(CHUNKS, 2, 8, 4))
    kept = in_one(inputs, scan_options(inputs), (2,)).kept
    behind = chunk_scan(inputs.slice_chunks(0, 3), scan_options(inputs)).weights
    expected, actual = (
        torch.autograd.grad(sum(w.square().sum() for w in weights), [inputs.k, *inputs.weights])
        for weights in (behind, kept)
    )
    assert not actual[0][3:].any()
    for found, wanted in zip(actual, expected, strict=True):
        assert_close("gradient", found, wanted, 1e-10)
