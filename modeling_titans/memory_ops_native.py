# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""`chunk_scan` in C++ for a processor, compiled on first use: each row and head goes through its chunks on one core,
whose cache holds its weights and momentum (MEMORY.md says what that is worth).

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension.
"""

import ctypes

import torch
from torch.autograd.function import once_differentiable

from .native_library import native_library, pointers
from .scan_inputs import ScanInputs, ScanOptions, ScanResult


SOURCE = "memory_ops_native.cpp"


# What ctypes passes to the library: a graph would hold nothing of it.
@torch.compiler.disable
def native_scan(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """Runs a memory through N chunks (Titans, section 3.2), as `chunk_scan` does.

    Args:
        inputs, options: as for `chunk_scan`, on a CPU, all of float32 or all of float64. Queries, keys, values and
            gates may lie in any order.

    Returns:
        The result, differentiable in every floating-point input except through ``surprise``.

    Raises:
        ValueError: tensors on another device or of another dtype.
        ImportError, RuntimeError: as `native_library`.
    """
    flat = inputs.flatten()
    _check(flat, inputs.mix)
    vectors, gates, rest = flat[:3], flat[3:6], flat[6:]
    flat = [*map(_with_neighbours, vectors), *gates, *(t if t is None else t.contiguous() for t in rest)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat):
        results = _NativeScan.apply(options, *flat)
    else:
        results, _ = _forward(ScanInputs.unflatten(flat, options.depth), options, keep=False)
    return ScanResult.of(results, inputs, options)


def reason_against(dtype: torch.dtype, q: torch.Tensor, mix: torch.Tensor | None) -> str | None:
    """Why the native scan does not take a state of this dtype, for q and shares ``mix``; None if it does."""
    if mix is not None:
        return "mix is given, expected none"
    if q.device.type != "cpu":
        return f"q is on {q.device}, expected cpu"
    if dtype not in (torch.float32, torch.float64):
        return f"dtype of the state is {dtype}, expected torch.float32 or torch.float64"
    return None


def _check(flat: list[torch.Tensor | None], mix: torch.Tensor | None) -> None:
    dtype = flat[0].dtype
    for tensor in flat:
        if tensor is None:
            continue
        reason = reason_against(dtype, tensor, mix)
        if reason is None and tensor.is_floating_point() and tensor.dtype != dtype:
            reason = f"a tensor's dtype is {tensor.dtype}, expected q's, {dtype}"
        if reason is not None:
            raise ValueError(f'{reason}; backend="chunked" takes it')


def _with_neighbours(t: torch.Tensor) -> torch.Tensor:
    """(..., D) with features beside each other."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


class _NativeScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: ScanOptions, *flat: torch.Tensor | None):
        results, kept = _forward(ScanInputs.unflatten(flat, options.depth), options, keep=True)
        ctx.save_for_backward(*flat, kept)
        ctx.options = options
        if options.surprise:
            ctx.mark_non_differentiable(results[-1])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar, *rest):
        options, (*flat, kept) = ctx.options, ctx.saved_tensors
        inputs = ScanInputs.unflatten(flat, options.depth)
        state_bar = rest[: 2 * options.depth] if options.write else ()
        output_bar = _with_neighbours(output_bar)
        given = [kept, output_bar, *(t.contiguous() for t in state_bar)]
        gradients = [_by_token(t) for t in flat[:6]]
        gradients += [t if t is None or t.dtype == torch.bool else torch.empty_like(t) for t in flat[6:]]
        sizes, eps = _sizes(inputs, options, output_bar)
        facts = (sizes, eps, flat[0].element_size(), pointers(flat), pointers(given), pointers(gradients))
        _run(native_library(SOURCE).titans_backward, *facts)
        return None, *(t if t is not None and t.is_floating_point() else None for t in gradients)


def _forward(inputs: ScanInputs, options: ScanOptions, keep: bool):
    """[output, weights and momentum (if written), surprise (if asked for)], and with ``keep`` what the backward needs
    beside the inputs, (G, numbers): `titans::Kept`."""
    library, (sizes, eps) = native_library(SOURCE), _sizes(inputs, options, inputs.q)
    num_chunks, rows, length = inputs.k.shape[:3]
    item_size = inputs.q.element_size()
    output, surprise, kept, state = _by_token(inputs.q), None, None, []
    if options.surprise:
        surprise = inputs.k.new_empty(num_chunks, rows, length)
    if keep:
        library.titans_kept_size.restype = ctypes.c_int64
        kept = inputs.k.new_empty(rows, library.titans_kept_size(sizes, ctypes.c_int64(item_size)))
    if options.write:
        state = [torch.empty_like(t) for t in (*inputs.weights, *inputs.momentum)]
    outputs = pointers([output, surprise, kept, *state])
    _run(library.titans_forward, sizes, eps, item_size, pointers(inputs.flatten()), outputs)
    return [output, *state, *([surprise] if options.surprise else [])], kept


def _by_token(t: torch.Tensor) -> torch.Tensor:
    """Room for a tensor like t (N, G, b, ...) that lies token by token, as a sequence does: `titans::by_token`."""
    return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _sizes(inputs: ScanInputs, options: ScanOptions, output_bar: torch.Tensor) -> tuple[ctypes.Array, float]:
    """`titans::Sizes` and LN's epsilon."""
    (num_chunks, rows, length), num_queries = inputs.k.shape[:3], inputs.q.shape[2]
    rounded, rule = options.products == torch.bfloat16, options.rule
    sizes = [options.depth, num_chunks, rows, length, num_queries]
    sizes += [options.residual, options.write, rounded, rule.dot, rule.sliding]
    sizes += [stride for t in (*inputs[:6], output_bar) for stride in t.stride()[:3]]
    sizes += [inputs.q.shape[3], *(w.shape[-1] for w in inputs.weights)]
    return (ctypes.c_int64 * len(sizes))(*map(int, sizes)), options.norm_eps


def _run(function, sizes: ctypes.Array, eps: float, item_size: int, *places: ctypes.Array) -> None:
    """ctypes lets go of the interpreter's lock meanwhile."""
    threads = ctypes.c_int64(torch.get_num_threads())
    if function(sizes, ctypes.c_double(eps), ctypes.c_int64(item_size), *places, threads):
        raise MemoryError("the native memory op found no memory for its buffers")
