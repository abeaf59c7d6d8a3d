# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The reads of `chunk_scan` as a Triton kernel: all chunks at once, from the states at their starts.

A read goes through each layer as x W_t = c_t x W + d_t x S - sum_i A_{t,i} <x, a_i> g_i (MEMORY.md), with the tokens'
factors a and g taken from what the writer left. The last layer is walked in tiles over its input, as the writer does.

Tiles are (features, tokens), see `triton_math`. Shapes: N chunks, G rows times heads, b tokens in a chunk of which the
last b_q are read, D head dimension, h width of the last layer's input (D for one layer).
"""

import torch

from .chunk_coefficients import ReadCoefficients
from .inner_network import InnerNetwork
from .triton_configs import LaunchConfig
from .triton_forward import Scratch
from .triton_launch import by_layer, launch_parameters, token_block
from .triton_math import dot, gelu, gelu_and_slope, layer_output, load_row, load_tile, store_tile, top_error


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


def launch_reader(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: ReadCoefficients,
    weights: tuple[torch.Tensor, ...],
    momentum: tuple[torch.Tensor, ...],
    scratch: Scratch,
    network: InnerNetwork,
    precision: str,
    output: torch.Tensor,
    *,
    forget_to: tuple[torch.Tensor, ...] | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """M_{W_t}(q_t) for the last b_q tokens of every chunk (Titans, eq. 15).

    Args:
        q: (N, G, b_q, D), dtype of k.
        read: at all tokens, c, d (N, G, b) and A (N, G, b, b) float32.
        weights, momentum: by layer, at least N slots (N.., G, D_in, D_out): the states at each chunk's start.
        scratch: as the writer or `launch_factors` left it.
        output: (N, G, b_q, D): written, in its own dtype.
        Others: as `launch_writer`.

    Raises:
        ValueError: as `launch_writer`.
    """
    config, sizes, launch = launch_parameters("reader", k, weights, precision, config)
    num_queries = q.shape[-2]
    block = token_block(config, num_queries)
    _reader_kernel[(k.shape[0] * k.shape[1] * -(-num_queries // block),)](
        *(q, k, v, *read, *by_layer(weights), *by_layer(momentum), *by_layer(forget_to)),
        *(scratch.z, scratch.p, scratch.f, output),
        *(network.norm_weight, network.norm_bias, network.norm_eps, k.shape[1]),
        **sizes,
        BQ=num_queries,
        BLOCK_Q=block,
        BLOCK_K=min(sizes["BLOCK_B"], max(16, 64 * 64 // sizes["BLOCK_D"])),
        FORGET_TO=forget_to is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        DOT=network.dot,
        PRECISION=precision,
        **launch,
    )


@triton.jit
def _read_tile(
    x_c,
    x_d,
    x_rest,
    w_at,
    s_at,
    forget_to_at,
    rows,
    columns,
    acc,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    FORGET_TO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + W^T (c x) + S^T (d x) [+ W_0^T ((1 - c) x)] over one tile; ``rows`` and ``columns`` are those of W^T."""
    w = load_tile(w_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    acc = dot(w, x_c, acc, PRECISION)
    s = load_tile(s_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    acc = dot(s, x_d, acc, PRECISION)
    if FORGET_TO:
        start = load_tile(forget_to_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
        acc = dot(start, x_rest, acc, PRECISION)
    return acc


@triton.jit
def _rows_from(x, first, NUM_ROWS: tl.constexpr):
    """``NUM_ROWS`` rows of x from row ``first``, a multiple of them."""
    rows = x
    if NUM_ROWS < x.shape[0]:
        parts = tl.reshape(x, [x.shape[0] // NUM_ROWS, NUM_ROWS, x.shape[1]])
        part = tl.arange(0, x.shape[0] // NUM_ROWS)[:, None, None]
        rows = tl.sum(tl.where(part == first // NUM_ROWS, parts, 0.0), 0)
    return rows


@triton.jit(do_not_specialize=["num_groups"])
def _reader_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    read_c_ptr,
    read_d_ptr,
    read_A_ptr,
    first_w_ptr,
    last_w_ptr,
    first_s_ptr,
    last_s_ptr,
    first_forget_to_ptr,
    last_forget_to_ptr,
    z_ptr,
    p_ptr,
    f_ptr,
    output_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    eps,
    num_groups,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    BQ: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORGET_TO: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (n * G + g) * blocks + i: the queries of block i in chunk n of row and head g."""
    NUM_BLOCKS: tl.constexpr = (BQ + BLOCK_Q - 1) // BLOCK_Q
    at = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    g = at % num_groups
    features, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_B)
    queries = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    state, start, token, hidden_token = at * (D * H), g * (D * H), at * (B * D), at * (B * H)
    # Coefficients of the tokens that are read, the last BQ of the chunk.
    c = load_row(read_c_ptr + at * B + (B - BQ), queries, BQ)
    d = load_row(read_d_ptr + at * B + (B - BQ), queries, BQ)
    A = load_tile(read_A_ptr + at * (B * B) + (B - BQ) * B, tokens, queries, 1, B, B, BQ)
    q_at, k_at = q_ptr + at * (BQ * D), k_ptr + token
    first_forget_to_at, last_forget_to_at = first_forget_to_ptr, last_forget_to_ptr
    if FORGET_TO:
        last_forget_to_at += start
        if DEPTH == 2:
            first_forget_to_at += start

    if DEPTH == 2:
        q = load_tile(q_at, features, queries, 1, D, D, BQ).to(tl.float32)
        attention = tl.zeros([BLOCK_B, BLOCK_Q], tl.float32)
        for begin in range(0, D, TILE):
            some = begin + tl.arange(0, TILE)
            k = load_tile(k_at, tokens, some, D, 1, B, D)
            attention = dot(k, load_tile(q_at, some, queries, 1, D, D, BQ), attention, PRECISION)
        attention *= -A
        q_c, q_d, q_rest = q * c[None, :], q * d[None, :], q * (1.0 - c)[None, :]
    f = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
    scores = tl.zeros([BLOCK_B, BLOCK_Q], tl.float32)
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        if DEPTH == 2:
            z = load_tile(z_ptr + hidden_token, hidden, tokens, 1, H, H, B)
            p = load_tile(p_ptr + hidden_token, hidden, tokens, 1, H, H, B)
            a, slope = gelu_and_slope(z)
            r = dot(p * slope, attention, tl.zeros([TILE, BLOCK_Q], tl.float32), PRECISION)
            r = _read_tile(
                q_c,
                q_d,
                q_rest,
                first_w_ptr + state,
                first_s_ptr + state,
                first_forget_to_at,
                hidden,
                features,
                r,
                1,
                H,
                H,
                D,
                FORGET_TO,
                PRECISION,
            )
            x = gelu(r)
        else:
            x = load_tile(q_at, hidden, queries, 1, D, D, BQ).to(tl.float32)
            a = load_tile(k_at, hidden, tokens, 1, D, D, B).to(tl.float32)
        scores = dot(tl.trans(a), x, scores, PRECISION)
        f = _read_tile(
            x * c[None, :],
            x * d[None, :],
            x * (1.0 - c)[None, :],
            last_w_ptr + state,
            last_s_ptr + state,
            last_forget_to_at,
            features,
            hidden,
            f,
            1,
            D,
            D,
            H,
            FORGET_TO,
            PRECISION,
        )

    norm_weight, norm_bias = features, features
    if NORM:
        norm_weight = load_row(norm_weight_ptr + g * D, features, D)
        norm_bias = load_row(norm_bias_ptr + g * D, features, D)
    scores *= -A
    for block in range(0, B, BLOCK_K):
        keys = block + tl.arange(0, BLOCK_K)
        k = load_tile(k_at, features, keys, 1, D, D, B).to(tl.float32)
        v = load_tile(v_ptr + token, features, keys, 1, D, D, B).to(tl.float32)
        f_of_keys = load_tile(f_ptr + token, features, keys, 1, D, D, B)
        _, top, _, _ = top_error(k, v, f_of_keys, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM, DOT)
        f = dot(top, _rows_from(scores, block, BLOCK_K), f, PRECISION)
    q = load_tile(q_at, features, queries, 1, D, D, BQ).to(tl.float32)
    output, _, _ = layer_output(q, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
    store_tile(output_ptr + at * (BQ * D), output, features, queries, 1, D, D, BQ)
