# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The same numbers in every run: one thread, one seed per test, global torch settings restored behind each test.

Where there is no GPU, Triton kernels are interpreted.
"""

import gc
import os
import random
from importlib.util import find_spec

import pytest
import torch


if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether it is interpreted, hence before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped where there is none")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The order of a sum depends on the number of threads, and tiny products only lose time in a thread pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def rare_collections():
    """The collector walks over all that torch and transformers hold: often, a tenth of the time that traces take."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session", autouse=True)
def quick_kernels():
    """Where kernels are interpreted, no slower than that takes."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    from quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(autouse=True)
def seeded():
    """One seed per test, and no test leaves its default dtype, precision or gradient mode to the next one."""
    random.seed(0)
    torch.manual_seed(0)
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)


@pytest.fixture
def soon_long_calls(monkeypatch):
    """A recording cache keeps a state 16 columns before the end of calls of more than 40, in place of 128 and 256."""
    from transformers_titans import modeling_titans

    monkeypatch.setattr(modeling_titans, "LONG_CALL", 40)
    monkeypatch.setattr(modeling_titans, "ROLLBACK", 16)


@pytest.fixture
def nan_filled_empty():
    """`torch.empty` and its kin give NaN instead of whatever the memory held, so that reading before writing shows."""
    was_on, was_filled = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was_on)
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
