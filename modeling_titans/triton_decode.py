# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""One token's read in one kernel: the step of cached decoding.

Between two chunk ends the state does not change; a new token only joins the open chunk (MEMORY.md). So a step reads
W and S at the chunk's start, computes the factors of the chunk's tokens again, and answers one query at its place in
the chunk. Nothing of a state's size is written. W is read twice, since g_l needs all of M(k) first; S is read once.

What belongs to the query alone stays in float32 sums: a product with 16 rows, the smallest that tensor cores take,
would do 15 rows for nothing and round its operands.

Letters: G rows times heads, b slots of a chunk, D head dimension, h width of the last layer's input (D for one layer).
"""

import torch

from .memory_ops_triton import triton_scan
from .scan_inputs import ScanInputs, ScanOptions, ScanResult
from .triton_configs import LaunchConfig, config_for
from .triton_launch import block_of, capability_of, on_device_of, operand_bytes_of, precision_of, widened
from .triton_math import dot, gelu, gelu_and_slope, layer_output, load_row, load_tile, top_error


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


@triton.jit
def _times(x, y):
    return x * y


@triton.jit
def _then(factor, value, next_factor, next_value):
    """Two steps x -> factor * x + value as one."""
    return factor * next_factor, next_factor * value + next_value


@triton.jit
def _coefficients_at(theta, alpha, eta, at, tokens, SLIDING: tl.constexpr):
    """c, d and A (b,) of `chunk_coefficients` at token ``at`` alone; A is zero behind it.

    Of one row of L and A, every entry follows from its right neighbour: L_i = (1 - alpha_{i+1}) L_{i+1}, and
    A_i = theta_i B_i with B_i = L_i + eta_{i+1} B_{i+1}; if SLIDING, A_i = theta_i L_i + eta_{i+1} L_{i+1}. No entry
    needs a quotient.
    """
    is_past, has_next = tokens <= at, tokens < at
    kept_next = 1.0 - tl.load(alpha + tokens + 1, mask=has_next, other=0.0)
    kept = tl.associative_scan(kept_next, 0, _times, reverse=True)
    kept = tl.where(is_past, kept, 0.0)
    eta_next = tl.load(eta + tokens + 1, mask=has_next, other=0.0)
    first_kept = tl.sum(tl.where(tokens == 0, kept, 0.0), 0)
    if SLIDING:
        kept_after = 1.0 - tl.load(alpha + tokens + 2, mask=tokens + 1 < at, other=0.0)
        A = eta_next * tl.associative_scan(kept_after, 0, _times, reverse=True)
        A += kept * tl.load(theta + tokens, mask=is_past, other=0.0)
        d = first_kept * tl.load(eta)
    else:
        _, reached = tl.associative_scan((eta_next, kept), 0, _then, reverse=True)
        momentum = tl.associative_scan(tl.load(eta + tokens, mask=is_past, other=1.0), 0, _times)
        A = reached * tl.load(theta + tokens, mask=is_past, other=0.0)
        d = tl.sum(kept * momentum, 0)
    return first_kept * (1.0 - tl.load(alpha)), d, A


@triton.jit
def _load_mixed(
    w,
    s_ptr,
    start_ptr,
    c,
    d,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    FORGET_TO: tl.constexpr,
):
    """c W + d S (+ (1 - c) W_0), given the tile of W."""
    mixed = c * w + d * load_tile(s_ptr, rows, columns, ROW_STRIDE, 1, ROW_END, COLUMN_END)
    if FORGET_TO:
        mixed += (1.0 - c) * load_tile(start_ptr, rows, columns, ROW_STRIDE, 1, ROW_END, COLUMN_END)
    return mixed


# The number of slots changes with every token of a chunk; a kernel is compiled for each BLOCK_B only.
@triton.jit(do_not_specialize=["num_slots"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    theta_ptr,
    alpha_ptr,
    eta_ptr,
    at_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    first_w_ptr,
    first_s_ptr,
    first_start_ptr,
    last_w_ptr,
    last_s_ptr,
    last_start_ptr,
    output_ptr,
    eps,
    num_slots,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    SLIDING: tl.constexpr,
    FORGET_TO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program g answers the query of row and head g. ``first``: the first of two layers; ``last``: the last layer."""
    g = tl.program_id(0).to(tl.int64)
    features, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_B)
    at = tl.load(at_ptr + g)
    slot = g * num_slots
    c, d, A = _coefficients_at(theta_ptr + slot, alpha_ptr + slot, eta_ptr + slot, at, tokens, SLIDING)

    # Slots behind the query hold anything.
    is_there = (features[:, None] < D) & (tokens[None, :] <= at)
    offsets = slot * D + tokens[None, :] * D + features[:, None]
    k = tl.load(k_ptr + offsets, mask=is_there, other=0.0)
    v = tl.load(v_ptr + offsets, mask=is_there, other=0.0).to(tl.float32)
    q = load_row(q_ptr + g * D, features, D).to(tl.float32)
    norm_weight, norm_bias = q, q
    if NORM:
        norm_weight = load_row(norm_weight_ptr + g * D, features, D)
        norm_bias = load_row(norm_bias_ptr + g * D, features, D)

    last_w, last_s = last_w_ptr + g * H * D, last_s_ptr + g * H * D
    last_start, first_start = last_start_ptr, first_start_ptr
    if FORGET_TO:
        last_start += g * H * D
    if DEPTH == 2:
        first_w, first_s = first_w_ptr + g * D * H, first_s_ptr + g * D * H
        if FORGET_TO:
            first_start += g * D * H

    f = tl.zeros([BLOCK_D, BLOCK_B], tl.float32)
    read = tl.zeros([BLOCK_D], tl.float32)
    scores = tl.zeros([BLOCK_B], tl.float32)
    for begin in range(0, H, TILE):
        columns = begin + tl.arange(0, TILE)
        w = load_tile(last_w, columns, features, D, 1, H, D)
        if DEPTH == 2:
            w_first = load_tile(first_w, features, columns, H, 1, D, H)
            a = gelu(dot(tl.trans(w_first), k, tl.zeros([TILE, BLOCK_B], tl.float32), PRECISION))
        else:
            # One layer: its input is the key, and the query can be read in the same pass.
            place = slot * D + tokens[None, :] * D + columns[:, None]
            a = tl.load(k_ptr + place, mask=(columns[:, None] < D) & (tokens[None, :] <= at), other=0.0)
            x = tl.load(q_ptr + g * D + columns, mask=columns < D, other=0.0).to(tl.float32)
            mixed = _load_mixed(w, last_s, last_start, c, d, columns, features, D, H, D, FORGET_TO)
            read += tl.sum(mixed * x[:, None], 0)
            scores += tl.sum(a.to(tl.float32) * x[:, None], 0)
        if NORM or not DOT:
            f = dot(tl.trans(w), a, f, PRECISION)

    _, top, _, _ = top_error(k.to(tl.float32), v, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM, DOT)

    if DEPTH == 2:
        key_scores = A * tl.sum(k.to(tl.float32) * q[:, None], 0)
        for begin in range(0, H, TILE):
            columns = begin + tl.arange(0, TILE)
            w_first = load_tile(first_w, features, columns, H, 1, D, H)
            z = dot(tl.trans(w_first), k, tl.zeros([TILE, BLOCK_B], tl.float32), PRECISION)
            a, slope = gelu_and_slope(z)
            w = load_tile(last_w, columns, features, D, 1, H, D)
            error = dot(w, top, tl.zeros([TILE, BLOCK_B], tl.float32), PRECISION) * slope
            mixed = _load_mixed(w_first, first_s, first_start, c, d, features, columns, H, D, H, FORGET_TO)
            x = gelu(tl.sum(mixed * q[:, None], 0) - tl.sum(error * key_scores[None, :], 1))
            mixed = _load_mixed(w, last_s, last_start, c, d, columns, features, D, H, D, FORGET_TO)
            read += tl.sum(mixed * x[:, None], 0)
            scores += tl.sum(a * x[:, None], 0)

    read -= tl.sum(top * (A * scores)[None, :], 1)
    output, _, _ = layer_output(q[:, None], read[:, None], norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
    tl.store(output_ptr + g * D + features[:, None], output, mask=features[:, None] < D)


def decode(
    inputs: ScanInputs, options: ScanOptions, at: torch.Tensor, config: LaunchConfig | None = None
) -> torch.Tensor:
    """Reads the memory at one token of each row's open chunk (Titans, eq. 15), by one kernel.

    Where a chunk of such a size does not fit into one block's shared memory, by the scan's kernels instead.

    Args:
        inputs: as for `chunk_scan` with N = 1 and one query: ``q`` (1, G, 1, D), ``k``, ``v`` (1, G, b, D), all
            bfloat16, float16 or float32; everything else float32. ``full``, ``restart`` and the start states are not
            looked at.
        options: ``write`` and ``surprise`` must be False.
        at: (G,) int32, the query's slot in its chunk, in [0, b); slots behind it may hold anything.
        config: launch configuration. None: the default.

    Returns:
        (1, G, 1, D) in q's dtype. Not differentiable.

    Raises:
        ValueError: naming what is wrong with the arguments.
    """
    _check(inputs, options, at)
    b, head_dim = inputs.k.shape[2:]
    precision = precision_of(inputs.q.dtype)
    if options.depth == 2 and not _fits(head_dim, b, precision):
        return _scanned(inputs, options, at)
    q, k, v = (widened(t).contiguous() for t in (inputs.q, inputs.k, inputs.v))
    gates = (t.contiguous() for t in (inputs.theta, inputs.alpha, inputs.eta))
    norm = (None if t is None else t.contiguous() for t in (inputs.norm_weight, inputs.norm_bias))
    width, capability = inputs.weights[-1].shape[-2], capability_of(q)
    config = config or config_for("decode", head_dim, width, b, capability, operand_bytes_of(precision))
    output = torch.empty_like(q)
    with on_device_of(q):
        _decode_kernel[(k.shape[1],)](
            *(q, k, v, *gates, at.contiguous(), *norm, *_layer(inputs, 0), *_layer(inputs, -1), output),
            *(options.norm_eps, b),
            DEPTH=options.depth,
            D=head_dim,
            H=width,
            BLOCK_D=block_of(head_dim),
            BLOCK_B=block_of(b),
            TILE=config.tile,
            RESIDUAL=options.residual,
            NORM=inputs.norm_weight is not None,
            DOT=options.rule.dot,
            SLIDING=options.rule.sliding,
            FORGET_TO=inputs.forget_to is not None,
            PRECISION=precision,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output.to(inputs.q.dtype)


def scan_or_decode(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """`triton_scan`, by the decoding kernel where a call only reads its last token and needs no gradient."""
    one_read = not options.write and not options.surprise and not options.restart_at and inputs.q.shape[2] == 1
    if not one_read or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs.flatten())):
        return triton_scan(inputs, options)
    num_rows, b = inputs.k.shape[1:3]
    at = torch.full((num_rows,), b - 1, dtype=torch.int32, device=inputs.k.device)
    return ScanResult(decode(inputs, options, at), inputs.weights, inputs.momentum, None)


def _fits(head_dim: int, chunk_size: int, precision: str) -> bool:
    """Whether the keys and the errors of a chunk, as operands of products, fit into a block's shared memory.

    Compiled for compute capability 8.0, whose blocks have 163 KiB, sizes at this bound need 132 to 160 KiB.
    """
    return block_of(head_dim) * block_of(chunk_size) * operand_bytes_of(precision) <= 64 * 1024


def _scanned(inputs: ScanInputs, options: ScanOptions, at: torch.Tensor) -> torch.Tensor:
    """The same by the scan's kernels: behind slots with gates of zero, a chunk's last weights are those at ``at``."""
    is_there = torch.arange(inputs.k.shape[2], device=at.device) <= at[:, None]
    tokens = {name: torch.where(is_there[None, :, :, None], getattr(inputs, name), 0) for name in ("k", "v")}
    gates = {name: torch.where(is_there, getattr(inputs, name), 0) for name in ("theta", "alpha", "eta")}
    return triton_scan(inputs._replace(**tokens, **gates), options).output


def _layer(inputs: ScanInputs, layer: int) -> tuple[torch.Tensor | None, ...]:
    """A layer's weights, momentum and the weights that forgetting leads to, or None."""
    groups = (inputs.weights, inputs.momentum, inputs.forget_to)
    return tuple(None if group is None else group[layer].contiguous() for group in groups)


def _check(inputs: ScanInputs, options: ScanOptions, at: torch.Tensor) -> None:
    if options.write or options.surprise:
        raise ValueError(
            f"options.write is {options.write} and options.surprise {options.surprise}, expected False for both: "
            "decoding only reads"
        )
    if inputs.mix is not None:
        raise ValueError(f"mix is given, {tuple(inputs.mix.shape)}, expected None: no mixture of memories is decoded")
    if options.depth not in (1, 2):
        raise ValueError(f"options.depth is {options.depth}, expected 1 or 2")
    if inputs.q.shape[0] != 1 or inputs.q.shape[2] != 1:
        raise ValueError(f"q has shape {tuple(inputs.q.shape)}, expected (1, G, 1, D): one query in one chunk")
    num_rows = inputs.q.shape[1]
    if at.dtype != torch.int32 or at.shape != (num_rows,):
        raise ValueError(
            f"at has dtype {at.dtype} and shape {tuple(at.shape)}, expected torch.int32 and ({num_rows},)"
        )
    fields = inputs._asdict()
    for name in ("k", "v"):
        if fields[name].dtype != inputs.q.dtype:
            raise ValueError(f"dtype of {name} is {fields[name].dtype}, expected q's, {inputs.q.dtype}")
    for name in ("theta", "alpha", "eta", "norm_weight", "norm_bias"):
        if fields[name] is not None and fields[name].dtype != torch.float32:
            raise ValueError(f"dtype of {name} is {fields[name].dtype}, expected torch.float32")
    for name in ("weights", "momentum", "forget_to"):
        dtypes = {t.dtype for t in fields[name] or ()}
        if not dtypes <= {torch.float32}:
            raise ValueError(f"dtypes of {name} are {sorted(map(str, dtypes))}, expected torch.float32")
