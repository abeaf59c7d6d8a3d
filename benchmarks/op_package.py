# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory op without its package: what a bare machine with torch and triton can import, and inputs for it."""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch


FOLDER = Path(__file__).resolve().parent.parent / "modeling_titans"
NAME = "transformers_titans"


def op_module(name: str) -> ModuleType:
    """A module of the op by name, such as "chunk_scan".

    Its package is this checkout's folder, entered without running its __init__, which needs transformers.
    """
    if NAME not in sys.modules:
        package = ModuleType(NAME)
        package.__path__ = [str(FOLDER)]
        sys.modules[NAME] = package
    return importlib.import_module(f"{NAME}.{name}")


@contextlib.contextmanager
def replaced(**functions: Callable) -> Iterator[None]:
    """While this context is open, these names stand for other functions in every module of the op that has them."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith(f"{NAME}.")]:
            for name in functions.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, functions[name]))
        yield


def random_inputs(
    *,
    num_chunks: int,
    groups: int,
    chunk_size: int,
    head_dim: int,
    depth: int = 2,
    expansion: int = 4,
    num_queries: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
):
    """`ScanInputs` of a memory that is stable: keys and values of length 1, gates near where training starts.

    Args:
        num_chunks, groups, chunk_size, head_dim: N, G, b and D.
        num_queries: b_q; None: b.
        dtype: of q, k and v. Everything else is float32, or float64 if this is.
    """
    generator = torch.Generator(device).manual_seed(0)
    state_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=state_dtype)

    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1).to(dtype)

    def gate(scale):
        shape = (num_chunks, groups, chunk_size)
        return scale * torch.rand(shape, generator=generator, device=device, dtype=state_dtype)

    widths = [head_dim, *[expansion * head_dim] * (depth - 1), head_dim]
    shapes = [(groups, *pair) for pair in zip(widths[:-1], widths[1:], strict=True)]
    # Start weights as in a new model: MEMORY.md.
    scales = [1.0, *(1.5 / math.sqrt(width) for width in widths[1:-1])]
    tokens = (num_chunks, groups, chunk_size, head_dim)
    return op_module("scan_inputs").ScanInputs(
        q=unit(num_chunks, groups, num_queries or chunk_size, head_dim),
        k=unit(*tokens),
        v=unit(*tokens),
        theta=gate(0.1),
        alpha=gate(0.002),
        eta=gate(1.0),
        full=None,
        restart=None,
        norm_weight=(1 + 0.1 * normal(groups, 1, head_dim)) / math.sqrt(head_dim),
        norm_bias=0.1 * normal(groups, 1, head_dim) / math.sqrt(head_dim),
        weights=tuple(scale * normal(*shape) for scale, shape in zip(scales, shapes, strict=True)),
        momentum=tuple(0.01 * normal(*shape) for shape in shapes),
        forget_to=None,
        start_weights=None,
        start_momentum=None,
    )


def scan_options(inputs, write: bool = True, rule: str = "titans"):
    """`ScanOptions` for inputs of `random_inputs`; a matrix memory has no residual."""
    module = op_module("scan_inputs")
    facts = {"write": write, "restart_at": frozenset(), "surprise": False, "rule": module.RULES[rule]}
    residual = not module.RULES[rule].linear
    return module.ScanOptions(depth=len(inputs.weights), residual=residual, norm_eps=1e-6, **facts)
