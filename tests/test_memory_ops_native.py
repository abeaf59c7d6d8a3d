# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The scan in C++: against the chunked form in float64, its precision, its memory, its threads, and how it is built.

`test_memory_ops.py` holds it against the oracle, too.
"""

import os
import statistics
import subprocess
import sys

import pytest
import torch

from titans_testing import (
    assert_close,
    logits_of,
    make_inputs,
    parameter_gradients,
    random_ids,
    relative_error,
    run_op,
    tiny_model,
)
from transformers_titans import memory_ops_native, native_library
from transformers_titans.chunk_scan import ScanInputs, ScanOptions, chunk_scan
from transformers_titans.memory_ops_native import SOURCE, native_scan
from triton_testing import Guards, map_inputs, scan_inputs, scan_options


# Sums of products in another order, a few of them one after another.
EXACT = 1e-12


def on_cpu(inputs: ScanInputs) -> ScanInputs:
    return ScanInputs.unflatten([t if t is None else t.cpu() for t in inputs.flatten()], len(inputs.weights))


def scan_and_gradients(scan, inputs: ScanInputs, options: ScanOptions, copy=torch.clone) -> dict[str, torch.Tensor]:
    """Output, state, inner losses, and every gradient of a loss on output and state."""
    floats = [i for i, t in enumerate(inputs.flatten()) if t is not None and t.is_floating_point()]
    leaves = [t if t is None else copy(t.detach()) for t in inputs.flatten()]
    for i in floats:
        leaves[i].requires_grad_()
    result = scan(ScanInputs.unflatten(leaves, options.depth), options)
    names = {"output": result.output}
    for group in ("weights", "momentum") if options.write else ():
        names |= {f"{group}.{i}": t for i, t in enumerate(getattr(result, group))}
    generator = torch.Generator().manual_seed(1)
    bars = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in names.values()]
    wanted = [leaves[i] for i in floats]
    gradients = torch.autograd.grad(list(names.values()), wanted, bars, allow_unused=True, materialize_grads=True)
    if result.surprise is not None:
        names["surprise"] = result.surprise
    return names | {f"gradient {i}": g for i, g in zip(floats, gradients, strict=True)}


def assert_equal_scans(inputs: ScanInputs, ratio: float = EXACT, **options) -> None:
    inputs = on_cpu(inputs)
    facts = scan_options(inputs, **options)
    expected = scan_and_gradients(chunk_scan, inputs, facts)
    actual = scan_and_gradients(native_scan, inputs, facts)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, actual[name], tensor, ratio)


# Sizes on both sides of a vector of 8 float64 and of a tile of 6, 8, 12 or 16 rows.
SIZES = [(1, 1, 1), (4, 3, 7), (8, 8, 8), (9, 16, 33), (17, 5, 40), (24, 12, 25), (40, 9, 9), (64, 32, 64)]


@pytest.mark.parametrize(("b", "D", "h"), SIZES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_equals_chunked_for_every_size(b, D, h, depth):
    # LN of a single number is 0 whatever it is, and its gradient nothing but rounding.
    assert_equal_scans(scan_inputs(N=3, G=3, b=b, D=D, h=h, depth=depth, norm=D > 1))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("h", [5, 40])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_equals_chunked_for_every_network(depth, h, norm, residual):
    inputs = scan_inputs(N=3, b=9, D=12, h=h, depth=depth, norm=norm, forget_to=True, full=True, restart=True)
    assert_equal_scans(inputs, residual=residual)


@pytest.mark.parametrize("b_q", [1, 3, 8, 17])
@pytest.mark.parametrize("write", [True, False])
def test_reads_the_last_tokens_of_a_chunk(b_q, write):
    assert_equal_scans(scan_inputs(N=1, G=4, b=17, b_q=b_q, h=20, forget_to=True, restart=True), write=write)


# All chunks in one span between two kept states, several spans, and a span of each chunk.
@pytest.mark.parametrize("b", [5, 40, 70])
def test_some_chunks_stay_open_and_some_rows_begin_anew(b):
    assert_equal_scans(scan_inputs(N=9, G=4, b=b, D=8, full=True, restart=True))


@pytest.mark.parametrize("value", [-1e12, -1e4, -30.0, 0.0, 30.0, 1e4, 1e12])
def test_activations_at_their_limits(value):
    """One token, whose hidden values are all ``value``; beyond some tens the activation is 0 or z to the last bit."""
    inputs = scan_inputs(N=1, G=1, b=1, D=4, h=4, norm=False)
    k = torch.ones_like(inputs.k) / 2
    weights = (torch.full_like(inputs.weights[0], value / 2), inputs.weights[1])
    assert_equal_scans(inputs._replace(k=k, q=k, weights=weights), ratio=1e-9)


@pytest.mark.parametrize("sizes", [(64, 64, 256), (16, 32, 64), (9, 12, 20)])
def test_float32_is_as_precise_as_the_chunked_form(sizes):
    """Each result's error, over several draws, beside that of PyTorch's own products."""
    b, D, h = sizes
    ratios = []
    for seed in range(4):
        torch.manual_seed(seed)
        inputs = on_cpu(scan_inputs(N=2, b=b, D=D, h=h))
        options = scan_options(inputs)
        exact = scan_and_gradients(chunk_scan, inputs, options)
        narrow = map_inputs(torch.Tensor.float, inputs)
        errors = [
            {name: relative_error(t, exact[name]) for name, t in scan_and_gradients(scan, narrow, options).items()}
            for scan in (native_scan, chunk_scan)
        ]
        assert max(errors[0].values()) < 1e-5
        ratios += [errors[0][name] / errors[1][name] for name in exact]
    assert statistics.geometric_mean(ratios) < 1.25


def with_products(inputs: ScanInputs) -> tuple[ScanInputs, ScanOptions]:
    inputs = map_inputs(torch.Tensor.float, on_cpu(inputs))
    return inputs, scan_options(inputs)._replace(products=torch.bfloat16)


ROUNDED = [{"b": 24, "h": 40}, {"b": 9, "D": 12, "h": 20, "b_q": 5}, {"depth": 1}, {"depth": 3, "b": 16}]


@pytest.mark.parametrize("sizes", ROUNDED)
def test_operands_rounded_to_bfloat16(sizes):
    exact_inputs = on_cpu(scan_inputs(**sizes, forget_to=True))
    exact = scan_and_gradients(chunk_scan, exact_inputs, scan_options(exact_inputs))
    actual = scan_and_gradients(native_scan, *with_products(exact_inputs))
    for name, tensor in exact.items():
        assert_close(name, actual[name], tensor, 8 * 2.0**-8)
    assert relative_error(actual["output"], exact["output"]) > 2.0**-13, "nothing was rounded"


@pytest.mark.parametrize("sizes", ROUNDED)
def test_rounding_is_the_same_without_a_processor_that_multiplies_pairs(sizes, monkeypatch):
    inputs, options = with_products(scan_inputs(**sizes, forget_to=True))
    expected = scan_and_gradients(native_scan, inputs, options)
    library = native_library.native_library(SOURCE, "TITANS_NO_BFLOAT16")
    monkeypatch.setattr(memory_ops_native, "native_library", lambda source: library)
    actual = scan_and_gradients(native_scan, inputs, options)
    for name, tensor in expected.items():
        # A sum in another order now and then lands on the other side of a border between two bfloat16.
        assert_close(name, actual[name], tensor, 2.0**-9)


GUARDED = [
    {"b": 9, "D": 5, "h": 7, "b_q": 4},
    {"b": 9, "D": 5, "h": 7, "b_q": 0},
    {"b": 16, "depth": 3},
    {"b": 24, "depth": 1},
]


@pytest.mark.parametrize("products", [None, torch.bfloat16])
@pytest.mark.parametrize("sizes", GUARDED)
def test_nothing_is_read_before_it_is_written_or_beside_what_was_given(sizes, products, monkeypatch, nan_filled_empty):
    """Tensors lie in guards of NaN, and so do results; the library's own buffers are NaN at first."""
    library, guards = native_library.native_library(SOURCE, "TITANS_POISON"), Guards()
    inputs = map_inputs(
        torch.Tensor.float, on_cpu(scan_inputs(N=3, G=3, **sizes, forget_to=True, full=True, restart=True))
    )
    options = scan_options(inputs)._replace(products=products)
    expected = scan_and_gradients(native_scan, inputs, options)
    monkeypatch.setattr(memory_ops_native, "native_library", lambda source: library)
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: guards(torch.full(t.shape, torch.nan)))
    actual = scan_and_gradients(native_scan, inputs, options, copy=guards)
    guards.check()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(threads):
    inputs = map_inputs(torch.Tensor.float, on_cpu(scan_inputs(N=4, G=5, b=9, restart=True)))
    options = scan_options(inputs)
    expected = scan_and_gradients(native_scan, inputs, options)
    torch.set_num_threads(threads)
    try:
        actual = scan_and_gradients(native_scan, inputs, options)
    finally:
        torch.set_num_threads(1)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_a_call_without_gradients_gives_the_same_numbers():
    inputs = map_inputs(torch.Tensor.float, on_cpu(scan_inputs(N=5, full=True, restart=True)))
    options = scan_options(inputs)
    with torch.no_grad():
        result = native_scan(inputs, options)
    expected = scan_and_gradients(native_scan, inputs, options)
    assert torch.equal(result.output, expected["output"])
    assert torch.equal(result.momentum[1], expected["momentum.1"])


def test_a_model_trains_and_decodes_with_it():
    model, ids = tiny_model(dtype=torch.float64, memory_backend="native"), random_ids(2, 31)
    reference = tiny_model(dtype=torch.float64, memory_backend="chunked")
    expected = parameter_gradients(reference, reference(ids, labels=ids).loss)
    for name, gradient in parameter_gradients(model, model(ids, labels=ids).loss).items():
        assert_close(name, gradient, expected.pop(name), 1e-9)
    assert not expected
    assert_close("logits", logits_of(model, ids), logits_of(reference, ids), 1e-10)
    decode = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **decode), reference.generate(ids, **decode))


def test_a_compiled_function_calls_it_outside_the_graph():
    inputs = make_inputs(length=14)
    compiled = torch.compile(lambda: run_op(inputs, "native").output * 2, backend="eager")
    assert_close("output", compiled(), run_op(inputs, "chunked").output * 2, EXACT)


def test_takes_tensors_of_one_dtype_on_a_cpu():
    inputs = on_cpu(scan_inputs())
    with pytest.raises(
        ValueError, match=r'torch.bfloat16, expected torch.float32 or torch.float64; backend="chunked"'
    ):
        native_scan(map_inputs(torch.Tensor.bfloat16, inputs), scan_options(inputs))
    with pytest.raises(ValueError, match="torch.float32, expected q's, torch.float64"):
        native_scan(inputs._replace(k=inputs.k.float()), scan_options(inputs))
    reason = memory_ops_native.reason_against(torch.float32, torch.empty(1, device="meta"), None)
    assert reason == "q is on meta, expected cpu"


SCRIPT = """
import torch
from transformers_titans import MemoryState, neural_memory
x, gate = torch.randn(1, 8, 1, 4), torch.rand(1, 8, 1)
state = MemoryState.initial([torch.randn(1, 4, 4)], 1)
neural_memory(x, x, x, gate, gate, gate, state, chunk_size=4, backend="auto")
print("auto asks for no compiler", flush=True)
neural_memory(x, x, x, gate, gate, gate, state, chunk_size=4, backend="native")
"""


def run_script(**environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | environment
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)


def test_without_a_compiler_the_error_says_what_to_install(tmp_path):
    run = run_script(PATH=str(tmp_path), CXX="", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert run.stdout == "auto asks for no compiler\n"
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith('ImportError: backend="native" compiles C++ on first use, and neither c++, g++ nor clang++')
    assert "apt install g++" in last


@pytest.fixture
def fresh_library(monkeypatch, tmp_path):
    """`native_library` without what it remembers, and with an empty cache folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return native_library.native_library.__wrapped__


def test_a_compiler_that_is_named_and_missing(fresh_library, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(ImportError, match=r"\$CXX, 'no-such-compiler', is not on PATH"):
        fresh_library(SOURCE)


def test_a_compiler_that_fails(fresh_library, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"compiling memory_ops_native.cpp failed: false -O3"):
        fresh_library(SOURCE)
    assert not list(tmp_path.rglob("*.so"))


def test_remote_code_without_the_sources(fresh_library, monkeypatch):
    """A checkpoint carries Python files alone."""
    with pytest.raises(ImportError, match="install the package transformers-titans"):
        fresh_library("absent.cpp")


def test_a_library_that_is_kept_is_not_built_again(monkeypatch):
    kept = native_library.native_library(SOURCE)
    monkeypatch.setattr(native_library, "_build", lambda *_: pytest.fail("built again"))
    assert native_library.native_library.__wrapped__(SOURCE)._name == kept._name
