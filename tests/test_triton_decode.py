# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoding kernel against the chunked form in float64, interpreted where there is no GPU."""

import math

import pytest
import torch

from titans_testing import assert_close
from transformers_titans.chunk_scan import ScanInputs, ScanOptions, chunk_scan
from triton_testing import ALLOWED, DEVICE, Guards, in_dtype, map_inputs, scan_inputs, scan_options


pytest.importorskip("triton")
from transformers_titans import triton_decode  # noqa: E402
from transformers_titans.triton_configs import CONFIGS  # noqa: E402
from transformers_titans.triton_decode import decode, scan_or_decode  # noqa: E402


def step_inputs(G, b, D, depth, expansion=2, **options) -> ScanInputs:
    """Float64 inputs of one query in one chunk."""
    return scan_inputs(1, G, b, D, b_q=1, h=expansion * D, depth=depth, **options)


def read_options(inputs: ScanInputs, residual: bool = True, rule: str = "titans") -> ScanOptions:
    return scan_options(inputs, residual=residual, write=False, surprise=False, rule=rule)


def expected(inputs: ScanInputs, options: ScanOptions, at: torch.Tensor) -> torch.Tensor:
    """Each row alone, its chunk cut off behind the query, in float64."""
    outputs = []
    for g, slot in enumerate(at.tolist()):
        flat = [None if t is None else t.double() for t in inputs.flatten()]
        flat[:6] = [t[:, g : g + 1] for t in flat[:6]]
        flat[6:] = [None if t is None else t[g : g + 1] for t in flat[6:]]
        flat[1:6] = [t[:, :, : slot + 1] for t in flat[1:6]]
        outputs.append(chunk_scan(ScanInputs.unflatten(flat, options.depth), options).output)
    return torch.cat(outputs, 1)


def slots(*at: int) -> torch.Tensor:
    return torch.tensor(at, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    "b, D, depth, expansion, norm, residual, forget_to",
    [
        (64, 64, 2, 4, True, True, False),
        (37, 48, 2, 2, True, False, True),
        (128, 80, 2, 1, False, True, True),
        (16, 16, 2, 3, False, False, False),
        (16, 256, 2, 1, True, True, False),
        (64, 64, 1, 1, True, True, False),
        (37, 48, 1, 1, True, False, True),
        (16, 256, 1, 1, False, True, False),
        (128, 16, 1, 1, False, False, True),
    ],
)
def test_equals_chunk_scan(b, D, depth, expansion, norm, residual, forget_to):
    inputs = in_dtype(step_inputs(4, b, D, depth, expansion, norm=norm, forget_to=forget_to), torch.float32)
    options, at = read_options(inputs, residual), slots(b - 1, 0, b // 2, 1)
    assert_close("output", decode(inputs, options, at), expected(inputs, options, at), ALLOWED[torch.float32])


@pytest.mark.parametrize(
    "rule, b, D, depth, norm, residual, forget_to",
    [
        ("dla", 37, 48, 2, True, True, False),
        ("dla", 24, 16, 2, False, False, True),
        ("linear_attention", 16, 48, 1, False, False, False),
        ("swla", 37, 48, 1, False, False, True),
    ],
)
def test_other_rules_equal_chunk_scan(rule, b, D, depth, norm, residual, forget_to):
    inputs = in_dtype(step_inputs(5, b, D, depth, norm=norm, forget_to=forget_to), torch.float32)
    options, at = read_options(inputs, residual, rule), slots(b - 1, 0, b // 2, 1, 2)
    assert_close("output", decode(inputs, options, at), expected(inputs, options, at), ALLOWED[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [1, 2])
def test_in_lower_precision(dtype, depth):
    inputs = in_dtype(step_inputs(2, 37, 48, depth, 2), dtype)
    options, at = read_options(inputs), slots(36, 20)
    output = decode(inputs, options, at)
    assert output.dtype == dtype
    assert_close("output", output, expected(inputs, options, at), ALLOWED[dtype])


@pytest.mark.parametrize("config", CONFIGS["decode"])
def test_every_launch_configuration(config):
    inputs = in_dtype(step_inputs(2, 24, 48, 2, 2), torch.float32)
    options, at = read_options(inputs), slots(23, 11)
    output = decode(inputs, options, at, config)
    assert_close("output", output, expected(inputs, options, at), ALLOWED[torch.float32])


def test_sizes_that_do_not_fit_into_a_block():
    inputs = in_dtype(step_inputs(2, 64, 256, 2, 1, forget_to=True), torch.float32)
    options, at = read_options(inputs), slots(63, 40)
    inputs.k[:, 1, 41:], inputs.theta[:, 1, 41:] = math.nan, math.nan
    assert_close("output", decode(inputs, options, at), expected(inputs, options, at), ALLOWED[torch.float32])


@pytest.mark.parametrize("depth", [1, 2])
def test_every_slot(depth):
    inputs = in_dtype(step_inputs(1, 17, 16, depth, 2), torch.float32)
    options = read_options(inputs)
    for slot in range(17):
        at = slots(slot)
        output = decode(inputs, options, at)
        assert_close(f"slot {slot}", output, expected(inputs, options, at), ALLOWED[torch.float32])


@pytest.mark.parametrize("depth, rule", [(1, "titans"), (2, "titans"), (2, "dla"), (1, "swla")])
def test_slots_behind_the_query_are_not_looked_at(depth, rule):
    inputs = in_dtype(step_inputs(3, 20, 16, depth, 2), torch.float32)
    options, at = read_options(inputs, rule=rule), slots(19, 4, 0)
    spoilt = map_inputs(torch.Tensor.clone, inputs)
    for g, slot in enumerate(at.tolist()):
        for tensor in spoilt[1:6]:
            tensor[:, g, slot + 1 :] = math.nan
    assert torch.equal(decode(spoilt, options, at), decode(inputs, options, at))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gates_at_their_limits(value):
    inputs = step_inputs(2, 16, 16, 2, 2)
    alpha, eta = inputs.alpha.clone(), inputs.eta.clone()
    alpha[:, 0, 3:9], eta[:, 1, 2:12] = value, value
    inputs = in_dtype(inputs._replace(alpha=alpha, eta=eta), torch.float32)
    options, at = read_options(inputs), slots(15, 12)
    assert_close("output", decode(inputs, options, at), expected(inputs, options, at), ALLOWED[torch.float32])


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_beside_its_tensors_is_read_or_written(depth, monkeypatch):
    inputs = in_dtype(step_inputs(2, 24, 48, depth, 2, forget_to=True), torch.float32)
    options, at = read_options(inputs), slots(23, 7)
    reference = decode(inputs, options, at)
    guards = Guards()
    guarded = map_inputs(guards, inputs)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: guards(torch.full_like(tensor, math.nan)))
    assert torch.equal(decode(guarded, options, guards(at)), reference)
    guards.check()
    for now, then in zip(guarded.flatten(), inputs.flatten(), strict=True):
        assert now is None or torch.equal(now, then)


def test_non_contiguous_tensors():
    inputs = in_dtype(step_inputs(2, 16, 16, 2, 2), torch.float32)
    options, at = read_options(inputs), slots(15, 6)
    strided = map_inputs(lambda t: t.mT.contiguous().mT, inputs)
    assert not strided.k.is_contiguous()
    assert torch.equal(decode(strided, options, at), decode(inputs, options, at))


def test_a_scan_that_is_one_read_is_decoded(monkeypatch):
    inputs = in_dtype(step_inputs(2, 11, 16, 2), torch.float32)
    options, at = read_options(inputs), slots(10, 10)
    monkeypatch.setattr(triton_decode, "triton_scan", None)
    result = scan_or_decode(inputs, options)
    assert torch.equal(result.output, decode(inputs, options, at))
    assert result.weights is inputs.weights and result.momentum is inputs.momentum and result.surprise is None


@pytest.mark.parametrize("reason", ["write", "surprise", "two queries", "gradient"])
def test_any_other_scan_is_not(reason, monkeypatch):
    inputs = in_dtype(step_inputs(2, 11, 16, 2), torch.float32)
    options = read_options(inputs)._replace(write=reason == "write", surprise=reason == "surprise")
    if reason == "two queries":
        inputs = inputs._replace(q=inputs.q.expand(-1, -1, 2, -1))
    inputs.weights[0].requires_grad_(reason == "gradient")
    monkeypatch.setattr(triton_decode, "triton_scan", lambda *arguments: arguments)
    assert scan_or_decode(inputs, options) == (inputs, options)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"write": True}, "options.write is True"),
        ({"surprise": True}, "options.surprise True"),
        ({"depth": 3}, "options.depth is 3, expected 1 or 2"),
        ({"q": 2}, r"q has shape \(1, 2, 2, 16\)"),
        ({"at": torch.int64}, "at has dtype torch.int64"),
        ({"dtype": torch.float64}, "dtype of q, k and v is torch.float64"),
        ({"k": torch.bfloat16}, "dtype of k is torch.bfloat16, expected q's, torch.float32"),
        ({"eta": torch.float64}, "dtype of eta is torch.float64, expected torch.float32"),
        ({"weights": torch.bfloat16}, "dtypes of weights are .'torch.bfloat16'., expected torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    inputs = in_dtype(step_inputs(2, 16, 16, 2, 2), change.get("dtype", torch.float32))
    options, at = read_options(inputs), slots(15, 6).to(change.get("at", torch.int32))
    options = options._replace(**{name: value for name, value in change.items() if name in options._fields})
    inputs = inputs._replace(q=inputs.q.expand(-1, -1, change.get("q", 1), -1))
    for name in {"k", "eta"} & change.keys():
        inputs = inputs._replace(**{name: getattr(inputs, name).to(change[name])})
    if "weights" in change:
        inputs = inputs._replace(weights=tuple(w.to(change["weights"]) for w in inputs.weights))
    with pytest.raises(ValueError, match=message):
        decode(inputs, options, at)
