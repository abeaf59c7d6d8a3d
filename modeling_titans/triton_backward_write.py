# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The adjoint of the writer as a Triton kernel: one program per row and head, through the chunks in reverse.

The gradient of the running state stands in memory and is taken from behind a chunk to before it in place, tile by
tile. A chunk needs four passes over tiles of the last layer's input: back through the first layer's update; through
the last layer's update and upwards through the inner gradient; downwards through the last layer; through the first.

What has D features lies (features, tokens), see `triton_math`; tiles of the last layer's input ("hidden") lie (tokens,
hidden) and those of either layer's state (features, hidden), so that D and the tokens, both 64 at the default sizes,
are the left sides of all products.

Shapes: N chunks, G rows times heads, b tokens in a chunk, D head dimension, h width of the last layer's input (D for
one layer).
"""

from typing import NamedTuple

import torch

from .chunk_coefficients import EndCoefficients
from .inner_network import InnerNetwork
from .triton_backward_read import ReadGradients, precision_that_fits
from .triton_configs import LaunchConfig
from .triton_forward import Scratch
from .triton_launch import by_layer, launch_parameters
from .triton_math import (
    dot,
    gelu_and_slope,
    gelu_slope_and_curvature,
    load_row,
    load_tile,
    norm_jacobian,
    store_tile,
    top_error,
)


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


class WriteGradients(NamedTuple):
    """Gradients through the writes of N chunks.

    Attributes:
        k, v: (N, G, b, D), in k's dtype; complete, with what came through the reads.
        end: of the coefficients at the chunks' ends: c, d, m (N, G) and A, E (N, G, b), float32.
        norm_weight, norm_bias: (N, G, D) float32, of each chunk by itself; or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    end: EndCoefficients
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None

    @classmethod
    def empty_for(cls, k: torch.Tensor, norm: bool) -> "WriteGradients":
        """Uninitialised, for keys (N, G, b, D)."""

        def empty(*shape):
            return k.new_empty(*k.shape[:2], *shape, dtype=torch.float32)

        b, head_dim = k.shape[2:]
        end = EndCoefficients(empty(), empty(), empty(), empty(b), empty(b))
        return cls(
            *(torch.empty_like(k), torch.empty_like(k), end),
            *((empty(head_dim), empty(head_dim)) if norm else (None, None)),
        )


def launch_writer_backward(
    k: torch.Tensor,
    v: torch.Tensor,
    end: EndCoefficients,
    weights: tuple[torch.Tensor, ...],
    momentum: tuple[torch.Tensor, ...],
    scratch: Scratch,
    network: InnerNetwork,
    precision: str,
    read: ReadGradients,
    weights_bar: tuple[torch.Tensor, ...],
    momentum_bar: tuple[torch.Tensor, ...],
    gradients: WriteGradients,
    *,
    restart: torch.Tensor | None = None,
    start_weights_bar: tuple[torch.Tensor, ...] | None = None,
    start_momentum_bar: tuple[torch.Tensor, ...] | None = None,
    forget_to: tuple[torch.Tensor, ...] | None = None,
    forget_to_bar: tuple[torch.Tensor, ...] | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """The adjoint of `launch_writer`, in which second derivatives of the memory appear; MEMORY.md derives it.

    Chunks that do not write have the identity's coefficients (``full`` false in `launch_coefficients`).

    Args:
        k, v, end, network, precision, restart, forget_to, config: as `launch_writer` had them.
        weights, momentum: by layer, at least N slots (N.., G, D_in, D_out): the states at each chunk's start.
        scratch: as the writer or `launch_factors` left it.
        read: from `launch_reader_backward`; ``k``, ``hidden``, ``first_g`` and ``top`` are used up.
        weights_bar, momentum_bar: by layer, (G, D_in, D_out) float32, contiguous: an outer loss's gradients by the
            state behind the last chunk; replaced by those of the state before the first.
        gradients: all of it is written.
        start_weights_bar, start_momentum_bar, forget_to_bar: by layer, (G, D_in, D_out) float32, contiguous: what
            these chunks' updates and restarts contribute is added; not what came through reads.

    Raises:
        ValueError: the tensors are not on a GPU and the kernels are not interpreted.
    """
    _, sizes, launch = launch_parameters("writer_backward", k, weights, precision, config)
    _writer_backward_kernel[(k.shape[1],)](
        *(k, v, *end, *by_layer(weights), *by_layer(momentum), *by_layer(forget_to), *scratch),
        None if restart is None else restart.view(torch.uint8),
        *(network.norm_weight, network.norm_bias, *read[1:5], *by_layer(read.weights), *by_layer(read.momentum)),
        *(*by_layer(weights_bar), *by_layer(momentum_bar), *by_layer(forget_to_bar)),
        *(*by_layer(start_weights_bar), *by_layer(start_momentum_bar)),
        *(gradients.k, gradients.v, *gradients.end, gradients.norm_weight, gradients.norm_bias),
        *(network.norm_eps, *k.shape[:2]),
        **sizes,
        RESTART=restart is not None,
        FORGET_TO=forget_to is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        DOT=network.dot,
        PRECISION=precision_that_fits(precision, *k.shape[-2:]),
        **launch,
    )


@triton.jit
def _load_top(
    k_at,
    v_at,
    f_at,
    norm_weight_at,
    norm_bias_at,
    eps,
    features,
    tokens,
    D: tl.constexpr,
    B: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """`top_error` of a chunk's keys, and LN's scale."""
    norm_weight, norm_bias = features, features
    if NORM:
        norm_weight = load_row(norm_weight_at, features, D)
        norm_bias = load_row(norm_bias_at, features, D)
    k = load_tile(k_at, features, tokens, 1, D, D, B).to(tl.float32)
    v = load_tile(v_at, features, tokens, 1, D, D, B).to(tl.float32)
    f = load_tile(f_at, features, tokens, 1, D, D, B)
    error, top, x_hat, rstd = top_error(k, v, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM, DOT)
    return error, top, x_hat, rstd, norm_weight


@triton.jit
def _top_adjoint(
    g_bar, error, g, x_hat, rstd, norm_weight, features, D: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr
):
    """Back through g = LN'(error), error = 2 (M - v) or, if DOT, -v, M = k + LN(f), all (BLOCK_D, BLOCK_B).

    Returns:
        (f_bar, output_bar, v_bar, weight_bar): the gradients by f, M, v and, for each token by itself, LN's scale.
    """
    f_bar = 2.0 * g_bar
    output_bar = f_bar
    v_bar = -output_bar
    weight_bar = f_bar
    if DOT:
        f_bar = tl.zeros(g_bar.shape, tl.float32)
        output_bar = f_bar
        v_bar = -g_bar
    if NORM:
        scaled = error * norm_weight[:, None]
        scaled_bar = norm_jacobian(g_bar, x_hat, rstd, features, D)
        if DOT:
            v_bar = -scaled_bar * norm_weight[:, None]
            weight_bar = scaled_bar * error
        else:
            output_bar = 2.0 * scaled_bar * norm_weight[:, None]
            v_bar = -output_bar
            weight_bar = scaled_bar * error + output_bar * x_hat
        # g depends on f directly through the error, and through x_hat and 1 / sigma in LN's Jacobian.
        along, along_bar = tl.sum(scaled * x_hat, 0) / D, tl.sum(g_bar * x_hat, 0) / D
        x_hat_bar = output_bar * norm_weight[:, None] - rstd[None, :] * (
            g_bar * along[None, :] + scaled * along_bar[None, :]
        )
        rstd_bar = tl.sum(g_bar * g, 0) / D
        f_bar = norm_jacobian(x_hat_bar, x_hat, rstd, features, D) - x_hat * (rstd_bar * rstd)[None, :]
    return f_bar, output_bar, v_bar, weight_bar


@triton.jit
def _unupdate_tile(
    part,
    part_bar,
    whole,
    whole_bar,
    A,
    E,
    A_bar,
    E_bar,
    w_bar,
    s_bar,
    PRECISION: tl.constexpr,
):
    """Back through W' -= whole (A part) and S' -= whole (E part) for one tile (features, hidden) of W and S.

    ``whole`` (features, tokens) is k and ``part`` (tokens, hidden) g_1 in the first layer; in the last one, whose
    tiles are transposed, they are g_L and a.

    Returns:
        The bars given, plus this tile's share; ``A_bar`` and ``E_bar`` (tokens, hidden) wait for the sum over hidden.
    """
    to_w = dot(tl.trans(whole), w_bar, tl.zeros(part.shape, tl.float32), PRECISION)
    A_bar -= to_w * part
    part_bar -= to_w * A[:, None]
    whole_bar = dot(w_bar, tl.trans(-part * A[:, None]), whole_bar, PRECISION)
    to_s = dot(tl.trans(whole), s_bar, tl.zeros(part.shape, tl.float32), PRECISION)
    E_bar -= to_s * part
    part_bar -= to_s * E[:, None]
    whole_bar = dot(s_bar, tl.trans(-part * E[:, None]), whole_bar, PRECISION)
    return part_bar, whole_bar, A_bar, E_bar


@triton.jit
def _unupdate_momentum(
    s_at,
    s_bar_at,
    read_bar_at,
    w_bar,
    s_bar,
    d,
    m,
    d_bar,
    m_bar,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
):
    """Back through W' = .. + d S and S' = m S for one tile: stores S's gradient, returns those of d and m.

    The latter two are summed along a warp only, and wait for the sum over the whole.
    """
    s = load_tile(s_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    ALONG: tl.constexpr = 0 if ROW_STRIDE == 1 else 1
    d_bar += tl.sum(s * w_bar, ALONG)
    m_bar += tl.sum(s * s_bar, ALONG)
    s_bar = s_bar * m + w_bar * d
    s_bar += load_tile(read_bar_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    store_tile(s_bar_at, s_bar, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    return d_bar, m_bar


@triton.jit
def _unupdate_weights(
    w,
    w_bar_at,
    read_bar_at,
    forget_to_at,
    forget_to_bar_at,
    c,
    c_bar,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    FORGET_TO: tl.constexpr,
):
    """Back through W' = c W [+ (1 - c) W_0] for one tile: W's gradient, and c's, summed along a warp only."""
    w_bar = load_tile(w_bar_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    ALONG: tl.constexpr = 0 if ROW_STRIDE == 1 else 1
    c_bar += tl.sum(w * w_bar, ALONG)
    if FORGET_TO:
        goal = load_tile(forget_to_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
        c_bar -= tl.sum(goal * w_bar, ALONG)
        goal_bar = load_tile(forget_to_bar_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
        goal_bar += w_bar * (1.0 - c)
        store_tile(forget_to_bar_at, goal_bar, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    read_bar = load_tile(read_bar_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    return w_bar * c + read_bar, c_bar


@triton.jit
def _move_matrix(source_at, target_at, columns, H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Adds an (H, D) matrix to another and leaves zeros."""
    for begin in tl.range(0, H, TILE, disable_licm=True):
        rows = begin + tl.arange(0, TILE)
        source = load_tile(source_at, rows, columns, D, 1, H, D)
        store_tile(target_at, source + load_tile(target_at, rows, columns, D, 1, H, D), rows, columns, D, 1, H, D)
        store_tile(source_at, tl.zeros(source.shape, tl.float32), rows, columns, D, 1, H, D)


@triton.jit(do_not_specialize=["num_chunks", "num_groups"])
def _writer_backward_kernel(
    k_ptr,
    v_ptr,
    end_c_ptr,
    end_d_ptr,
    end_m_ptr,
    end_A_ptr,
    end_E_ptr,
    first_w_ptr,
    last_w_ptr,
    first_s_ptr,
    last_s_ptr,
    first_forget_to_ptr,
    last_forget_to_ptr,
    z_ptr,
    p_ptr,
    f_ptr,
    restart_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    read_k_bar_ptr,
    read_hidden_bar_ptr,
    read_first_g_bar_ptr,
    read_top_bar_ptr,
    read_first_w_bar_ptr,
    read_last_w_bar_ptr,
    read_first_s_bar_ptr,
    read_last_s_bar_ptr,
    first_w_bar_ptr,
    last_w_bar_ptr,
    first_s_bar_ptr,
    last_s_bar_ptr,
    first_forget_to_bar_ptr,
    last_forget_to_bar_ptr,
    first_start_w_bar_ptr,
    last_start_w_bar_ptr,
    first_start_s_bar_ptr,
    last_start_s_bar_ptr,
    k_bar_ptr,
    v_bar_ptr,
    end_c_bar_ptr,
    end_d_bar_ptr,
    end_m_bar_ptr,
    end_A_bar_ptr,
    end_E_bar_ptr,
    norm_weight_bar_ptr,
    norm_bias_bar_ptr,
    eps,
    num_chunks,
    num_groups,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    RESTART: tl.constexpr,
    FORGET_TO: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program g: row and head g through all chunks, the last one first."""
    # No loop has anything computed ahead of it: it would only wait in memory for want of registers.
    for step in tl.range(num_chunks, disable_licm=True):
        g = tl.program_id(0).to(tl.int64)
        features, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_B)
        # Chunk n of row and head g, in tensors (N, G, ...).
        at = g + (num_chunks - 1 - step) * num_groups
        start = g * (D * H)
        state, token, hidden_token = at * (D * H), at * (B * D), at * (B * H)
        # Rows and scalars are loaded where they are used: across the passes there are no registers for them.
        A_bar, E_bar = tl.zeros([BLOCK_B, TILE], tl.float32), tl.zeros([BLOCK_B, TILE], tl.float32)
        c_sum, d_sum, m_sum = 0.0, 0.0, 0.0

        # Back through the first layer's update.
        if DEPTH == 2:
            k_bar = load_tile(read_k_bar_ptr + token, features, tokens, 1, D, D, B)
            d, m = tl.load(end_d_ptr + at), tl.load(end_m_ptr + at)
            A, E = load_row(end_A_ptr + at * B, tokens, B), load_row(end_E_ptr + at * B, tokens, B)
            d_bar, m_bar = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
            for begin in tl.range(0, H, TILE, disable_licm=True):
                hidden = begin + tl.arange(0, TILE)
                a, slope = gelu_and_slope(load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H))
                first_g = slope * load_tile(p_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                first_g_bar = load_tile(read_first_g_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                w_bar = load_tile(first_w_bar_ptr + start, features, hidden, H, 1, D, H)
                s_bar = load_tile(first_s_bar_ptr + start, features, hidden, H, 1, D, H)
                k = load_tile(k_ptr + token, features, tokens, 1, D, D, B)
                first_g_bar, k_bar, A_bar, E_bar = _unupdate_tile(
                    first_g, first_g_bar, k, k_bar, A, E, A_bar, E_bar, w_bar, s_bar, PRECISION
                )
                store_tile(read_first_g_bar_ptr + hidden_token, first_g_bar, tokens, hidden, H, 1, B, H)
                d_bar, m_bar = _unupdate_momentum(
                    first_s_ptr + state,
                    first_s_bar_ptr + start,
                    read_first_s_bar_ptr + state,
                    w_bar,
                    s_bar,
                    d,
                    m,
                    d_bar,
                    m_bar,
                    features,
                    hidden,
                    H,
                    1,
                    D,
                    H,
                )
            d_sum += tl.sum(d_bar, 0)
            m_sum += tl.sum(m_bar, 0)
            store_tile(read_k_bar_ptr + token, k_bar, features, tokens, 1, D, D, B)
            # Here and below: the threads that read a tile in the next pass are not those that wrote it.
            tl.debug_barrier()

        # Back through the last layer's update, and upwards through p = g_L W^T.
        error, top, x_hat, rstd, norm_weight = _load_top(
            k_ptr + token,
            v_ptr + token,
            f_ptr + token,
            norm_weight_ptr + g * D if NORM else norm_weight_ptr,
            norm_bias_ptr + g * D if NORM else norm_bias_ptr,
            eps,
            features,
            tokens,
            D,
            B,
            RESIDUAL,
            NORM,
            DOT,
        )
        top_bar = load_tile(read_top_bar_ptr + token, features, tokens, 1, D, D, B)
        d, m = tl.load(end_d_ptr + at), tl.load(end_m_ptr + at)
        A, E = load_row(end_A_ptr + at * B, tokens, B), load_row(end_E_ptr + at * B, tokens, B)
        d_bar, m_bar = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        for begin in tl.range(0, H, TILE, disable_licm=True):
            hidden = begin + tl.arange(0, TILE)
            if DEPTH == 2:
                a, slope = gelu_and_slope(load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H))
                p_bar = slope * load_tile(read_first_g_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                w = load_tile(last_w_ptr + state, features, hidden, 1, D, D, H)
                top_bar = dot(w, tl.trans(p_bar), top_bar, PRECISION)
                a_bar = load_tile(read_hidden_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
            else:
                a = load_tile(k_ptr + token, tokens, hidden, D, 1, B, D).to(tl.float32)
                a_bar = load_tile(read_k_bar_ptr + token, tokens, hidden, D, 1, B, D)
            w_bar = load_tile(last_w_bar_ptr + start, features, hidden, 1, D, D, H)
            s_bar = load_tile(last_s_bar_ptr + start, features, hidden, 1, D, D, H)
            a_bar, top_bar, A_bar, E_bar = _unupdate_tile(
                a, a_bar, top, top_bar, A, E, A_bar, E_bar, w_bar, s_bar, PRECISION
            )
            if DEPTH == 2:
                store_tile(read_hidden_bar_ptr + hidden_token, a_bar, tokens, hidden, H, 1, B, H)
            else:
                store_tile(read_k_bar_ptr + token, a_bar, tokens, hidden, D, 1, B, D)
            d_bar, m_bar = _unupdate_momentum(
                last_s_ptr + state,
                last_s_bar_ptr + start,
                read_last_s_bar_ptr + state,
                w_bar,
                s_bar,
                d,
                m,
                d_bar,
                m_bar,
                features,
                hidden,
                1,
                D,
                D,
                H,
            )
        d_sum += tl.sum(d_bar, 0)
        m_sum += tl.sum(m_bar, 0)
        tl.store(end_A_bar_ptr + at * B + tokens, tl.sum(A_bar, 1), mask=tokens < B)
        tl.store(end_E_bar_ptr + at * B + tokens, tl.sum(E_bar, 1), mask=tokens < B)
        tl.store(end_d_bar_ptr + at, d_sum)
        tl.store(end_m_bar_ptr + at, m_sum)
        store_tile(read_top_bar_ptr + token, top_bar, features, tokens, 1, D, D, B)
        tl.debug_barrier()

        # Through the error at the top.
        error, top, x_hat, rstd, norm_weight = _load_top(
            k_ptr + token,
            v_ptr + token,
            f_ptr + token,
            norm_weight_ptr + g * D if NORM else norm_weight_ptr,
            norm_bias_ptr + g * D if NORM else norm_bias_ptr,
            eps,
            features,
            tokens,
            D,
            B,
            RESIDUAL,
            NORM,
            DOT,
        )
        top_bar = load_tile(read_top_bar_ptr + token, features, tokens, 1, D, D, B)
        f_bar, output_bar, v_bar, weight_bar = _top_adjoint(
            top_bar, error, top, x_hat, rstd, norm_weight, features, D, NORM, DOT
        )
        store_tile(v_bar_ptr + token, v_bar, features, tokens, 1, D, D, B)
        if NORM:
            tl.store(norm_weight_bar_ptr + at * D + features, tl.sum(weight_bar, 1), mask=features < D)
            tl.store(norm_bias_bar_ptr + at * D + features, tl.sum(output_bar, 1), mask=features < D)
        if RESIDUAL and not DOT:
            k_bar = load_tile(read_k_bar_ptr + token, features, tokens, 1, D, D, B) + output_bar
            store_tile(read_k_bar_ptr + token, k_bar, features, tokens, 1, D, D, B)
        tl.debug_barrier()

        # Downwards through the last layer.
        c = tl.load(end_c_ptr + at)
        c_bar = tl.zeros([TILE], tl.float32)
        for begin in tl.range(0, H, TILE, disable_licm=True):
            hidden = begin + tl.arange(0, TILE)
            w = load_tile(last_w_ptr + state, features, hidden, 1, D, D, H)
            w_bar, c_bar = _unupdate_weights(
                w,
                last_w_bar_ptr + start,
                read_last_w_bar_ptr + state,
                last_forget_to_ptr + start if FORGET_TO else last_forget_to_ptr,
                last_forget_to_bar_ptr + start if FORGET_TO else last_forget_to_bar_ptr,
                c,
                c_bar,
                features,
                hidden,
                1,
                D,
                D,
                H,
                FORGET_TO,
            )
            if DEPTH == 2:
                z = load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                a, slope, curvature = gelu_slope_and_curvature(z)
                first_g_bar = load_tile(read_first_g_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                w_bar = dot(top, first_g_bar * slope, w_bar, PRECISION)
                z_bar = first_g_bar * curvature * load_tile(p_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                a_bar = load_tile(read_hidden_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                if NORM or not DOT:
                    a_bar = dot(tl.trans(f_bar), w, a_bar, PRECISION)
                z_bar += slope * a_bar
                store_tile(read_first_g_bar_ptr + hidden_token, z_bar, tokens, hidden, H, 1, B, H)
            else:
                a = load_tile(k_ptr + token, tokens, hidden, D, 1, B, D)
                a_bar = load_tile(read_k_bar_ptr + token, tokens, hidden, D, 1, B, D)
                if NORM or not DOT:
                    a_bar = dot(tl.trans(f_bar), w, a_bar, PRECISION)
                store_tile(k_bar_ptr + token, a_bar, tokens, hidden, D, 1, B, D)
            # Else g_L depends on no result of the last layer.
            if NORM or not DOT:
                w_bar = dot(f_bar, a, w_bar, PRECISION)
            store_tile(last_w_bar_ptr + start, w_bar, features, hidden, 1, D, D, H)
        c_sum += tl.sum(c_bar, 0)

        # Downwards through the first layer.
        if DEPTH == 2:
            tl.debug_barrier()
            k = load_tile(k_ptr + token, features, tokens, 1, D, D, B)
            k_bar = load_tile(read_k_bar_ptr + token, features, tokens, 1, D, D, B)
            c_bar = tl.zeros([BLOCK_D], tl.float32)
            for begin in tl.range(0, H, TILE, disable_licm=True):
                hidden = begin + tl.arange(0, TILE)
                w = load_tile(first_w_ptr + state, features, hidden, H, 1, D, H)
                w_bar, c_bar = _unupdate_weights(
                    w,
                    first_w_bar_ptr + start,
                    read_first_w_bar_ptr + state,
                    first_forget_to_ptr + start if FORGET_TO else first_forget_to_ptr,
                    first_forget_to_bar_ptr + start if FORGET_TO else first_forget_to_bar_ptr,
                    c,
                    c_bar,
                    features,
                    hidden,
                    H,
                    1,
                    D,
                    H,
                    FORGET_TO,
                )
                z_bar = load_tile(read_first_g_bar_ptr + hidden_token, tokens, hidden, H, 1, B, H)
                k_bar = dot(w, tl.trans(z_bar), k_bar, PRECISION)
                w_bar = dot(k, z_bar, w_bar, PRECISION)
                store_tile(first_w_bar_ptr + start, w_bar, features, hidden, H, 1, D, H)
            c_sum += tl.sum(c_bar, 0)
            store_tile(k_bar_ptr + token, k_bar, features, tokens, 1, D, D, B)
        tl.store(end_c_bar_ptr + at, c_sum)
        tl.debug_barrier()

        if RESTART:
            if tl.load(restart_ptr + at) != 0:
                _move_matrix(last_w_bar_ptr + start, last_start_w_bar_ptr + start, features, H, D, TILE)
                _move_matrix(last_s_bar_ptr + start, last_start_s_bar_ptr + start, features, H, D, TILE)
                if DEPTH == 2:
                    # The first layer is (D, h); as a matrix to add, (h, D) lines are the same memory.
                    _move_matrix(first_w_bar_ptr + start, first_start_w_bar_ptr + start, features, H, D, TILE)
                    _move_matrix(first_s_bar_ptr + start, first_start_s_bar_ptr + start, features, H, D, TILE)
            tl.debug_barrier()
