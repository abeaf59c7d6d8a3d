# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory on a GPU: CUDA events, a warm-up, medians."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction


_WARM_UP = 3
_REPEATS = 20
_LONGEST = 2.0


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call, the work of its Python included where the GPU waits for it."""
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    times, start = [], time.monotonic()
    while len(times) < 3 or (len(times) < _REPEATS and time.monotonic() - start < _LONGEST):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def graph_seconds(call: Callable[[], Any], inner: int = 20) -> float:
    """Median time of a call replayed as a CUDA graph, so that Python's time does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return seconds(graph.replay) / inner


def kernel_seconds(call: Callable[[], Any], repeats: int = 3) -> dict[str, float]:
    """Time that each Triton kernel takes in a call, its launches added up: the least of some calls."""
    call()
    runs = [_one_run(call) for _ in range(repeats)]
    return {kernel: min(run[kernel] for run in runs) for kernel in runs[0]}


def _one_run(call: Callable[[], Any]) -> dict[str, float]:
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    run = JITFunction.run

    def timed(function, *args, **kwargs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = run(function, *args, **kwargs)
        end.record()
        events.append((function.__name__, begin, end))
        return result

    torch.cuda.synchronize()
    # The GPU is kept waiting until everything is queued, so that no kernel's time contains the wait for its launch.
    torch.cuda._sleep(100_000_000)
    with mock.patch.object(JITFunction, "run", timed):
        call()
    torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    for name, begin, end in events:
        total[re.fullmatch(r"_(.*)_kernel", name)[1]] += begin.elapsed_time(end) / 1000
    return dict(total)


def peak_bytes(call: Callable[[], Any]) -> int:
    """What a call allocates at most beside what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def matrix_rate(size: int = 8192) -> float:
    """Floating-point operations per second of a large bfloat16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def copy_bandwidth(num_bytes: int = 2**32) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.zeros(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source))
