# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""`chunk_scan` on Triton kernels: the form that trains on a GPU.

The forward keeps the states at the chunks' starts where a gradient is wanted; the backward computes everything else
again. Both go through spans of chunks, so that what a span needs in between does not grow with the sequence.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .chunk_scan import ScanInputs, ScanOptions, ScanResult
from .triton_backward_read import ReadGradients, launch_reader_backward
from .triton_backward_write import WriteGradients, launch_writer_backward
from .triton_coefficients import launch_coefficients, launch_coefficients_backward
from .triton_forward import Scratch, launch_factors, launch_writer
from .triton_launch import capability_of, on_device_of, precision_of, widened
from .triton_read import launch_reader


# Programs of a span's parallel kernels: enough to fill a large card more than once, few enough for what they hand to
# each other to stay small (0.6 MB each in the backward at the default sizes).
_PROGRAMS = 512
_MAX_SPAN = 64

_MAX_HEAD_DIM, _MAX_EXPANSION, _MAX_CHUNK = 256, 4, 128
# Beyond both, the reader's backward in float32 or tf32 takes 176 KiB of shared memory; a block of sm_80 has 163.
_WIDE_HEAD_DIM, _WIDE_CHUNK = 128, 64


def triton_scan(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """Runs a memory through N chunks (Titans, section 3.2), as `chunk_scan` does.

    Args:
        inputs, options: as for `chunk_scan`, for a memory of one or two layers, a head dimension of 16 to 256 that is
            a multiple of 16, an expansion up to 4 and chunks up to 128 tokens. ``q``, ``k``, ``v``: bfloat16, float16
            or float32, all alike; everything else is float32. ``mix`` must be None.

    Returns:
        The result, differentiable in every floating-point input except through ``surprise``; the output has the dtype
        of q, everything else is float32.

    Raises:
        ValueError: a mixture, or sizes or dtypes that the kernels do not take, or tensors on a device where they do
            not run.
    """
    _check(inputs, options)
    b, b_q = inputs.k.shape[2], inputs.q.shape[2]
    inputs = _padded(inputs, options)
    dtype, precision = inputs.q.dtype, precision_of(inputs.q.dtype)
    q, k, v, *rest = (None if t is None else t.contiguous() for t in inputs.flatten())
    flat = [*(widened(t) for t in (q, k, v)), *rest]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat):
        results = _TritonScan.apply(options, precision, *flat)
    else:
        results, _ = _forward(ScanInputs.unflatten(flat, options.depth), options, precision, keep=False)
    result = ScanResult.of(results, inputs, options)
    surprise = None if result.surprise is None else result.surprise[..., :b]
    return result._replace(output=result.output[:, :, b - b_q : b].to(dtype), surprise=surprise)


def reason_against(
    depth: int,
    head_dim: int,
    hidden: int,
    chunk_size: int,
    dtype: torch.dtype,
    q: torch.Tensor,
    mix: torch.Tensor | None = None,
) -> str | None:
    """Why the kernels do not take a memory of these sizes with a state of this dtype, for q; None if they do."""
    if mix is not None:
        return f"mix is given, {tuple(mix.shape)}, expected None: the kernels read no mixture of memories"
    if depth not in (1, 2):
        return f"the memory's depth is {depth}, expected 1 or 2"
    if head_dim % 16 or not 16 <= head_dim <= _MAX_HEAD_DIM:
        return f"head dimension is {head_dim}, expected a multiple of 16 from 16 to {_MAX_HEAD_DIM}"
    if hidden > _MAX_EXPANSION * head_dim:
        return f"hidden width is {hidden}, expected at most {_MAX_EXPANSION} * {head_dim}"
    if chunk_size > _MAX_CHUNK:
        return f"chunk length is {chunk_size}, expected at most {_MAX_CHUNK}"
    if dtype != torch.float32:
        return f"dtype of a gate, a norm's parameter or a state is {dtype}, expected torch.float32"
    wide = head_dim > _WIDE_HEAD_DIM and chunk_size > _WIDE_CHUNK and q.dtype != torch.bfloat16
    if wide and q.is_cuda and capability_of(q) < (9, 0):
        return (
            f"head dimension {head_dim} with chunks of {chunk_size} tokens in {q.dtype} needs more shared memory than "
            f"this GPU has, expected at most {_WIDE_HEAD_DIM} or {_WIDE_CHUNK}, or torch.bfloat16"
        )
    return None


def _check(inputs: ScanInputs, options: ScanOptions) -> None:
    flat = inputs.flatten()
    others = [t for t in (*flat[3:6], *flat[8:]) if t is not None]
    dtype = next((t.dtype for t in others if t.dtype != torch.float32), torch.float32)
    b, head_dim = inputs.k.shape[-2:]
    reason = reason_against(options.depth, head_dim, inputs.weights[-1].shape[-2], b, dtype, inputs.q, inputs.mix)
    if reason is not None:
        raise ValueError(f'{reason}; backend="chunked" takes it')
    if not options.write and inputs.k.shape[0] != 1:
        raise ValueError(f"number of chunks is {inputs.k.shape[0]}, expected 1 where options.write is False")
    for name in ("k", "v"):
        if getattr(inputs, name).dtype != inputs.q.dtype:
            raise ValueError(f"dtype of {name} is {getattr(inputs, name).dtype}, expected q's, {inputs.q.dtype}")


def _padded(inputs: ScanInputs, options: ScanOptions) -> ScanInputs:
    """An open chunk filled up to a power of two, and a query for each token: few sizes are few kernels to compile."""
    b, b_q = inputs.k.shape[2], inputs.q.shape[2]
    behind = 0 if options.write else max(1 << (b - 1).bit_length(), 16) - b
    if not behind and b_q == b:
        return inputs
    vectors = [F.pad(t, (0, 0, 0, behind)) for t in (inputs.k, inputs.v)]
    gates = [F.pad(t, (0, behind)) for t in inputs[3:6]]
    return ScanInputs(F.pad(inputs.q, (0, 0, b - b_q, behind)), *vectors, *gates, *inputs[6:])


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: ScanOptions, precision: str, *flat: torch.Tensor | None):
        results, states = _forward(ScanInputs.unflatten(flat, options.depth), options, precision, keep=True)
        # The states are all that grows with the sequence beside the inputs themselves.
        ctx.save_for_backward(*flat[:10], *flat[10 + 2 * options.depth :], *states)
        ctx.options, ctx.precision, ctx.num_states = options, precision, len(states)
        if options.surprise:
            ctx.mark_non_differentiable(results[-1])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar, *rest):
        options, depth = ctx.options, ctx.options.depth
        saved = ctx.saved_tensors
        states = saved[len(saved) - ctx.num_states :]
        flat = [*saved[:10], *(t[0] for t in states), *saved[10 : len(saved) - ctx.num_states]]
        inputs = ScanInputs.unflatten(flat, depth)
        # They become the gradients of the incoming state in place.
        state_bar = [torch.zeros_like(t[0]) for t in states]
        if options.write:
            state_bar = [t.clone(memory_format=torch.contiguous_format) for t in rest[: 2 * depth]]
        gradients = _backward(inputs, options, ctx.precision, states, output_bar.contiguous(), state_bar)
        return None, None, *gradients.flatten()


def _span_of(inputs: ScanInputs) -> int:
    """Chunks whose intermediate values are alive together."""
    num_chunks, num_groups = inputs.k.shape[:2]
    return min(max(_PROGRAMS // num_groups, 1), _MAX_SPAN, num_chunks)


def _forward(
    inputs: ScanInputs, options: ScanOptions, precision: str, keep: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Span by span.

    Returns:
        [output, weights and momentum (if written), surprise (if asked for)], and the states at chunks' starts, by
        layer (slots, G, D_in, D_out): with ``keep`` those of all chunks, else of the last span's.
    """
    num_chunks = inputs.k.shape[0]
    span = _span_of(inputs)
    states = _states_for(inputs, options, num_chunks if keep else span)
    scratch = Scratch.empty_for(inputs.k[:span], inputs.weights)
    output = torch.empty_like(inputs.q)
    surprise = torch.empty_like(inputs.theta) if options.surprise else None
    last = 0
    for begin in range(0, num_chunks, span):
        end = min(begin + span, num_chunks)
        if begin and not keep:
            for t in states:
                t[0].copy_(t[last])
        slots = [t[begin : end + 1] if keep else t for t in states]
        to = [None if t is None else t[begin:end] for t in (output, surprise)]
        with on_device_of(inputs.k):
            _forward_span(inputs.slice_chunks(begin, end), options, precision, slots, scratch, *to)
        last = end if keep else end - begin
    # Copies: a view would keep all of the states alive with the last one.
    state = [t[last].clone() for t in states] if options.write else []
    return [output, *state, *([surprise] if options.surprise else [])], states


def _states_for(inputs: ScanInputs, options: ScanOptions, num_slots: int) -> list[torch.Tensor]:
    """Room for the states at chunks' starts and behind the last, the first of them filled."""
    incoming = [*inputs.weights, *inputs.momentum]
    if options.write:
        states = [w.new_empty(num_slots + 1, *w.shape) for w in incoming]
        for slots, w in zip(states, incoming, strict=True):
            slots[0].copy_(w)
        return states
    if options.restart_at:
        start = [*inputs.start_weights, *inputs.start_momentum]
        where = inputs.restart[0][:, None, None]
        incoming = [torch.where(where, s, w) for s, w in zip(start, incoming, strict=True)]
    return [w.unsqueeze(0) for w in incoming]


def _forward_span(
    inputs: ScanInputs,
    options: ScanOptions,
    precision: str,
    states: list[torch.Tensor],
    scratch: Scratch,
    output: torch.Tensor,
    surprise: torch.Tensor | None,
) -> None:
    """Writes a span's chunks one after another, then reads them all: fills the states' slots, output and surprise."""
    depth, network = options.depth, inputs.network(options)
    weights, momentum = tuple(states[:depth]), tuple(states[depth:])
    gates = (inputs.theta, inputs.alpha, inputs.eta)
    read, end = launch_coefficients(*gates, inputs.full, sliding=options.rule.sliding)
    chunk = (inputs.k, inputs.v)
    if options.write:
        launch_writer(
            *(*chunk, end, weights, momentum, scratch, network, precision),
            restart=inputs.restart if options.restart_at else None,
            start_weights=inputs.start_weights,
            start_momentum=inputs.start_momentum,
            forget_to=inputs.forget_to,
            surprise=surprise,
        )
    else:
        launch_factors(*chunk, weights, scratch, network, precision, surprise=surprise)
    launch_reader(
        *(inputs.q, *chunk, read, weights, momentum, scratch, network, precision, output),
        forget_to=inputs.forget_to,
    )


def _backward(
    inputs: ScanInputs, options: ScanOptions, precision: str, states, output_bar: torch.Tensor, state_bar: list
) -> ScanInputs:
    """The gradients of the inputs, span by span from the last; ``state_bar`` is used up."""

    def zeros(group):
        return None if group is None else tuple(torch.zeros_like(t) for t in group)

    norm = None, None
    if inputs.norm_weight is not None:
        norm = zeros((inputs.norm_weight, inputs.norm_bias))
    gradients = ScanInputs(
        *(torch.empty_like(t) for t in list(inputs)[:6]),
        *(None, None, *norm, tuple(state_bar[: options.depth]), tuple(state_bar[options.depth :])),
        *(zeros(group) for group in list(inputs)[12:]),
    )
    num_chunks, span = inputs.k.shape[0], _span_of(inputs)
    for begin in reversed(range(0, num_chunks, span)):
        at = begin, min(begin + span, num_chunks)
        here = [t.slice_chunks(*at) for t in (inputs, gradients)]
        with on_device_of(inputs.k):
            _backward_span(*here, options, precision, [t[slice(*at)] for t in states], output_bar[slice(*at)])
    return gradients


def _backward_span(
    inputs: ScanInputs,
    gradients: ScanInputs,
    options: ScanOptions,
    precision: str,
    states: list[torch.Tensor],
    output_bar: torch.Tensor,
) -> None:
    """Un-reads a span's chunks all at once, then goes back through their updates one after another.

    ``gradients``: those of the tokens are written, those of the state are taken from behind the span to before it,
    all others are added to.
    """
    depth, network = options.depth, inputs.network(options)
    state = tuple(states[:depth]), tuple(states[depth:])
    gates, chunk = (inputs.theta, inputs.alpha, inputs.eta), (inputs.k, inputs.v)
    has_norm, has_forget_to = inputs.norm_weight is not None, inputs.forget_to is not None
    full = inputs.full
    if not options.write:
        # An update that does not take place is the identity.
        full = torch.zeros(inputs.k.shape[:2], dtype=torch.bool, device=inputs.k.device)
    sliding = options.rule.sliding
    read, end = launch_coefficients(*gates, full, sliding=sliding)
    scratch = Scratch.empty_for(inputs.k, state[0])
    launch_factors(*chunk, state[0], scratch, network, precision)
    unread = ReadGradients.empty_for(inputs.q, inputs.k, state[0], has_norm, has_forget_to)._replace(q=gradients.q)
    launch_reader_backward(
        *(inputs.q, *chunk, read, *state, scratch, network, precision, output_bar, unread),
        forget_to=inputs.forget_to,
    )
    unwritten = WriteGradients.empty_for(inputs.k, has_norm)._replace(k=gradients.k, v=gradients.v)
    launch_writer_backward(
        *(*chunk, end, *state, scratch, network, precision, unread, gradients.weights, gradients.momentum, unwritten),
        restart=inputs.restart if options.restart_at else None,
        start_weights_bar=gradients.start_weights,
        start_momentum_bar=gradients.start_momentum,
        forget_to=inputs.forget_to,
        forget_to_bar=gradients.forget_to,
    )
    bars = launch_coefficients_backward(*gates, full, read, unread.coefficients, unwritten.end, sliding=sliding)
    for store, bar in zip((gradients.theta, gradients.alpha, gradients.eta), bars, strict=True):
        store.copy_(bar)
    if has_norm:
        gradients.norm_weight.add_((unread.norm_weight + unwritten.norm_weight).sum(0).unsqueeze(-2))
        gradients.norm_bias.add_((unread.norm_bias + unwritten.norm_bias).sum(0).unsqueeze(-2))
    if has_forget_to:
        for store, bar in zip(gradients.forget_to, unread.forget_to, strict=True):
            store.add_(bar.sum(0))
