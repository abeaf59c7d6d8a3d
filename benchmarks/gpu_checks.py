# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Are the Triton kernels right on this GPU? Forward, every gradient and decoding against the chunked form in float64.

`benchmarks/gpu.py` runs each case in a process of its own:

    python benchmarks/gpu_checks.py '{"memory": "h256", "dtype": "bfloat16"}'

prints the relative errors as JSON. Imports torch and triton only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from op_package import op_module, random_inputs, replaced, scan_options


MEMORIES: dict[str, dict[str, int]] = {
    "h256": {"depth": 2, "expansion": 4},
    "h128": {"depth": 2, "expansion": 2},
    "h64": {"depth": 2, "expansion": 1},
    "depth1": {"depth": 1},
}
# What other ways to learn are checked with, as fields of a case; "titans" with a plain matrix is linear memory.
RULE_CASES = (
    {"memory": "h256", "rule": "dla"},
    {"memory": "depth1", "rule": "titans", "plain": True},
    {"memory": "depth1", "rule": "linear_attention", "plain": True},
    {"memory": "depth1", "rule": "swla", "plain": True},
)
# What an operand of a product loses: bfloat16 has 8 bits, float16 is taken as tf32 with 11. float32 is taken as three
# tf32 products; there 1 - c loses most, for c, what a chunk's forgetting leaves, is close to 1.
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-17}
# The interpreter shows relative errors up to 2.2 times these.
_ROUNDINGS_ALLOWED = 4
DTYPES = ("bfloat16", "float16", "float32")
OUT_OF_TIME = {"problem": "not run: out of time"}
# Of a configuration that is nobody's default: it may be too large for this dtype.
DOES_NOT_FIT = {"problem": "does not fit"}
# What of the budget checks may take.
CHECK_SHARE = 0.4
_INPUTS = ("q", "k", "v", "theta", "alpha", "eta", "full", "restart", "norm_weight", "norm_bias")


class Clock:
    """What is left of the budget."""

    def __init__(self, budget: float):
        self.start, self.budget = time.monotonic(), budget

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.start)

    def say(self, text: str) -> None:
        print(f"[{self.left():5.0f} s left] {text}", flush=True)


class Case(NamedTuple):
    """What is checked.

    Attributes:
        memory: a key of `MEMORIES`.
        dtype: of q, k and v.
        config: every kernel is launched as this one of its configurations (or its last) says; None: its default.
        rules: with chunks that are not full, restarts and forgetting to the start weights.
        rule: how the memory learns, a key of `scan_inputs.RULES`.
        plain: the memory has neither a residual nor LN.
        num_chunks, groups, chunk_size, head_dim: N, G, b and D.
    """

    memory: str
    dtype: str
    config: int | None = None
    rules: bool = False
    rule: str = "titans"
    plain: bool = False
    num_chunks: int = 3
    groups: int = 3
    chunk_size: int = 64
    head_dim: int = 64

    def allowed(self) -> float:
        return _ROUNDINGS_ALLOWED * _ROUNDING[self.dtype]


@contextmanager
def launched_with(index: int | None) -> Iterator[None]:
    """While this context is open, kernels are launched as configuration ``index`` says; None: as by default."""
    configs = op_module("triton_configs")

    def config_for(kernel: str, head_dim: int, hidden: int, *sizes):
        listed = configs.CONFIGS[kernel]
        return configs.clipped(listed[min(index, len(listed) - 1)], hidden)

    with replaced(**({} if index is None else {"config_for": config_for})):
        yield


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite where the actual side is not finite."""
    actual, reference = actual.detach().double(), reference.detach().double()
    if not actual.isfinite().all():
        return float("inf")
    scale = reference.square().mean().sqrt().item()
    return (actual - reference).square().mean().sqrt().item() / (scale or 1.0)


def errors_of(case: Case, device: str) -> dict[str, float]:
    """Relative errors of a scan's results and gradients, and of decoding, by name."""
    op_module("memory_ops_triton"), op_module("triton_decode")
    inputs = _inputs(case, device)
    options = _options(case, inputs)._replace(
        restart_at=frozenset() if inputs.restart is None else frozenset({case.num_chunks - 1})
    )
    exact = _map(inputs, torch.Tensor.double)
    with launched_with(case.config):
        actual = _results(op_module("memory_ops_triton").triton_scan, inputs, options)
        errors = _decode_errors(case, device)
    expected = _results(op_module("chunk_scan").chunk_scan, exact, options)
    return {**{name: relative_error(actual[name], value) for name, value in expected.items()}, **errors}


def _inputs(case: Case, device: str):
    inputs = random_inputs(
        num_chunks=case.num_chunks,
        groups=case.groups,
        chunk_size=case.chunk_size,
        head_dim=case.head_dim,
        dtype=getattr(torch, case.dtype),
        device=device,
        **MEMORIES[case.memory],
    )
    if case.plain:
        inputs = inputs._replace(norm_weight=None, norm_bias=None)
    if not case.rules:
        return inputs
    full = torch.ones(case.num_chunks, case.groups, dtype=torch.bool, device=device)
    restart = torch.zeros_like(full)
    full[-1, 0] = False
    restart[-1, -1] = True
    start = tuple(0.5 * w for w in inputs.weights)
    return inputs._replace(
        full=full, restart=restart, forget_to=start, start_weights=start, start_momentum=tuple(inputs.momentum)
    )


def _options(case: Case, inputs, write: bool = True):
    return scan_options(inputs, write, case.rule)._replace(residual=not case.plain)


def _map(inputs, function: Callable):
    flat = [t if t is None or not t.is_floating_point() else function(t) for t in inputs.flatten()]
    return type(inputs).unflatten(flat, len(inputs.weights))


def _results(scan: Callable, inputs, options) -> dict[str, torch.Tensor]:
    """Output, state and the gradients of a random linear function of both."""
    leaves = _map(inputs, lambda t: t.detach().clone().requires_grad_())
    result = scan(leaves, options)
    results = {"output": result.output}
    for layer, (w, s) in enumerate(zip(result.weights, result.momentum, strict=True)):
        results |= {f"weights {layer}": w, f"momentum {layer}": s}
    generator = torch.Generator(inputs.k.device).manual_seed(1)
    bars = [torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype) for t in results.values()]
    named = {name: t for name, t in _named(leaves).items() if t.requires_grad}
    gradients = torch.autograd.grad(list(results.values()), list(named.values()), bars)
    return results | {f"gradient of {name}": g for name, g in zip(named, gradients, strict=True)}


def _named(inputs) -> dict[str, torch.Tensor]:
    named = dict(zip(_INPUTS, inputs, strict=False))
    for name in ("weights", "momentum", "forget_to", "start_weights", "start_momentum"):
        named |= {f"{name} {layer}": t for layer, t in enumerate(getattr(inputs, name) or ())}
    return {name: t for name, t in named.items() if t is not None}


def _decode_errors(case: Case, device: str) -> dict[str, float]:
    """A step at the chunk's last slot, where the chunked form with one query is the same."""
    inputs = _inputs(case._replace(num_chunks=1, rules=False), device)
    inputs = inputs._replace(q=inputs.q[:, :, -1:].contiguous())
    if case.rules:
        inputs = inputs._replace(forget_to=tuple(0.5 * w for w in inputs.weights))
    options = _options(case, inputs, write=False)
    at = torch.full((case.groups,), case.chunk_size - 1, dtype=torch.int32, device=device)
    actual = op_module("triton_decode").decode(inputs, options, at)
    expected = op_module("chunk_scan").chunk_scan(_map(inputs, torch.Tensor.double), options).output
    return {"decode": relative_error(actual, expected)}


def check_cases() -> list[Case]:
    """What is checked, the most important first: defaults, then every configuration."""
    configs = range(max(len(listed) for listed in op_module("triton_configs").CONFIGS.values()))
    cases = [Case(memory, "bfloat16") for memory in MEMORIES]
    cases += [Case(memory, dtype, None, True) for memory in ("h256", "depth1") for dtype in DTYPES]
    cases += [Case(dtype=dtype, rules=True, **fields) for fields in RULE_CASES for dtype in DTYPES]
    cases += [Case(memory, "bfloat16", config) for memory in ("h256", "h128", "depth1") for config in configs]
    cases += [
        Case(memory, dtype, config) for dtype in DTYPES[1:] for memory in ("h256", "depth1") for config in configs
    ]
    return cases


def run_checks(clock: Clock) -> list[dict[str, Any]]:
    """Each case in a process of its own, as many at once as there are cores: compilation takes most of the time."""
    end = clock.left() - CHECK_SHARE * clock.budget

    def run(case: Case) -> dict[str, Any]:
        left = clock.left() - end
        outcome = {"case": case._asdict(), "allowed": case.allowed(), "errors": {}, **OUT_OF_TIME}
        if left < 20:
            return outcome
        command = [sys.executable, __file__, json.dumps(case._asdict())]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return outcome
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            if case.config is not None and "OutOfResources" in lines[-1]:
                return outcome | DOES_NOT_FIT
            return outcome | {"problem": f"failed: {lines[-1][:300]}"}
        errors = json.loads(done.stdout)
        wrong = [name for name, error in errors.items() if not error <= case.allowed()]
        return outcome | {"errors": errors, "problem": f"wrong: {', '.join(wrong)}" if wrong else None}

    outcomes = []
    with ThreadPoolExecutor(min(max(1, (os.cpu_count() or 2) - 2), 14)) as pool:
        for outcome in pool.map(run, check_cases()):
            outcomes.append(outcome)
            clock.say(
                f"{' '.join(str(x) for x in list(outcome['case'].values())[:6])}: {outcome['problem'] or 'right'}"
            )
    return outcomes


def is_red(check: dict[str, Any]) -> bool:
    return check["problem"] not in (None, OUT_OF_TIME["problem"], DOES_NOT_FIT["problem"])


def is_right(checks: list[dict[str, Any]], memory: str, config: int | None) -> bool:
    wanted = Case(memory, "bfloat16", config)._asdict()
    return any(check["case"] == wanted and check["problem"] is None for check in checks)


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    print(json.dumps(errors_of(case, "cuda")))


if __name__ == "__main__":
    main()
