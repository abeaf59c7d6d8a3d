# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for GPUs that are not there, within their limits; the kept table says what they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")
from transformers_titans.triton_configs import CONFIGS, DEFAULTS, config_for  # noqa: E402


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KEPT = json.loads(BENCHMARKS.joinpath("results", "kernels.json").read_text())
REMAKE = "run: python benchmarks/kernel_table.py"


@pytest.fixture
def kernel_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return pytest.importorskip("kernel_table")


def run_uninterpreted(code: str):
    """What ``code`` prints as JSON in a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 100])
def test_default_kernels_compile_within_limits(kernel_table, target):
    made = run_uninterpreted(
        "import json, triton, kernel_table\n"
        f"rows = kernel_table.make_rows(memories=['h256'], targets=[{target}])\n"
        "print(json.dumps([triton.__version__, [row._asdict() for row in rows]]))"
    )
    version, rows = made[0], [kernel_table.Row(**row) for row in made[1]]
    assert [complaint for row in rows for complaint in kernel_table.complaints(row)] == []
    if version == KEPT["triton"]:
        kept = [row for row in KEPT["rows"] if row["memory"] == "h256" and row["target"] == target]
        assert made[1] == kept, REMAKE


@pytest.mark.slow
@pytest.mark.parametrize("rule, memory", [("dla", "h256"), ("swla", "depth1")])
def test_kernels_of_other_rules_compile_within_limits(kernel_table, rule, memory):
    made = run_uninterpreted(
        "import json, kernel_table\n"
        f"rows = kernel_table.make_rows(memories=[{memory!r}], targets=[90], rule={rule!r})\n"
        "print(json.dumps([row._asdict() for row in rows]))"
    )
    # A matrix memory's factors under -<M(k), v> are its keys and values: for them there is no product to take.
    without = ("factors", "decode") if rule == "swla" else ()
    rows = [kernel_table.Row(**row) for row in made]
    assert [(row.kernel, row.tensor_instructions) for row in rows if row.kernel in without] == [
        (w, 0) for w in without
    ]
    rows = [row for row in rows if row.kernel not in without]
    assert [complaint for row in rows for complaint in kernel_table.complaints(row)] == []


def test_kept_table_is_within_limits(kernel_table):
    rows = [kernel_table.Row(**row) for row in KEPT["rows"]]
    assert [complaint for row in rows for complaint in kernel_table.complaints(row)] == []


def test_kept_table_is_whole(kernel_table):
    have = {(row["kernel"], row["memory"], row["target"]) for row in KEPT["rows"]}
    want = {(k, m, t) for k in CONFIGS for m in kernel_table.MEMORIES for t in kernel_table.TARGETS}
    assert have == want, REMAKE


def test_kept_table_has_the_default_configurations(kernel_table):
    for row in KEPT["rows"]:
        memory = kernel_table.MEMORIES[row["memory"]]
        hidden = 64 * memory.get("expansion", 1)
        config = config_for(row["kernel"], 64, hidden, 64, divmod(row["target"], 10))
        assert {name: row[name] for name in config._fields} == config._asdict(), f"{row['kernel']}: {REMAKE}"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shared_kib": 163.5}, "needs 163.5 KiB of shared memory, the card has 163"),
        ({"registers": 256}, "needs 256 registers"),
        ({"tensor_memory": 640}, "needs 640 columns of tensor memory"),
        ({"tensor_instructions": 0}, "has no tensor-core instructions"),
        ({"spill_loads_in_loops": 1}, "spills inside loops: 0 stores and 1 loads"),
    ],
)
def test_what_is_complained_about(kernel_table, change, message):
    good = kernel_table.Row("writer", "h256", 80, 64, 4, 1, 0, 255, 163.0, 512, 0, 0, 0, 9, 9, 1, 100)
    assert kernel_table.complaints(good) == []
    (complaint,) = kernel_table.complaints(good._replace(**change))
    assert complaint.startswith("writer, h256, sm_80: ") and message in complaint


def test_loops_of_machine_code(kernel_table):
    from sass import _inside_loops, _Instruction

    code = [
        _Instruction(0x00, "", "MOV", "R1, R2"),
        _Instruction(0x10, "", "IADD", "R1, R1, 0x1"),
        # Waiting code lies behind the end and comes back: it does not make 0x20 to 0x60 a loop.
        _Instruction(0x20, "!P0", "BRA", "0x60"),
        _Instruction(0x30, "P1", "BRA", "0x10"),
        _Instruction(0x40, "", "STL", "[R1], R2"),
        _Instruction(0x50, "", "EXIT", ""),
        _Instruction(0x60, "", "SYNCS", "P0"),
        _Instruction(0x70, "!P0", "BRA", "0x60"),
        _Instruction(0x80, "", "BRA", "0x40"),
    ]
    assert _inside_loops(code) == {0x10, 0x20, 0x30, 0x60, 0x70}


@pytest.mark.parametrize("kernel", list(CONFIGS))
def test_defaults_are_listed(kernel):
    assert {line.config for line in DEFAULTS.get(kernel, ())} <= set(CONFIGS[kernel])


@pytest.mark.parametrize("kernel", list(CONFIGS))
def test_tiles_are_no_wider_than_the_layer(kernel):
    for hidden in (16, 48, 256):
        widest = 1 << (hidden - 1).bit_length()
        assert config_for(kernel, 16, hidden, 64, (9, 0)).tile <= widest


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="kernel is 'wirter', expected one of .*'writer'"):
        config_for("wirter", 64, 256, 64, None)
