# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks refuse to time what is wrong, and count what the formulas need."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from transformers_titans import TitansConfig, TitansNeuralMemory, memory_ops


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/, whose files are scripts beside each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def spoil(monkeypatch) -> None:
    """The fast form's output becomes wrong by about a thousandth."""
    fast = memory_ops.chunked_memory

    def wrong(call):
        result = fast(call)
        return result._replace(output=result.output + 1e-3)

    monkeypatch.setattr(memory_ops, "chunked_memory", wrong)


def run_layer(layer, precision):
    x = torch.linspace(-1, 1, 9 * 32).reshape(1, 9, 32).to(next(layer.parameters()).dtype)
    return {"output": layer(x).hidden_states}


def tiny_layer() -> TitansNeuralMemory:
    return TitansNeuralMemory(TitansConfig(hidden_size=32, num_attention_heads=2, memory_chunk_size=4))


def test_a_right_layer_passes_and_a_wrong_one_is_refused(benchmark, monkeypatch):
    checks = benchmark("checks")
    tolerances = {torch.float64: 1e-10, torch.float32: 1e-5}
    errors = checks.refuse_unless_alike("the layer", run_layer, tiny_layer(), tolerances)
    assert set(errors) == {"float64", "float32"} and errors["float64"] < 1e-10
    spoil(monkeypatch)
    with pytest.raises(SystemExit, match="not timed: output of the layer, float64 differs by"):
        checks.refuse_unless_alike("the layer", run_layer, tiny_layer(), tolerances)


def test_a_wrong_op_is_refused(benchmark, monkeypatch):
    op_rate = benchmark("op_rate")
    assert op_rate.check(4)["float64"] < 1e-10
    spoil(monkeypatch)
    with pytest.raises(SystemExit, match="not timed: output of the op"):
        op_rate.check(4)


def test_the_reference_is_the_token_by_token_form(benchmark, monkeypatch):
    checks, seen = benchmark("checks"), []
    monkeypatch.setattr(memory_ops, "recurrent_memory", lambda call: seen.append(call) or 1 / 0)
    run_layer(tiny_layer(), torch.float32)
    with checks.token_by_token(), pytest.raises(ZeroDivisionError):
        run_layer(tiny_layer(), torch.float32)
    assert len(seen) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.1])
def test_neither_errors_nor_infinities_are_close(benchmark, bad):
    checks, reference = benchmark("checks"), torch.ones(5)
    assert checks.refuse_unless_close("x", reference.clone(), reference, 1e-6) == 0
    with pytest.raises(SystemExit, match="not timed: x differs"):
        checks.refuse_unless_close("x", torch.tensor([1.0, 1, 1, 1, bad]), reference, 1e-6)
    with pytest.raises(SystemExit, match="not timed: x has the shape"):
        checks.refuse_unless_close("x", torch.ones(4), reference, 1e-6)


def test_operations_of_the_op_are_those_of_its_formulas(benchmark):
    op_rate = benchmark("op_rate")
    b, d, h = 64, 64, 256
    state, between, coefficients = 2 * b * d * h, 4 * b * b * (h + d), 2 * b**3
    for kind, expected in {
        "forward": 11 * state + between + coefficients,
        "backward": 22 * state + 2 * between + 4 * coefficients,
        "again": 7 * state + between + coefficients,
    }.items():
        assert op_rate.flops_per_token(b, kind) == pytest.approx(op_rate.HEADS * expected / b), kind


def test_every_round_runs_all_and_begins_with_another(benchmark):
    timing, order = benchmark("timing"), []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.alternate(calls, 2, "", {name: lambda name=name: order.append(f"before {name}") for name in "abc"})
    assert order[::2] == [f"before {name}" for name in order[1::2]]
    assert order[1::2] == list("abc" + "bca" + "cab")
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert timing.speedup({"a": [1.0, 2.0, 1.0], "b": [3.0, 2.0, 2.0]}, "a", "b") == (2.0, 1.0, 3.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="high-water marks are read from Linux's /proc")
def test_peak_memory_is_that_of_the_call(benchmark):
    timing = benchmark("timing")
    torch.ones(40_000_000)
    before = timing.reset_peak()
    assert timing.resident_bytes("VmHWM") - before < 20e6
    torch.ones(20_000_000)
    # The kernel counts pages in batches, and a few that were free before are used again.
    assert timing.resident_bytes("VmHWM") - before == pytest.approx(80e6, rel=0.1)


@pytest.mark.parametrize(("ratio", "peak", "cache"), [(1.09, 124, 5), (1.11, 124, 5), (0.95, 126, 5), (1.0, 100, 6)])
def test_long_contexts_are_judged_by_time_memory_and_cache(benchmark, ratio, peak, cache):
    context, timing = benchmark("context"), benchmark("timing")
    early, late = {"peak bytes": 100e6, "cache bytes": 5e6}, {"peak bytes": peak * 1e6, "cache bytes": cache * 1e6}
    first = {"peak bytes": 1e6, "cache bytes": 1e6}
    results = {
        "decoding": {
            "longest over shortest": dict.fromkeys(("lmm", "mac"), timing.Spread(ratio, ratio, ratio)),
            "cache bytes": dict.fromkeys(("lmm", "mac"), {1024: 5, 65536: 5}),
        },
        "prefill": dict.fromkeys(("lmm", "mac"), {2048: first, 4096: early, 8192: late}),
    }
    lines = context.statements(results)
    assert len(lines) == 4 and all("behind 64k" in line and "behind 1k" in line for line in lines[::2])
    assert all(("NOT within" in line) == (ratio > 1.1) for line in lines[::2])
    assert all(("NOT constant" in line) == (peak > 125 or cache > 5) for line in lines[1::2])
