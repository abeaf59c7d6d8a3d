# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: rounds in turns, ratios with their spread, peak memory, and where a figure comes from.

Contenders are timed in one process, after a warm-up, in rounds: each round runs every contender once, and another one
first each time. A ratio is taken inside each round, so that a machine that slows down for a while slows both sides;
what is reported is the median of the rounds' ratios, with the lowest and the highest.

Peak memory is measured from outside torch: the high-water mark of the process's resident memory during a call, above
what was resident before it. Each contender has a process of its own, which has run a short call first, so that
libraries and thread pools are not counted. Unlike the sum of torch's own allocations it contains what matrix libraries
take beside them, and what the allocator cannot give back.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from checks import refuse
from tqdm import tqdm


RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "titans-pytorch", "memory-caching")


class Spread(NamedTuple):
    """Median, lowest and highest value over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def alternate(
    contenders: dict[str, Callable[[], None]],
    rounds: int,
    label: str,
    before: dict[str, Callable[[], None]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call, by contender and round, after one call of each that is not counted.

    Args:
        before: what a contender does before each of its calls while no clock runs.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with tqdm(total=(rounds + 1) * len(names), desc=label) as bar:
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if before is not None:
                    before[name]()
                gc.collect()
                start = time.perf_counter()
                contenders[name]()
                elapsed = time.perf_counter() - start
                if number:
                    times[name].append(elapsed)
                bar.update()
    return times


def speedup(times: dict[str, list[float]], name: str, over: str) -> Spread:
    """How many times faster ``name`` is than ``over``."""
    return Spread.of([b / a for a, b in zip(times[name], times[over], strict=True)])


def peak_memory(build: Callable, *arguments) -> int:
    """Bytes that a call needs above what was resident before it, measured in a process of its own.

    Args:
        build: a function of a module, called as ``build(*arguments)`` in the new process; returns two functions: a
            short call to warm up with, and the call to measure.
    """
    return in_child(_measure_peak, build, *arguments)


def in_child(function: Callable, *arguments):
    """``function(*arguments)`` in a new process with as many threads; what it returns."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, torch.get_num_threads(), function, arguments))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if process.exitcode:
        refuse(f"{function.__name__}{arguments} ended with exit code {process.exitcode}")
    return result


def _send(sender, num_threads: int, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(num_threads)
    sender.send(function(*arguments))


def _measure_peak(build: Callable, *arguments) -> int:
    warm_up, call = build(*arguments)
    warm_up()
    before = reset_peak()
    call()
    return resident_bytes("VmHWM") - before


def reset_peak() -> int:
    """Gives freed memory back, begins a new high-water mark, and returns the bytes that are resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """VmRSS: resident now; VmHWM: the most since `reset_peak`. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no field {field!r}")


def processor() -> tuple[str, list[str]]:
    """The processor's model, and by the kernel's names what it has for bfloat16 products. Linux only."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return model, []
    fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in fields.items()}
    return facts.get("model name", model), [
        flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()
    ]


def without_emulated(contenders: Sequence[str], in_bfloat16: Sequence[str]) -> tuple[str, ...]:
    """The contenders, without those of bfloat16 products where the processor has none: emulated, they take ten times
    as long as in float32, and show nothing."""
    has_products = bool(processor()[1])
    return tuple(name for name in contenders if has_products or name not in in_bfloat16)


def environment() -> dict:
    """What a figure depends on beside the code."""
    model, products = processor()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": f"{model} ({', '.join(products) or 'no bfloat16 products'})",
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = any(not line.endswith("/results/") and "benchmarks/results/" not in line for line in _changes(git))
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{', with changes' if changed else ''}"


def _changes(git: Callable[..., str]) -> list[str]:
    return git("status", "--porcelain", "--untracked-files=no").splitlines()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def report(name: str, title: str, results: dict, lines: Sequence[str], keep: bool) -> None:
    """Prints the lines under a title, the command and the environment; with ``keep`` writes them to results/NAME.md,
    and the results to NAME.json. What a shortened trial shows is not kept."""
    where = environment()
    command = f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
    packages = ", ".join(f"{package} {version}" for package, version in where["packages"].items() if version)
    head = [
        f"# {title}",
        "",
        f"`{command}`, {where['date']}, commit {where['commit']}. {where['processor']}, "
        f"{where['torch threads']} threads on {where['cores']} cores, Python {where['python']}, {packages}.",
        "",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    print(text)
    if keep:
        RESULTS.mkdir(exist_ok=True)
        record = {"command": command, "environment": where, **results}
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
