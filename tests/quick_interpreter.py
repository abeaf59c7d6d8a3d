# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what takes it two thirds of its time and changes nothing."""

import contextlib
from dataclasses import replace
from unittest import mock

from triton.runtime import interpreter


@contextlib.contextmanager
def quick_interpreter():
    """While this context is open, kernels are interpreted with two things left out.

    The interpreter computes of each integer whether it overflows and, unless it debugs, does not look at the answer.
    And it replaces all of `triton.language` anew at each call of a function in a kernel; here once a launch for each
    module of such functions.
    """
    builder = interpreter.interpreter_builder
    with (
        mock.patch.object(interpreter, "_patch_lang", _patched_once_a_launch(interpreter._patch_lang)),
        mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


def _patched_once_a_launch(patch):
    patched = set()

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

    return patch_once
