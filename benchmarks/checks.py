# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What must hold before anything is timed: a benchmark that finds something wrong ends with exit code 1."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn
from unittest import mock

import torch

from transformers_titans import memory_layer
from transformers_titans.memory_ops import neural_memory


def refuse(message: str) -> NoReturn:
    """Ends the benchmark with exit code 1: what is wrong must not be timed."""
    raise SystemExit(f"not timed: {message}")


def refuse_unless_close(name: str, actual: torch.Tensor, reference: torch.Tensor, tolerance: float) -> float:
    """The relative error (RMS over RMS) of ``actual``; refuses to go on if it is above the tolerance or not finite."""
    if actual.shape != reference.shape:
        refuse(f"{name} has the shape {tuple(actual.shape)}, expected {tuple(reference.shape)}")
    actual, reference = actual.detach().double(), reference.detach().double()
    scale = reference.square().mean().sqrt().item()
    error = (actual - reference).square().mean().sqrt().item() / (scale or 1.0)
    if not error <= tolerance:
        refuse(f"{name} differs by {error:.1e} of its size, allowed {tolerance:.1e}")
    return error


@contextlib.contextmanager
def token_by_token() -> Iterator[None]:
    """Our layers compute their memory in the form that all others are held to."""

    def by_token(*args, **options):
        return neural_memory(*args, **(options | {"backend": "recurrent"}))

    with mock.patch.object(memory_layer, "neural_memory", by_token):
        yield


@contextlib.contextmanager
def products_in(precision: torch.dtype) -> Iterator[None]:
    """The context in which matrix products are taken in bfloat16, or as the tensors' dtypes say.

    Backward passes belong inside too: the memory's follow torch's switch for float32 products, not autocast.
    """
    if precision != torch.bfloat16:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", precision):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def refuse_unless_alike(
    what: str,
    run: Callable[[torch.nn.Module, torch.dtype], dict[str, torch.Tensor]],
    module: torch.nn.Module,
    tolerances: dict[torch.dtype, float],
) -> dict[str, float]:
    """Holds a module's results to those that it has token by token in float64.

    Args:
        what: the module's name in messages.
        run: named results of a module, such as its output and its gradients, in the given precision of products; the
            module is float64 for float64, else float32.
        module: in float32, to which it returns.
        tolerances: by precision, the relative error allowed in each result; in bfloat16, which leaves little of the
            smallest gradients, in all results as one vector.

    Returns:
        The largest relative error by precision.
    """
    with token_by_token():
        reference = run(module.double(), torch.float64)
    errors = {}
    for precision, tolerance in tolerances.items():
        results, expected = run(module if precision == torch.float64 else module.float(), precision), reference
        module.double()
        name = str(precision).removeprefix("torch.")
        if precision == torch.bfloat16:
            results, expected = ({"all of": torch.cat([t.flatten() for t in r.values()])} for r in (results, expected))
        errors[name] = max(
            refuse_unless_close(f"{key} of {what}, {name}", results[key], expected[key], tolerance) for key in expected
        )
    module.float()
    return errors
