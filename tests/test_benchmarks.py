# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks refuse to time what is wrong, and count what the formulas need."""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformers_titans import TitansConfig, TitansNeuralMemory, memory_ops
from transformers_titans.inner_network import InnerNetwork
from transformers_titans.kept_read import read_kept
from transformers_titans.state_pair import Products


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


@pytest.fixture
def caching(benchmark, monkeypatch):
    """The benchmark of memory caching with models so small that it runs through in seconds."""
    pytest.importorskip("memory_caching", reason='the peer comes with the extra "bench"')
    pytest.importorskip("matplotlib", reason='plots need the extra "bench"')
    module = benchmark("caching")
    sizes = {"WIDTH": 32, "HEADS": 2, "LAYERS": 1, "SEGMENT": 64, "LAYER_LENGTH": 128, "NEW_TOKENS": 2}
    sizes |= {"CONTEXTS": (1024, 2048), "DECODED": (1024, 2048), "MLP": dict.fromkeys(module.OURS, 32) | {"Llama": 96}}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("name", ["no caching", "SSC", "GRM", "Log-Linear++"])
def test_caching_is_held_to_the_oracle(caching, monkeypatch, name):
    errors = caching.check_ours(name)
    assert set(errors) == {"float64", "float32"} and errors["float64"] < 1e-10
    spoil(monkeypatch)
    with pytest.raises(SystemExit, match=f"not timed: output of the layer, {re.escape(name)}, float64 differs by"):
        caching.check_ours(name)


def test_a_peer_without_a_memory_is_refused(caching, benchmark, monkeypatch):
    """From the package's own start weights, which are zero, queries have no influence."""
    caching.check_peer(caching.PEER)
    peer = benchmark("caching_peer")
    monkeypatch.setattr(peer.RandomStart, "init_state", peer.TitansBackend.init_state)
    with pytest.raises(SystemExit, match="not timed: the q_proj.weight of memory-caching or its gradient"):
        caching.check_peer(caching.PEER)


def test_operations_of_reads_are_those_that_are_done(caching, monkeypatch):
    monkeypatch.setattr(caching, "SEGMENT", 4)
    network = InnerNetwork(True, None, None, 1e-6, Products(None, torch.float32))
    q, shares = torch.randn(2, 13, 16, requires_grad=True), torch.randn(2, 13, 3, requires_grad=True)
    weights = [torch.randn(1, 3, 2, *shape, requires_grad=True) for shape in ((16, 64), (64, 16))]
    # torch has no formula for products that are added in place.
    in_place = {torch.ops.aten.baddbmm_: lambda z, x, y, **_: 2 * math.prod(x) * y[-1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        read_kept(q, shares, weights, network, [(4, 13), (8, 13), (12, 13)]).sum().backward()
    assert counter.get_total_flops() == caching.read_operations(13)


def run_kept(module, benchmark, monkeypatch, folder, *arguments: str) -> dict:
    """Runs a benchmark's main, whose results go to ``folder``, and returns what it keeps."""
    for name in ("timing", "plots"):
        monkeypatch.setattr(benchmark(name), "RESULTS", folder)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()
    return json.loads((folder / f"{module.__name__}.json").read_text())


def test_the_benchmark_of_caching_runs_through(caching, benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(caching, "peak_memory", lambda build, name, length: 1000 * length)
    results = run_kept(caching, benchmark, monkeypatch, tmp_path, "--rounds", "1")
    rates = results["training"]["tokens per second"]
    assert set(rates) == {"no caching", "SSC", "GRM", "Log-Linear++", "Llama"}
    assert all(rate[0] > 0 for by_length in rates.values() for rate in by_length.values())
    sizes = results["decoding"]["cache bytes"]
    kept = 2 * 16 * 64 * 2 * 4
    for name, number in {"no caching": 0, "GRM": 16, "SSC": 16}.items():
        # A kept memory, and its key of 2 x 16.
        assert sizes[name]["2048"] - sizes[name]["1024"] == number * (kept + 2 * 16 * 4), name
    assert sizes["Log-Linear++"]["2048"] == sizes["Log-Linear++"]["1024"]
    assert set(results["layer"]["over memory-caching"]) > {"memory-caching", "memory-caching, stopgrad"}
    assert {file.name for file in tmp_path.glob("*.png")} == {"caching.png", "caching_decoding.png"}
    assert "SSC over no caching at 2k" in (tmp_path / "caching.md").read_text()


@pytest.fixture
def extrapolation(benchmark, monkeypatch):
    pytest.importorskip("matplotlib", reason='plots need the extra "bench"')
    module = benchmark("extrapolation")
    sizes = {"LENGTH": 32, "LONGEST": 128, "BORDERS": (0, 32, 64, 128), "BIN": 16, "STEPS": 3, "BATCH": 2}
    for name, value in (sizes | {"HELD_OUT_CHAPTERS": 1}).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "read_chapters", lambda: ["the sea and the wind " * 20, "the wind and the sea " * 20])
    return module


def test_extrapolation_runs_through(extrapolation, benchmark, monkeypatch, tmp_path):
    results = run_kept(extrapolation, benchmark, monkeypatch, tmp_path)
    readers = results["readers"]
    assert results["texts"] == 3 and set(readers) == {
        "plain",
        "reset",
        "average, checkpoint",
        "average, independent",
    }
    for name, reader in readers.items():
        assert len(reader["curve"]) == 8 and all(0 < loss < 10 for loss in reader["curve"])
        # Within the training length nothing is kept yet, and nothing has been reset.
        assert reader["columns"]["0-32"][1] == pytest.approx(0, abs=1e-5)
        assert (abs(reader["columns"]["64-128"][1]) > 1e-6) == (name != "plain")
    assert (tmp_path / "extrapolation.png").exists()


def test_losses_are_taken_by_position(extrapolation):
    plain = torch.arange(1.0, 128).expand(2, -1)
    other = plain + torch.tensor([[1.0], [2.0]]) * (torch.arange(1, 128) >= 64)
    results = extrapolation.summary({"plain": plain, "other": other})
    assert results["plain"]["curve"] == pytest.approx([8, *(16 * n + 7.5 for n in range(1, 8))])
    expected = {"0-32": (16, 0, 0), "32-64": (47.5, 0, 0), "64-128": (97, 1.5, 0.5), "0-128": (64.756, 0.756, 0.252)}
    for columns, values in expected.items():
        assert results["other"]["columns"][columns] == pytest.approx(values, abs=1e-3), columns
