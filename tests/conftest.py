# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The same numbers in every run: one thread, one seed per test, global torch settings restored behind each test.

Where there is no GPU, Triton kernels are interpreted.
"""

import os
import random
from dataclasses import replace
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
def quick_interpreter():
    """Triton's interpreter without what takes it two thirds of its time and changes nothing.

    It computes whether integers overflow and, unless it debugs, does not look at the answer. And it replaces all of
    `triton.language` anew at each call of a function in a kernel; here once a launch for each module of functions.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        module = id(function.__globals__)
        if module in patched:
            return None
        scope = patch(function)
        patched.add(module)
        undo = scope.restore
        # Called behind a launch alone, for what was replaced before it.
        scope.restore = lambda: (patched.clear(), undo())
        return scope

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
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
