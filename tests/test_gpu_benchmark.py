# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/gpu.py` without a GPU: its checks on interpreted kernels, and its stages with the clock taken out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")
from transformers_titans.triton_configs import CONFIGS  # noqa: E402


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# A bare machine has torch and triton; whatever needs more must not be imported.
BARE = "import sys; sys.modules.update(transformers=None, tqdm=None, safetensors=None, huggingface_hub=None)\n"
QUICK = "from quick_interpreter import quick_interpreter; context = quick_interpreter(); context.__enter__()\n"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(BENCHMARKS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def printed(code: str):
    """What ``code`` prints last, as JSON, on a bare machine that interprets kernels."""
    done = run_python(BARE + QUICK + code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_a_gpu_it_says_so():
    code = "import sys, gpu; sys.argv = ['gpu.py']; sys.exit(gpu.main())"
    done = run_python(BARE + code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


@pytest.mark.slow
def test_checks_find_the_kernels_right():
    # Memory, dtype, number of the launch configuration, and whether all options of the memory are on.
    chosen = [("h64", "bfloat16", 1, True), ("h128", "float32", None, False), ("depth1", "float16", 0, True)]
    found = printed(
        "import json\n"
        "from gpu_checks import Case, errors_of\n"
        "sizes = dict(num_chunks=2, groups=2, chunk_size=16, head_dim=16)\n"
        f"cases = [Case(*chosen, **sizes) for chosen in {chosen!r}]\n"
        "print(json.dumps([(errors_of(case, 'cpu'), case.allowed()) for case in cases]))"
    )
    always = {"output", "decode", "weights 0", "gradient of q", "gradient of weights 0", "gradient of eta"}
    for (*case, rules), (errors, allowed) in zip(chosen, found, strict=True):
        assert always <= set(errors), case
        assert ("gradient of forget_to 0" in errors) == rules, case
        assert max(errors.values()) <= allowed, case


@pytest.mark.slow
def test_checks_find_the_kernels_of_every_rule_right():
    cases = printed(
        "import json\n"
        "from gpu_checks import RULE_CASES, Case, errors_of\n"
        "sizes = dict(num_chunks=2, groups=2, chunk_size=16, head_dim=16)\n"
        "cases = [Case(dtype='float32', rules=True, **fields, **sizes) for fields in RULE_CASES]\n"
        "print(json.dumps([(case.rule, case.plain, errors_of(case, 'cpu'), case.allowed()) for case in cases]))"
    )
    assert {(rule, plain) for rule, plain, _, _ in cases} == {
        ("dla", False),
        *((rule, True) for rule in ("titans", "linear_attention", "swla")),
    }
    for rule, _, errors, allowed in cases:
        assert {"output", "decode", "gradient of forget_to 0"} <= set(errors), rule
        assert max(errors.values()) <= allowed, rule


def test_checks_find_a_wrong_kernel():
    errors, allowed = printed(
        "import json\n"
        "from gpu_checks import Case, errors_of\n"
        "from op_package import op_module\n"
        "decode = op_module('triton_decode').decode\n"
        "op_module('triton_decode').decode = lambda *arguments: 1.01 * decode(*arguments)\n"
        "case = Case('depth1', 'float32', num_chunks=1, groups=1, chunk_size=16, head_dim=16)\n"
        "print(json.dumps([errors_of(case, 'cpu'), case.allowed()]))"
    )
    assert [name for name, error in errors.items() if error > allowed] == ["decode"]


# The clock, the card and the kernels are taken out: what is left is what is timed, what is refused, and the report.
DRY_RUN = """
import pathlib, sys
import gpu, gpu_checks, torch
from op_package import op_module

def timed(call, *rest):
    call()
    return 0.5

def timed_kernels(call):
    call()
    return dict.fromkeys(op_module("triton_configs").CONFIGS, 0.25)

def scan(inputs, options):
    tokens = {name: getattr(inputs, name).float() for name in ("q", "k", "v")}
    return op_module("chunk_scan").chunk_scan(inputs._replace(**tokens), options)

def result(case):
    right = {"case": case._asdict(), "allowed": case.allowed(), "errors": {"output": 0.0}, "problem": None}
    wrong = {"errors": {"output": 9.0}, "problem": "wrong: output"}
    return right | (wrong if case.memory == "h64" and case.config is None else {})

op_module("memory_ops_triton").triton_scan = scan
op_module("triton_decode").decode = lambda inputs, options, at: scan(inputs, options).output
gpu.DEVICE, gpu.SIZES, gpu.HEADS, gpu.HEAD_DIM, gpu.CHUNK = "cpu", (gpu.Size(32, 2), gpu.Size(32, 4)), 2, 16, 16
gpu.seconds = gpu.graph_seconds = gpu.peak_bytes = timed
gpu.kernel_seconds, gpu.matrix_rate, gpu.copy_bandwidth = timed_kernels, lambda: 1e12, lambda: 1e12
gpu.time_compiled = lambda clock: []
gpu.run_checks = lambda clock: [result(case) for case in gpu_checks.check_cases()]
torch.cuda.get_device_name = lambda: "A Card (80 GB)"
torch.cuda.get_device_capability = lambda: (9, 0)
torch.set_num_threads(1)
gpu.run_stages(gpu.Clock(BUDGET), pathlib.Path(FOLDER))
"""


def dry_run(folder: Path, budget: float) -> tuple[dict, str]:
    """The results and the page that a run leaves."""
    code = DRY_RUN.replace("BUDGET", str(budget)).replace("FOLDER", repr(str(folder)))
    done = run_python(BARE + code)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "gpu-a-card-80-gb.json").read_text())
    assert results["failed"] == {}
    return results, (folder / "gpu-a-card-80-gb.md").read_text()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run with time for all it wants to do."""
    return dry_run(tmp_path_factory.mktemp("whole_run"), 5000)


def test_all_stages(whole_run):
    results, page = whole_run
    timed = {(row["form"], row["memory"], row["backward"]) for row in results["scans"] if "seconds" in row}
    memories = ("h256", "h128", "depth1")
    assert timed == {
        *(("triton", memory, backward) for memory in memories for backward in (False, True)),
        *(("chunked", memory, backward) for memory in ("h256", "depth1") for backward in (False, True)),
    }
    assert {row["kernel"] for row in results["sweep"]} == set(CONFIGS)
    assert all("seconds" in row or "problem" in row for row in results["peers"])
    assert all("chunked_graph_seconds" in row for row in results["decoding"] if row["memory"] != "h64")
    sections = ("## Are they right?", "## Times", "## One token", "## Configurations", "## Peers")
    assert [line for line in page.splitlines() if line in sections] == list(sections)


def test_what_is_wrong_is_not_timed(whole_run):
    results, page = whole_run
    refused = [row for row in results["scans"] if row["memory"] == "h64"]
    assert refused and all(row["problem"] == "not timed: its check is not green" for row in refused)
    assert all("problem" in row for row in results["decoding"] if row["memory"] == "h64")
    assert "wrong: output" in page


def test_out_of_time_it_writes_what_it_has(tmp_path):
    results, page = dry_run(tmp_path, 1)
    assert results["sweep"] == []
    assert not any("seconds" in row for row in [*results["scans"], *results["peers"]])
    assert "not run: out of time" in page


def test_a_check_that_fails_is_red_and_one_that_does_not_fit_is_not():
    reds = printed(
        "import json, subprocess\n"
        "import gpu_checks\n"
        "ends = {\n"
        "    'wrong': (0, json.dumps({'output': 1.0}), ''),\n"
        "    'not a number': (0, json.dumps({'output': float('nan')}), ''),\n"
        "    'crash': (1, '', 'RuntimeError: illegal memory access'),\n"
        "    'too large': (1, '', 'triton.runtime.errors.OutOfResources: out of resource: shared memory'),\n"
        "    'right': (0, json.dumps({'output': 1e-9}), ''),\n"
        "}\n"
        "cases = [gpu_checks.Case('h256', 'bfloat16', config) for config in (None, 1)]\n"
        "gpu_checks.check_cases = lambda: cases\n"
        "reds = {}\n"
        "for name, end in ends.items():\n"
        "    gpu_checks.subprocess.run = lambda command, **_: subprocess.CompletedProcess(command, *end)\n"
        "    reds[name] = [gpu_checks.is_red(check) for check in gpu_checks.run_checks(gpu_checks.Clock(500))]\n"
        "print(json.dumps(reds))"
    )
    assert reds == {
        "wrong": [True, True],
        "not a number": [True, True],
        "crash": [True, True],
        "too large": [True, False],
        "right": [False, False],
    }
