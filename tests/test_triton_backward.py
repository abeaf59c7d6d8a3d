# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The coefficients' and the backward kernels against PyTorch in float64, interpreted where there is no GPU."""

from typing import NamedTuple

import pytest
import torch

from scan_reference import Written, gradients, map_tree, new_leaves, read, write
from titans_testing import assert_close
from transformers_titans.chunk_coefficients import (
    EndCoefficients,
    ReadCoefficients,
    chunk_coefficients,
    chunk_coefficients_adjoint,
)
from transformers_titans.chunk_scan import ScanInputs, chunk_scan
from triton_testing import ALLOWED, DEVICE, RULE_SCANS, Guards, in_dtype, map_inputs, scan_inputs, scan_options


pytest.importorskip("triton")
from transformers_titans import memory_ops_triton  # noqa: E402
from transformers_titans.memory_ops_triton import triton_scan  # noqa: E402
from transformers_titans.triton_backward_read import (  # noqa: E402
    ReadGradients,
    launch_reader_backward,
    precision_that_fits,
)
from transformers_titans.triton_backward_write import WriteGradients, launch_writer_backward  # noqa: E402
from transformers_titans.triton_coefficients import launch_coefficients, launch_coefficients_backward  # noqa: E402
from transformers_titans.triton_configs import CONFIGS  # noqa: E402
from transformers_titans.triton_forward import Scratch  # noqa: E402


FLOAT32 = ALLOWED[torch.float32]


def randn_like(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape, dtype=torch.float64, device=t.device)


def single(tree):
    """float64 -> contiguous float32, in tensors and (named) tuples and lists of them."""
    return map_tree(lambda t: t.detach().float().contiguous() if t.is_floating_point() else t, tree)


def guarded(guards: Guards, tree):
    return map_tree(guards, tree)


def assert_trees_close(name: str, actual, expected, allowed: float = FLOAT32):
    """Tensors, or (named) tuples and lists of them, one by one."""
    if expected is None:
        assert actual is None, f"{name}: not None"
        return
    if isinstance(expected, torch.Tensor):
        assert_close(name, actual, expected, allowed)
        return
    names = getattr(expected, "_fields", range(len(expected)))
    for part, got, want in zip(names, actual, expected, strict=True):
        assert_trees_close(f"{name}.{part}", got, want, allowed)


def gates_of(N: int, G: int, b: int, corners: bool = False) -> tuple[torch.Tensor, ...]:
    """theta, alpha and eta in float64, of float32 values; with ``corners`` many are exactly 0 or 1."""
    gates = [scale * torch.rand(N, G, b, device=DEVICE) for scale in (0.1, 0.3, 1.0)]
    if corners:
        chosen = torch.randint(0, 4, (3, N, G, b), device=DEVICE)
        gates = [torch.where(chosen[i] == 0, 0.0, torch.where(chosen[i] == 1, 1.0, g)) for i, g in enumerate(gates)]
    return tuple(g.double() for g in gates)


COEFFICIENTS = [(1, 1, False), (16, 16, True), (24, 5, False), (37, 37, True)]


@pytest.mark.parametrize(("b", "b_q", "corners"), COEFFICIENTS)
@pytest.mark.parametrize("some_are_open", [True, False])
@pytest.mark.parametrize("sliding", [False, True])
def test_coefficients_and_their_adjoint(b, b_q, corners, some_are_open, sliding):
    check_coefficients(gates_of(2, 2, b, corners), b_q, some_are_open, sliding=sliding)


@pytest.mark.parametrize("config", CONFIGS["coefficients"], ids=str)
def test_every_configuration_of_the_coefficients(config):
    check_coefficients(gates_of(1, 2, 21), 21, True, config, config)


@pytest.mark.parametrize("config", CONFIGS["coefficients_backward"], ids=str)
def test_every_configuration_of_the_coefficients_adjoint(config):
    check_coefficients(gates_of(1, 2, 21), 4, True, None, config)


def check_coefficients(gates, b_q, some_are_open, config=None, adjoint_config=None, sliding=False):
    N, G, b = gates[0].shape
    full = torch.arange(N * G, device=DEVICE).view(N, G) % 2 == 0 if some_are_open else None
    guards = Guards()
    own_gates, own_full = guarded(guards, single(gates)), guards(full)
    own_read, own_end = launch_coefficients(*own_gates, own_full, config, sliding)
    every, end, _ = chunk_coefficients(*gates, b, full, sliding)
    assert_trees_close("read", own_read, every)
    assert_trees_close("end", own_end, end)

    read, _, products = chunk_coefficients(*gates, b_q, full, sliding)
    read_bar, end_bar = (type(t)(*map(randn_like, t)) for t in (read, end))
    own_bars = guarded(guards, single((own_read, read_bar, end_bar)))
    actual = launch_coefficients_backward(*own_gates, own_full, *own_bars, adjoint_config, sliding)
    assert_trees_close("gates", actual, chunk_coefficients_adjoint(*gates, full, products, read_bar, end_bar))
    guards.check()


class Reference(NamedTuple):
    """Inputs in float64, their scan's coefficients, states at the chunks' starts and factors."""

    inputs: ScanInputs
    options: object
    read: ReadCoefficients
    end: EndCoefficients
    written: Written

    @classmethod
    def of(cls, inputs, residual: bool = True, rule: str = "titans") -> "Reference":
        inputs = map_inputs(lambda t: t.double().requires_grad_(), in_dtype(inputs, torch.float32))
        options = scan_options(inputs, residual=residual, rule=rule)
        gates = (inputs.theta, inputs.alpha, inputs.eta)
        coefficients = chunk_coefficients(*gates, inputs.k.shape[2], inputs.full, options.rule.sliding)
        end = new_leaves(coefficients.end)
        return cls(inputs, options, coefficients.read, end, write(inputs, options, end))

    def read_gradients(self, output_bar: torch.Tensor) -> ReadGradients:
        """Those of norm and forget_to are sums over chunks."""
        inputs, written = self.inputs, self.written
        network, idle = inputs.network(self.options), inputs.k.shape[2] - inputs.q.shape[2]
        state = new_leaves((written.weights, written.momentum, written.factors.a, written.factors.g))
        coefficients = new_leaves(ReadCoefficients(*(x[:, :, idle:] for x in self.read)))
        output = read(network, inputs.q, *state, coefficients, inputs.forget_to)
        wanted = (inputs.q, *state, coefficients, inputs.forget_to, inputs.norm_weight, inputs.norm_bias)
        q, weights, momentum, a, g, coefficients, *parameters = gradients(output, output_bar, wanted)
        hidden, first_g = (a[1], g[0]) if self.options.depth == 2 else (None, None)
        return ReadGradients(q, a[0], hidden, first_g, g[-1], coefficients, weights, momentum, *parameters)

    def write_gradients(self, read_bar: ReadGradients, state_bar: tuple) -> tuple[WriteGradients, dict]:
        """Those of norm are sums over chunks; by name, those of states and of forget_to."""
        inputs, (*starts, factors, last_weights, last_momentum) = self.inputs, self.written
        # Reads see the states at the chunks' starts and the factors, in the order of `ReadGradients`.
        results = (last_weights, last_momentum, *starts, factors.a, factors.g)
        bars = (*state_bar, read_bar.weights, read_bar.momentum, *read_bar[1:5])
        names = ("weights", "momentum", "forget_to", "start_weights", "start_momentum")
        wanted = (inputs.k, inputs.v, self.end, inputs.norm_weight, inputs.norm_bias)
        taken = gradients(results, bars, (*wanted, *(getattr(inputs, name) for name in names)))
        return WriteGradients(*taken[:5]), dict(zip(names, taken[5:], strict=True))

    def scratch(self) -> Scratch:
        """What the writer leaves."""
        *z, f = self.written.factors.z
        return Scratch(*(z or [None]), *(self.written.factors.p or [None]), f)


def summed(bars):
    """With norm's gradients, of each chunk by itself, summed over chunks to the shape of its parameters."""
    if bars.norm_weight is None:
        return bars
    weight, bias = (t.sum(0).unsqueeze(1) for t in (bars.norm_weight, bars.norm_bias))
    return bars._replace(norm_weight=weight, norm_bias=bias)


def check_reader_adjoint(inputs, residual=True, config=None, rule="titans"):
    """The kernel on guarded tensors against autograd's gradients of `read`."""
    reference = Reference.of(inputs, residual, rule)
    inputs, written = reference.inputs, reference.written
    output_bar = randn_like(inputs.q)

    guards = Guards()
    own = type(inputs)(*guarded(guards, single(tuple(inputs))))
    state = guarded(guards, single((written.weights, written.momentum)))
    has_norm, has_forget_to = inputs.norm_weight is not None, inputs.forget_to is not None
    actual = ReadGradients.empty_for(own.q, own.k, state[0], has_norm, has_forget_to)
    actual = guarded(guards, actual)
    launch_reader_backward(
        *(own.q, own.k, own.v, guarded(guards, single(reference.read)), *state),
        *(guarded(guards, single(reference.scratch())), own.network(reference.options), "tf32x3"),
        *(guards(single(output_bar)), actual),
        forget_to=own.forget_to,
        config=config,
    )
    guards.check()
    if has_forget_to:
        actual = actual._replace(forget_to=tuple(t.sum(0) for t in actual.forget_to))
    assert_trees_close("gradients", summed(actual), reference.read_gradients(output_bar))


def check_writer_adjoint(inputs, residual=True, config=None, rule="titans"):
    """The kernel on guarded tensors against autograd's gradients of `write`."""
    reference = Reference.of(inputs, residual, rule)
    inputs, written = reference.inputs, reference.written
    read_bar = reference.read_gradients(randn_like(inputs.q))
    state_bar = tuple(tuple(randn_like(t) for t in group) for group in (inputs.weights, inputs.momentum))

    guards = Guards()
    own = type(inputs)(*guarded(guards, single(tuple(inputs))))
    own_bars = guarded(guards, single(state_bar))
    state = guarded(guards, single((written.weights, written.momentum)))
    own_read_bar = read_bar._replace(q=None, coefficients=None, forget_to=None, norm_weight=None, norm_bias=None)
    actual = guarded(guards, WriteGradients.empty_for(own.k, inputs.norm_weight is not None))
    groups = {"forget_to_bar": own.forget_to, "start_weights_bar": own.weights, "start_momentum_bar": own.weights}
    if inputs.restart is None:
        groups.update(start_weights_bar=None, start_momentum_bar=None)
    sums = {name: group and tuple(guards(torch.zeros_like(t)) for t in group) for name, group in groups.items()}
    launch_writer_backward(
        *(own.k, own.v, guarded(guards, single(reference.end)), *state),
        *(guarded(guards, single(reference.scratch())), own.network(reference.options), "tf32x3"),
        *(guarded(guards, single(own_read_bar)), *own_bars, actual),
        restart=own.restart,
        forget_to=own.forget_to,
        config=config,
        **sums,
    )
    guards.check()
    expected, others = reference.write_gradients(read_bar, state_bar)
    assert_trees_close("gradients", summed(actual), expected)
    assert_trees_close("state", own_bars, (others["weights"], others["momentum"]))
    for name, bars in sums.items():
        assert_trees_close(name, bars, others[name.removesuffix("_bar")])


# Together: masks in every dimension, one and two layers, and each option of the memory.
ODD = [
    {"D": 48, "h": 80, "b": 37, "b_q": 11, "full": True, "restart": True, "forget_to": True},
    {"D": 16, "h": 16, "b": 16, "norm": False},
    {"D": 48, "depth": 1, "b": 21, "b_q": 11, "full": True, "restart": True, "forget_to": True},
    {"D": 32, "depth": 1, "b": 16, "b_q": 1, "norm": False, "G": 1},
]
both_adjoints = pytest.mark.parametrize("check", [check_reader_adjoint, check_writer_adjoint])


@both_adjoints
@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_adjoint_on_guarded_tensors(check, sizes):
    check(scan_inputs(**sizes))


@both_adjoints
@pytest.mark.parametrize("depth", [1, 2])
def test_adjoint_without_residual(check, depth):
    check(scan_inputs(N=1, G=1, b=16, depth=depth), residual=False)


@both_adjoints
@pytest.mark.parametrize(("rule", "sizes", "residual"), RULE_SCANS.values(), ids=RULE_SCANS)
def test_adjoint_under_other_rules(check, rule, sizes, residual):
    check(scan_inputs(**sizes), residual, rule=rule)


@pytest.mark.parametrize("config", CONFIGS["reader_backward"], ids=str)
def test_every_configuration_of_the_readers_adjoint(config):
    # Where queries are taken some at a time, more than once.
    b, b_q = (21, 7) if not config.tokens else (config.tokens + 3, config.tokens + 1)
    check_reader_adjoint(scan_inputs(N=1, G=1, D=32, h=96, b=b, b_q=b_q, forget_to=True), config=config)


@pytest.mark.parametrize("config", CONFIGS["writer_backward"], ids=str)
def test_every_configuration_of_the_writers_adjoint(config):
    check_writer_adjoint(scan_inputs(N=2, G=1, D=32, h=96, b=16), config=config)


@pytest.mark.parametrize(
    ("precision", "b", "D", "expected"),
    [
        ("tf32x3", 128, 256, "ieee"),
        ("tf32x3", 64, 256, "tf32x3"),
        ("tf32", 128, 256, "tf32"),
        ("bf16", 128, 256, "bf16"),
    ],
)
def test_precision_of_the_largest_sizes(precision, b, D, expected):
    assert precision_that_fits(precision, b, D) == expected


def differentiate(scan, inputs, options, bars, through=lambda t: t):
    """The gradients of all floating-point inputs, through ``through``, given those of output and final state."""
    leaves = [t.detach() if t is not None else None for t in inputs.flatten()]
    wanted = [t.requires_grad_() for t in leaves if t is not None and t.is_floating_point()]
    result = scan(map_inputs(through, ScanInputs.unflatten(leaves, options.depth)), options)
    results = [result.output, *(result.weights if options.write else ()), *(result.momentum if options.write else ())]
    return torch.autograd.grad(results, wanted, [bar.to(t.dtype) for bar, t in zip(bars, results, strict=False)])


def check_gradients(inputs, options, dtype=torch.float32):
    """Every gradient of the kernels on inputs of ``dtype`` against float64 on the same numbers."""
    inputs = in_dtype(inputs, dtype)
    bars = [randn_like(inputs.q).to(dtype), *(randn_like(t).float() for t in (*inputs.weights, *inputs.momentum))]
    actual = differentiate(triton_scan, inputs, options, bars)
    expected = differentiate(chunk_scan, map_inputs(torch.Tensor.double, inputs), options, bars)
    names = [name for name in _flat_names(inputs) if name]
    for name, got, want in zip(names, actual, expected, strict=True):
        assert_close(name, got, want, ALLOWED[dtype])


def _flat_names(inputs: ScanInputs) -> list[str | None]:
    """A name for each floating-point tensor of ``inputs.flatten()``, None for what is none."""
    depth = len(inputs.weights)
    names = list(inputs._fields[:10]) + [f"{field}.{i}" for field in inputs._fields[10:-1] for i in range(depth)]
    names.append(inputs._fields[-1])
    return [
        name if t is not None and t.is_floating_point() else None
        for name, t in zip(names, inputs.flatten(), strict=True)
    ]


SCANS = [
    {},
    {"D": 48, "h": 96, "b": 37, "full": True, "restart": True, "N": 3, "G": 1},
    {"D": 80, "h": 320, "b": 16, "b_q": 1, "norm": False, "G": 1, "N": 1},
    {"D": 16, "h": 48, "b": 128, "forget_to": True, "restart": True, "N": 1, "G": 2},
    {"D": 16, "h": 16, "b": 1, "N": 3, "G": 1, "forget_to": True},
    {"depth": 1, "D": 48, "b": 21, "full": True, "restart": True, "N": 5, "G": 1},
    {"depth": 1, "b": 16, "norm": False, "forget_to": True, "restart": True},
]


@pytest.mark.parametrize("sizes", SCANS, ids=str)
def test_gradients_equal_float64(sizes):
    inputs = scan_inputs(**sizes)
    check_gradients(inputs, scan_options(inputs))


@pytest.mark.parametrize(("rule", "sizes", "residual"), RULE_SCANS.values(), ids=RULE_SCANS)
def test_gradients_under_other_rules(rule, sizes, residual):
    inputs = scan_inputs(**sizes)
    check_gradients(inputs, scan_options(inputs, residual=residual, rule=rule))


@pytest.mark.parametrize(("rule", "sizes", "residual"), RULE_SCANS.values(), ids=RULE_SCANS)
def test_gradients_through_an_open_chunk_under_other_rules(rule, sizes, residual):
    inputs = scan_inputs(**(sizes | {"N": 1, "restart": False, "full": False}))
    check_gradients(inputs, scan_options(inputs, residual=residual, write=False, rule=rule))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("restart", [True, False])
def test_gradients_through_an_open_chunk(depth, restart):
    inputs = scan_inputs(N=1, G=2, b=16, b_q=3, depth=depth, restart=restart, forget_to=True)
    check_gradients(inputs, scan_options(inputs, write=False, residual=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_16_bit_tokens(dtype, depth):
    inputs = scan_inputs(G=1, b=16, D=32, depth=depth)
    check_gradients(inputs, scan_options(inputs), dtype)


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_of_gates_at_their_limits(depth):
    inputs = scan_inputs(G=1, b=16, depth=depth)
    corners = torch.tensor([[0.0, 0, 0], [0.05, 1, 0], [0.05, 0, 1], [0, 1, 1], [0.05, 0.5, 0.5]], dtype=torch.float64)
    picked = corners[torch.randint(0, len(corners), inputs.theta.shape)].to(DEVICE)
    inputs = inputs._replace(theta=picked[..., 0], alpha=picked[..., 1], eta=picked[..., 2])
    check_gradients(inputs, scan_options(inputs))


def test_gradients_of_spans_do_not_show(monkeypatch):
    inputs = in_dtype(scan_inputs(N=3, G=1, b=16, h=16, full=True, restart=True, forget_to=True), torch.float32)
    options = scan_options(inputs)
    bars = [torch.randn_like(t) for t in (inputs.q, *inputs.weights, *inputs.momentum)]
    whole = differentiate(triton_scan, inputs, options, bars)
    monkeypatch.setattr(memory_ops_triton, "_PROGRAMS", 2)
    spans = differentiate(triton_scan, inputs, options, bars)
    # Sums over chunks are taken in another order; everything else is the same.
    for name, got, want in zip(filter(None, _flat_names(inputs)), spans, whole, strict=True):
        assert_close(name, got, want, 1e-6 if name.startswith(("norm", "forget")) else 0.0)


def test_tensors_and_gradients_that_are_not_contiguous():
    inputs = in_dtype(scan_inputs(N=1, b=16, h=16, forget_to=True), torch.float32)
    options = scan_options(inputs)
    bars = [torch.randn_like(t) for t in (inputs.q, *inputs.weights, *inputs.momentum)]
    expected = differentiate(triton_scan, inputs, options, bars)

    def apart(t):
        return torch.stack([t, t], -1)[..., 0]

    assert not apart(bars[0]).is_contiguous()
    actual = differentiate(triton_scan, inputs, options, [apart(t) for t in bars], through=apart)
    for name, got, want in zip(filter(None, _flat_names(inputs)), actual, expected, strict=True):
        assert_close(name, got, want, 0.0)


def test_only_what_is_asked_for():
    """One input alone: the kernels compute the rest, and autograd drops it."""
    inputs = in_dtype(scan_inputs(N=1, G=1, b=16), torch.float32)
    options = scan_options(inputs)
    bar = torch.randn_like(inputs.q)
    every = differentiate(triton_scan, inputs, options, [bar, *(torch.zeros_like(t) for t in inputs.weights * 2)])
    alone = inputs._replace(eta=inputs.eta.detach().requires_grad_())
    (eta_bar,) = torch.autograd.grad(triton_scan(alone, options).output, alone.eta, bar)
    assert_close("eta", eta_bar, every[5], 0.0)
