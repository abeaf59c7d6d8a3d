# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on a GPU: are they right, how fast are they, and which configurations are the fastest?

    python benchmarks/gpu.py [--budget 540] [--results benchmarks/results]

One command for a bare machine with torch and triton; nothing is installed and nothing but the two is imported (and
flash-linear-attention and flash-attn where they are there). It ends within its budget of seconds with what it has:

1. every kernel in every configuration of `triton_configs`, in bfloat16, float16 and float32, forward, every gradient
   and decoding, against the chunked form in float64 (`gpu_checks.py`). What is wrong is not timed, and the exit code
   is 1;
2. times of forward, forward and backward, and decoding against the chunked PyTorch form, eager and compiled, and
   against peers; fractions of the measured bfloat16 matrix rate and copy bandwidth; peak memory;
3. the time of each kernel in each configuration.

Writes gpu-<card>.json and gpu-<card>.md into the results folder.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


# Checks run in other processes and leave their compiled kernels here.
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="titans-triton-"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_checks import MEMORIES, OUT_OF_TIME, Clock, is_red, is_right, launched_with, run_checks  # noqa: E402
from gpu_peers import PEERS  # noqa: E402
from gpu_report import markdown  # noqa: E402
from gpu_timing import copy_bandwidth, graph_seconds, kernel_seconds, matrix_rate, peak_bytes, seconds  # noqa: E402
from op_package import op_module, random_inputs, scan_options  # noqa: E402


HERE = Path(__file__).resolve().parent
DEVICE = "cuda"
HEADS, HEAD_DIM, CHUNK = 16, 64, 64


class Size(NamedTuple):
    """T tokens of B * H rows times heads."""

    tokens: int
    groups: int


# The first is the one that everything is compared at.
SIZES = (Size(4096, 64), Size(4096, 256), Size(32768, 64))


def scan_call(scan: Callable, memory: str, size: Size, backward: bool) -> Callable[[], Any]:
    """A call of a scan whose products are taken in bfloat16; the chunked form gets its tensors in float32."""
    ours = scan is op_module("memory_ops_triton").triton_scan
    inputs = random_inputs(
        num_chunks=size.tokens // CHUNK,
        groups=size.groups,
        chunk_size=CHUNK,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16 if ours else torch.float32,
        device=DEVICE,
        **MEMORIES[memory],
    )
    options = scan_options(inputs)
    if not ours:
        options = options._replace(products=torch.bfloat16)
    if not backward:
        return torch.no_grad()(lambda: scan(inputs, options))
    leaves = [t for t in inputs.flatten() if t is not None and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    bar = torch.randn_like(inputs.q)

    def call():
        return torch.autograd.grad(scan(inputs, options).output, leaves, bar, allow_unused=True)

    return call


def useful_flops(memory: str, size: Size, backward: bool) -> float:
    """Floating-point operations of the formulas, and of the backward's recomputation.

    S = 2 b D h is one product of a chunk with a state. Two layers: 11 S forward, 29 S backward; one layer: 5 and 13.
    """
    depth, hidden = MEMORIES[memory]["depth"], HEAD_DIM * MEMORIES[memory].get("expansion", 1)
    state, square = 2 * CHUNK * HEAD_DIM * hidden, CHUNK * CHUNK
    if depth == 2:
        flops = 11 * state + 4 * square * (hidden + HEAD_DIM)
        flops += (29 * state + 12 * square * (hidden + HEAD_DIM)) if backward else 0
    else:
        flops = 5 * state + 4 * square * HEAD_DIM
        flops += (13 * state + 12 * square * HEAD_DIM) if backward else 0
    return flops * size.groups * size.tokens / CHUNK


def time_scans(clock: Clock, checks: list, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Forward, and forward and backward, of our kernels and of the chunked form."""
    forms = {"triton": op_module("memory_ops_triton").triton_scan, "chunked": op_module("chunk_scan").chunk_scan}
    plan = [("triton", memory, size) for size in SIZES for memory in MEMORIES]
    plan[len(MEMORIES) : len(MEMORIES)] = [("chunked", memory, SIZES[0]) for memory in ("h256", "depth1")]
    rows = []
    for (form, memory, size), backward in itertools.product(plan, (False, True)):
        row = {"form": form, "memory": memory, **size._asdict(), "backward": backward}
        if form == "triton" and not is_right(checks, memory, None):
            row["problem"] = "not timed: its check is not green"
        elif clock.left() < 60:
            row |= OUT_OF_TIME
        else:
            row |= measured(partial(scan_call, forms[form], memory, size, backward))
        if "seconds" in row:
            rate = useful_flops(memory, size, backward) / row["seconds"]
            row["of_matrix_rate"] = rate / rates["matrix_flops"]
        rows.append(row)
        clock.say(f"{row}")
    return rows


def measured(build: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Seconds and peak memory of the call that ``build`` returns, or what went wrong."""
    try:
        call = build()
        return {"seconds": seconds(call), "peak_bytes": peak_bytes(call)}
    except Exception as error:
        # Whatever a peer or a compiler raises, the others are still to be timed.
        return {"problem": f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]}
    finally:
        torch.cuda.empty_cache()


def time_decoding(clock: Clock, checks: list, rates: dict[str, float]) -> list[dict[str, Any]]:
    """One token in the last slot of an open chunk: called from Python, and replayed as a CUDA graph."""
    rows = []
    for memory in MEMORIES:
        for groups in (64, 1024):
            if clock.left() < 60 or not is_right(checks, memory, None):
                rows.append({"memory": memory, "groups": groups, "problem": "not run: no time, or its check is red"})
                continue
            rows.append({"memory": memory, "groups": groups} | decoding_row(memory, groups, rates))
            clock.say(f"decode {rows[-1]}")
    return rows


@torch.no_grad()
def decoding_row(memory: str, groups: int, rates: dict[str, float]) -> dict[str, Any]:
    inputs = step_inputs(memory, groups)
    wide = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    options = scan_options(inputs, write=False)._replace(products=torch.bfloat16)
    chunk_scan = op_module("chunk_scan").chunk_scan
    row: dict[str, Any] = {}
    for form, call in {"triton": decode_call(inputs), "chunked": lambda: chunk_scan(wide, options)}.items():
        row |= {f"{form}_seconds": seconds(call), f"{form}_graph_seconds": graph_seconds(call)}
    moved = sum(t.numel() * t.element_size() for t in (*inputs.weights, *inputs.momentum, inputs.k, inputs.v))
    row["of_copy_bandwidth"] = moved / row["triton_graph_seconds"] / rates["copy_bytes"]
    return row


def step_inputs(memory: str, groups: int):
    """One query in one chunk, bfloat16."""
    sizes = {"num_chunks": 1, "num_queries": 1, "groups": groups, "chunk_size": CHUNK, "head_dim": HEAD_DIM}
    return random_inputs(**sizes, dtype=torch.bfloat16, device=DEVICE, **MEMORIES[memory])


def decode_call(inputs) -> Callable[[], Any]:
    options = scan_options(inputs, write=False)
    at = torch.full((inputs.q.shape[1],), CHUNK - 1, dtype=torch.int32, device=DEVICE)
    return lambda: op_module("triton_decode").decode(inputs, options, at)


def time_peers(clock: Clock) -> list[dict[str, Any]]:
    """Other operators on as many tokens, heads and features."""
    rows = []
    size = SIZES[0]
    shape = (size.groups // HEADS, size.tokens, HEADS, HEAD_DIM)
    for (name, build), backward in itertools.product(PEERS.items(), (False, True)):
        row = {"form": name, **size._asdict(), "backward": backward}
        rows.append(row | (measured(partial(build, shape, CHUNK, backward)) if clock.left() > 45 else OUT_OF_TIME))
        clock.say(f"{rows[-1]}")
    return rows


def sweep(clock: Clock, checks: list) -> list[dict[str, Any]]:
    """Seconds of each kernel in a forward and backward, and in decoding, by configuration."""
    module = op_module("triton_configs")
    rows = []
    for memory in ("h256", "h128", "depth1"):
        hidden = HEAD_DIM * MEMORIES[memory].get("expansion", 1)
        for index in range(max(len(listed) for listed in module.CONFIGS.values())):
            if clock.left() < 45 or not is_right(checks, memory, index):
                continue
            with launched_with(index):
                call = scan_call(op_module("memory_ops_triton").triton_scan, memory, SIZES[0], True)
                by_kernel = kernel_seconds(call)
                by_kernel["decode"] = graph_seconds(decode_call(step_inputs(memory, 1024)))
            for kernel, elapsed in by_kernel.items():
                listed = module.CONFIGS[kernel]
                if index >= len(listed):
                    continue
                config = module.clipped(listed[index], hidden)
                default = module.config_for(kernel, HEAD_DIM, hidden, CHUNK, torch.cuda.get_device_capability())
                row = {"kernel": kernel, "memory": memory, "config": list(config), "seconds": elapsed}
                rows.append(row | {"is_default": config == default})
            clock.say(f"configuration {index} of {memory}: {by_kernel}")
    return rows


def time_compiled(clock: Clock) -> list[dict[str, Any]]:
    """The chunked form under torch.compile, in a process that may be ended: it unrolls the loop over chunks."""
    rows = []
    for backward in (False, True):
        row = {"form": "chunked, compiled", "memory": "h256", "tokens": 1024, "groups": 64, "backward": backward}
        if clock.left() < 30:
            rows.append(row | OUT_OF_TIME)
            continue
        command = [sys.executable, str(HERE / "gpu.py"), "--compiled", str(int(backward))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=clock.left() - 10, check=False)
            failed = [row | {"problem": done.stderr[-300:]}]
            rows += failed if done.returncode else json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            rows.append(row | {"problem": "not finished in the time that was left"})
        clock.say(f"compiled: {rows[-1]}")
    return rows


def compiled_rows(backward: bool) -> list[dict[str, Any]]:
    """Eager, compiled and our kernels at 1024 tokens."""
    size, rows = Size(1024, 64), []
    chunk_scan, triton_scan = op_module("chunk_scan").chunk_scan, op_module("memory_ops_triton").triton_scan
    compiled = torch.compile(chunk_scan, dynamic=False)
    for form, scan in (("chunked", chunk_scan), ("chunked, compiled", compiled), ("triton", triton_scan)):
        row = {"form": form, "memory": "h256", **size._asdict(), "backward": backward}
        rows.append(row | measured(partial(scan_call, scan, "h256", size, backward)))
    return rows


def origin() -> dict[str, str]:
    """Where the figures come from."""
    git = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "unknown",
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=540, help="seconds until it stops")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder that is written to")
    parser.add_argument("--compiled", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and torch finds none", file=sys.stderr)
        return 2
    if arguments.compiled is not None:
        print(json.dumps(compiled_rows(bool(arguments.compiled))))
        return 0
    results = run_stages(Clock(arguments.budget), arguments.results)
    print(markdown(results))
    return 1 if results["failed"] or any(is_red(check) for check in results["checks"]) else 0


def run_stages(clock: Clock, folder: Path) -> dict[str, Any]:
    """Runs everything, and writes what there is after each stage: whoever ends this early keeps that."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"origin": origin(), "failed": {}}
    stages = {
        "rates": lambda: {"matrix_flops": matrix_rate(), "copy_bytes": copy_bandwidth()},
        "checks": lambda: run_checks(clock),
        "scans": lambda: time_scans(clock, results["checks"], results["rates"]),
        "decoding": lambda: time_decoding(clock, results["checks"], results["rates"]),
        "sweep": lambda: sweep(clock, results["checks"]),
        "peers": lambda: time_peers(clock),
        "compiled": lambda: time_compiled(clock),
    }
    for stage, run in stages.items():
        try:
            results[stage] = run()
        except Exception as error:
            # Nothing that fails late may cost what was measured early.
            results["failed"][stage] = f"{type(error).__name__}: {error}"
            clock.say(f"{stage} failed: {error}")
            if stage in ("rates", "checks"):
                raise
        folder.joinpath(f"gpu-{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        if "checks" in results:
            folder.joinpath(f"gpu-{name}.md").write_text(markdown(results))
    return results


if __name__ == "__main__":
    sys.exit(main())
