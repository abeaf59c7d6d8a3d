# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward kernels against `chunk_scan` in float64, interpreted where there is no GPU."""

import pytest
import torch

from titans_testing import assert_close
from transformers_titans.chunk_coefficients import chunk_coefficients
from transformers_titans.chunk_scan import ScanResult, chunk_scan
from triton_testing import ALLOWED, DEVICE, RULE_SCANS, Guards, in_dtype, map_inputs, scan_inputs, scan_options


pytest.importorskip("triton")
from transformers_titans import memory_ops_triton, triton_launch  # noqa: E402
from transformers_titans.memory_ops_triton import triton_scan  # noqa: E402
from transformers_titans.triton_configs import CONFIGS, LaunchConfig  # noqa: E402
from transformers_titans.triton_forward import Scratch, launch_factors, launch_writer  # noqa: E402
from transformers_titans.triton_read import launch_reader  # noqa: E402


def assert_results_close(actual: ScanResult, expected: ScanResult, allowed: float):
    assert_close("output", actual.output, expected.output, allowed)
    for name in ("weights", "momentum"):
        for layer, (got, want) in enumerate(zip(getattr(actual, name), getattr(expected, name), strict=True)):
            assert_close(f"{name}.{layer}", got, want, allowed)
    if expected.surprise is not None:
        assert_close("surprise", actual.surprise, expected.surprise, allowed)


def check_scan(inputs, options, dtype=torch.float32):
    """The kernels on inputs of ``dtype`` against float64 on the same numbers."""
    inputs = in_dtype(inputs, dtype)
    actual = triton_scan(inputs, options)
    assert actual.output.dtype == dtype
    assert_results_close(actual, chunk_scan(map_inputs(torch.Tensor.double, inputs), options), ALLOWED[dtype])


SCANS = [
    ({}, True),
    ({"h": 16, "b": 16, "N": 1, "norm": False}, False),
    ({"D": 48, "h": 96, "b": 37, "b_q": 5, "full": True, "restart": True, "N": 5, "G": 1}, True),
    ({"D": 80, "h": 320, "b": 16, "b_q": 1, "norm": False, "G": 1}, True),
    ({"h": 48, "b": 128, "forget_to": True, "restart": True, "G": 1}, False),
    ({"D": 48, "h": 50, "b": 1, "N": 3, "forget_to": True}, True),
    ({"depth": 1}, False),
    ({"depth": 1, "D": 80, "b": 37, "b_q": 9, "full": True, "restart": True, "N": 5, "G": 1}, True),
    ({"depth": 1, "D": 48, "b": 16, "norm": False, "forget_to": True, "restart": True}, False),
]


@pytest.mark.parametrize(("sizes", "residual"), SCANS, ids=str)
def test_scan_equals_float64(sizes, residual):
    inputs = scan_inputs(**sizes)
    check_scan(inputs, scan_options(inputs, residual=residual))


@pytest.mark.parametrize("surprise", [True, False])
@pytest.mark.parametrize(("rule", "sizes", "residual"), RULE_SCANS.values(), ids=RULE_SCANS)
def test_other_rules_equal_float64(rule, sizes, residual, surprise):
    inputs = scan_inputs(**sizes)
    check_scan(inputs, scan_options(inputs, residual=residual, surprise=surprise, rule=rule))


@pytest.mark.parametrize(("rule", "sizes", "residual"), RULE_SCANS.values(), ids=RULE_SCANS)
def test_an_open_chunk_under_other_rules(rule, sizes, residual):
    inputs = scan_inputs(**(sizes | {"N": 1, "restart": False, "full": False}))
    check_scan(inputs, scan_options(inputs, residual=residual, write=False, rule=rule))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("restart", [True, False])
def test_an_open_chunk_is_read_and_not_written(depth, restart):
    inputs = scan_inputs(N=1, G=4, b_q=3, depth=depth, restart=restart, forget_to=True)
    check_scan(inputs, scan_options(inputs, write=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [1, 2])
def test_scan_of_16_bit_tokens(dtype, depth):
    inputs = scan_inputs(N=3, b=16, D=32, depth=depth)
    check_scan(inputs, scan_options(inputs), dtype)


def test_bfloat16_rounds_operands_of_products():
    """Else the test above would say nothing about the precision that a GPU computes in."""
    inputs = in_dtype(scan_inputs(), torch.bfloat16)
    options = scan_options(inputs)
    exact = chunk_scan(map_inputs(torch.Tensor.double, inputs), options)
    state = triton_scan(inputs, options).momentum[0]
    assert (state - exact.momentum[0]).abs().max() > 2.0**-12 * exact.momentum[0].abs().max()


@pytest.mark.parametrize("depth", [1, 2])
def test_gates_at_their_limits(depth):
    inputs = scan_inputs(N=3, b=16, depth=depth)
    corners = torch.tensor([[0.0, 0, 0], [0.05, 1, 0], [0.05, 0, 1], [0, 1, 1], [0.05, 0.5, 0.5]], dtype=torch.float64)
    picked = corners[torch.randint(0, len(corners), inputs.theta.shape)].to(DEVICE)
    inputs = inputs._replace(theta=picked[..., 0], alpha=picked[..., 1], eta=picked[..., 2])
    check_scan(inputs, scan_options(inputs))


def test_empty_slots_change_nothing():
    """A chunk of 10 tokens in 24 slots, which stays open: exactly the state before, and the tokens' own outputs."""
    inputs = scan_inputs(N=1)
    real = torch.arange(24, device=DEVICE) < 10
    tokens = {name: getattr(inputs, name) * real[:, None] for name in ("q", "k", "v")}
    gates = {name: getattr(inputs, name) * real for name in ("theta", "alpha", "eta")}
    open_chunks = torch.zeros(1, 2, dtype=torch.bool, device=DEVICE)
    inputs = in_dtype(inputs._replace(**tokens, **gates, full=open_chunks), torch.float32)
    result = triton_scan(inputs, scan_options(inputs))
    for before, after in zip((*inputs.weights, *inputs.momentum), (*result.weights, *result.momentum), strict=True):
        assert torch.equal(before, after)
    short = {name: getattr(inputs, name)[:, :, :10] for name in (*tokens, *gates)}
    expected = chunk_scan(map_inputs(torch.Tensor.double, inputs._replace(**short, full=None)), scan_options(inputs))
    assert_close("output", result.output[:, :, :10], expected.output, ALLOWED[torch.float32])
    assert_close("surprise", result.surprise[:, :, :10], expected.surprise, ALLOWED[torch.float32])


def test_spans_do_not_show(monkeypatch):
    inputs = in_dtype(scan_inputs(N=5, b=16, full=True, restart=True), torch.float32)
    options = scan_options(inputs)
    whole = triton_scan(inputs, options)
    monkeypatch.setattr(memory_ops_triton, "_PROGRAMS", 4)
    spans = triton_scan(inputs, options)
    assert_results_close(spans, whole, 0.0)


def test_inputs_that_are_not_contiguous():
    inputs = in_dtype(scan_inputs(N=2, G=2, b=16, forget_to=True), torch.float32)
    options = scan_options(inputs)
    apart = map_inputs(lambda t: torch.stack([t, t], -1)[..., 0], inputs)
    assert not apart.k.is_contiguous()
    assert_results_close(triton_scan(apart, options), triton_scan(inputs, options), 0.0)


class Launches:
    """Writer, factors and reader by themselves, on guarded tensors."""

    def __init__(self, inputs, residual=True):
        self.inputs, self.options = inputs, scan_options(inputs, residual=residual)
        self.expected = chunk_scan(inputs, self.options)
        self.guards = guards = Guards()
        tensors = in_dtype(inputs, torch.float32)
        tensors = type(tensors).unflatten([guards(t) for t in tensors.flatten()], self.options.depth)
        read, end, _ = chunk_coefficients(tensors.theta, tensors.alpha, tensors.eta, tensors.k.shape[2], tensors.full)
        self.read, self.end = type(read)(*map(guards, read)), type(end)(*map(guards, end))
        self.tensors = tensors
        N = tensors.k.shape[0]
        self.weights, self.momentum = (
            tuple(guards.empty(N + 1, *t.shape) for t in group) for group in (tensors.weights, tensors.momentum)
        )
        for slots, t in zip((*self.weights, *self.momentum), (*tensors.weights, *tensors.momentum), strict=True):
            slots[0] = t

    def scratch(self):
        return Scratch(*map(self.guards, Scratch.empty_for(self.tensors.k, self.weights)))

    def write(self, config=None):
        t, scratch, surprise = self.tensors, self.scratch(), self.guards.empty(*self.tensors.theta.shape)
        launch_writer(
            *(t.k, t.v, self.end, self.weights, self.momentum, scratch, t.network(self.options), "tf32x3"),
            restart=t.restart,
            start_weights=t.start_weights,
            start_momentum=t.start_momentum,
            forget_to=t.forget_to,
            surprise=surprise,
            config=config,
        )
        return scratch, surprise

    def factors(self, config=None):
        t, scratch, surprise = self.tensors, self.scratch(), self.guards.empty(*self.tensors.theta.shape)
        network = t.network(self.options)
        launch_factors(t.k, t.v, self.weights, scratch, network, "tf32x3", surprise=surprise, config=config)
        return scratch, surprise

    def read_output(self, scratch, config=None):
        t, output = self.tensors, self.guards.empty(*self.tensors.q.shape)
        launch_reader(
            *(
                t.q,
                t.k,
                t.v,
                self.read,
                self.weights,
                self.momentum,
                scratch,
                t.network(self.options),
                "tf32x3",
                output,
            ),
            forget_to=t.forget_to,
            config=config,
        )
        return output

    def check(self, output, surprise):
        self.guards.check()
        state = [tuple(t[-1] for t in group) for group in (self.weights, self.momentum)]
        assert_results_close(ScanResult(output, *state, surprise), self.expected, ALLOWED[torch.float32])


ODD = [
    {"D": 48, "h": 80, "b": 37, "b_q": 11, "full": True, "restart": True, "forget_to": True},
    {"D": 48, "depth": 1, "b": 21, "b_q": 11, "full": True, "restart": True, "forget_to": True},
]


# All tokens at once, and in blocks.
@pytest.mark.parametrize("config", [LaunchConfig(64, 8), LaunchConfig(32, 8, tokens=16)], ids=str)
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_nothing_is_read_or_written_beside_the_tensors(sizes, config):
    launches = Launches(scan_inputs(**sizes))
    scratch, surprise = launches.write(config)
    launches.check(launches.read_output(scratch, config), surprise)


@pytest.mark.parametrize("config", [LaunchConfig(64, 8), LaunchConfig(32, 8, tokens=16)], ids=str)
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_factors_are_the_writers(sizes, config):
    launches = Launches(scan_inputs(**sizes))
    scratch, surprise = launches.write(config)
    again, surprise_again = launches.factors(config)
    for one, two in zip((*scratch, surprise), (*again, surprise_again), strict=True):
        assert one is two is None or torch.equal(one, two)
    launches.guards.check()


@pytest.mark.parametrize(
    ("kernel", "config"), [(kernel, c) for kernel in ("writer", "factors", "reader") for c in CONFIGS[kernel]], ids=str
)
def test_every_configuration(kernel, config):
    launches = Launches(scan_inputs(D=32, h=96, b=40, b_q=39, G=1, N=1 if kernel == "factors" else 2))
    scratch, surprise = launches.write(config if kernel == "writer" else None)
    if kernel == "factors":
        scratch, surprise = launches.factors(config)
    launches.check(launches.read_output(scratch, config if kernel == "reader" else None), surprise)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"D": 24}, "head dimension is 24"),
        ({"D": 16, "h": 80}, "hidden width is 80"),
        ({"b": 129}, "chunk length is 129"),
        ({"depth": 3}, "depth is 3"),
    ],
    ids=str,
)
def test_sizes_that_the_kernels_do_not_take(change, message):
    inputs = in_dtype(scan_inputs(**change), torch.float32)
    with pytest.raises(ValueError, match=message):
        triton_scan(inputs, scan_options(inputs))


def test_dtypes_that_the_kernels_do_not_take():
    inputs = scan_inputs(N=1)
    options = scan_options(inputs)
    with pytest.raises(ValueError, match="float64"):
        triton_scan(inputs, options)
    inputs = in_dtype(inputs, torch.float32)
    with pytest.raises(ValueError, match="dtype of v"):
        triton_scan(inputs._replace(v=inputs.v.bfloat16()), options)
    with pytest.raises(ValueError, match="gate"):
        triton_scan(inputs._replace(eta=inputs.eta.bfloat16()), options)


def test_chunks_are_written_or_alone():
    inputs = in_dtype(scan_inputs(N=2), torch.float32)
    with pytest.raises(ValueError, match="options.write"):
        triton_scan(inputs, scan_options(inputs, write=False))


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="device is cpu"):
        triton_launch.capability_of(torch.zeros(1))
