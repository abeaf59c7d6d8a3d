# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The adjoint of the reader as a Triton kernel: one program per chunk, row and head, all chunks at once.

The read itself is computed again from the states at the chunks' starts. Three passes over tiles of the last layer's
input, so that few values are alive at a time: forward to the output; back through the last layer; back through the
first. Between passes the hidden pre-activation r, then its gradient, goes through memory.

What has D features lies (features, tokens), see `triton_math`; tiles of the last layer's input ("hidden") lie (tokens,
hidden) and those of either layer's state (features, hidden), so that D and the tokens, both 64 at the default sizes,
are the left sides of all products.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which the last b_q are read, D head dimension, h width
of the last layer's input (D for one layer).
"""

from typing import NamedTuple

import torch

from .chunk_coefficients import ReadCoefficients
from .inner_network import InnerNetwork
from .triton_configs import LaunchConfig
from .triton_forward import Scratch
from .triton_launch import by_layer, launch_parameters, token_block
from .triton_math import (
    computed_once,
    dot,
    gelu,
    gelu_and_slope,
    layer_output,
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


class ReadGradients(NamedTuple):
    """Gradients through the reads of N chunks, float32; those of states and norm are for each chunk by itself.

    Attributes:
        q: (N, G, b_q, D), in q's dtype.
        k: by the first layer's key input, (N, G, b, D).
        hidden: by the second layer's key input a, (N, G, b, h); None for one layer.
        first_g: by the first layer's errors g_1, (N, G, b, h); None for one layer.
        top: by the last layer's errors g_L, (N, G, b, D).
        coefficients: c, d (N, G, b_q) and A (N, G, b_q, b).
        weights, momentum: by layer, (N, G, D_in, D_out).
        forget_to: the same, or None.
        norm_weight, norm_bias: (N, G, D), or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    hidden: torch.Tensor | None
    first_g: torch.Tensor | None
    top: torch.Tensor
    coefficients: ReadCoefficients
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    forget_to: tuple[torch.Tensor, ...] | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None

    @classmethod
    def empty_for(
        cls, q: torch.Tensor, k: torch.Tensor, weights: tuple[torch.Tensor, ...], norm: bool, forget_to: bool
    ) -> "ReadGradients":
        """Uninitialised, for q (N, G, b_q, D), k (N, G, b, D) and weights (.., G, D_in, D_out) by layer."""
        num_chunks, num_groups, b, head_dim = k.shape

        def empty(*shape):
            return k.new_empty(num_chunks, num_groups, *shape, dtype=torch.float32)

        def states():
            return tuple(empty(*w.shape[-2:]) for w in weights)

        hidden = weights[-1].shape[-2] if len(weights) == 2 else None
        num_queries = q.shape[-2]
        return cls(
            torch.empty_like(q),
            empty(b, head_dim),
            *((None, None) if hidden is None else (empty(b, hidden), empty(b, hidden))),
            empty(b, head_dim),
            ReadCoefficients(empty(num_queries), empty(num_queries), empty(num_queries, b)),
            states(),
            states(),
            states() if forget_to else None,
            *((empty(head_dim), empty(head_dim)) if norm else (None, None)),
        )


def launch_reader_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: ReadCoefficients,
    weights: tuple[torch.Tensor, ...],
    momentum: tuple[torch.Tensor, ...],
    scratch: Scratch,
    network: InnerNetwork,
    precision: str,
    output_bar: torch.Tensor,
    gradients: ReadGradients,
    *,
    forget_to: tuple[torch.Tensor, ...] | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """The adjoint of `launch_reader`; MEMORY.md derives it.

    Args:
        q, k, v, read, weights, momentum, scratch, network, precision, forget_to, config: as `launch_reader` had them.
        output_bar: (N, G, b_q, D) floating point, contiguous: an outer loss's gradient by the output.
        gradients: all of it is written.

    Raises:
        ValueError: the tensors are not on a GPU and the kernels are not interpreted.
    """
    config, sizes, launch = launch_parameters("reader_backward", k, weights, precision, config)
    num_queries = q.shape[-2]
    block = token_block(config, num_queries)
    r = torch.empty(*q.shape[:-1], sizes["H"], dtype=torch.float32, device=q.device) if len(weights) == 2 else None
    f = torch.empty_like(q, dtype=torch.float32)
    for first_query in range(0, num_queries, block):
        _reader_backward_kernel[(k.shape[0] * k.shape[1],)](
            *(q, k, v, *read, *by_layer(weights), *by_layer(momentum), *by_layer(forget_to), *scratch, r, f),
            *(output_bar, network.norm_weight, network.norm_bias, *gradients[:5], *gradients.coefficients),
            *(*by_layer(gradients.weights), *by_layer(gradients.momentum), *by_layer(gradients.forget_to)),
            *(gradients.norm_weight, gradients.norm_bias, network.norm_eps, k.shape[1], first_query),
            **sizes,
            BQ=num_queries,
            BLOCK_Q=block,
            ADD=first_query > 0,
            FORGET_TO=forget_to is not None,
            RESIDUAL=network.residual,
            NORM=network.norm_weight is not None,
            DOT=network.dot,
            PRECISION=precision_that_fits(precision, *k.shape[-2:]),
            **launch,
        )


def precision_that_fits(precision: str, chunk_size: int, head_dim: int) -> str:
    """The precision of a backward kernel's products (`triton_math.dot`), for the one that was asked for.

    Of the largest sizes the operands of three tf32 products exceed a card's shared memory. Those of one float32
    product do not: as exact, and far slower.
    """
    return "ieee" if precision == "tf32x3" and head_dim > 128 and chunk_size > 64 else precision


@triton.jit
def _put_tile(
    base,
    tile,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    ADD: tl.constexpr,
):
    """`store_tile`, or with ADD the tile is added to what is stored."""
    if ADD:
        tile += load_tile(base, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    store_tile(base, tile, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)


@triton.jit
def _put_row(base, row, index, END: tl.constexpr, ADD: tl.constexpr):
    """The same for a vector."""
    if ADD:
        row += load_row(base, index, END)
    tl.store(base + index, row, mask=index < END)


@triton.jit
def _through_state(
    x_bar,
    coefficient_bar,
    x,
    coefficient,
    r_bar,
    state_at,
    features,
    hidden,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Back through r = coefficient * (x W) for one tile of W^T (features, hidden), hidden being x's features.

    Returns:
        ``x_bar`` and ``coefficient_bar``, both (queries, hidden), plus their shares, the latter's times SIGN; it waits
        for the sum over hidden.
    """
    w = load_tile(state_at, features, hidden, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    through = dot(tl.trans(r_bar), w, tl.zeros(x_bar.shape, tl.float32), PRECISION)
    return x_bar + through * coefficient[:, None], coefficient_bar + x * through * SIGN


@triton.jit(do_not_specialize=["num_groups", "first_query"])
def _reader_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    c_ptr,
    d_ptr,
    A_ptr,
    first_w_ptr,
    last_w_ptr,
    first_s_ptr,
    last_s_ptr,
    first_forget_to_ptr,
    last_forget_to_ptr,
    z_ptr,
    p_ptr,
    f_ptr,
    r_ptr,
    read_f_ptr,
    output_bar_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    q_bar_ptr,
    k_bar_ptr,
    hidden_bar_ptr,
    first_g_bar_ptr,
    top_bar_ptr,
    c_bar_ptr,
    d_bar_ptr,
    A_bar_ptr,
    first_w_bar_ptr,
    last_w_bar_ptr,
    first_s_bar_ptr,
    last_s_bar_ptr,
    first_forget_to_bar_ptr,
    last_forget_to_bar_ptr,
    norm_weight_bar_ptr,
    norm_bias_bar_ptr,
    eps,
    num_groups,
    first_query,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    BQ: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ADD: tl.constexpr,
    FORGET_TO: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program n * G + g: some queries of chunk n of row and head g, from ``first_query`` on.

    ADD: sums over queries are added to what earlier queries left.
    """
    at = tl.program_id(0).to(tl.int64)
    g = at % num_groups
    features, tokens = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_B)
    queries = tl.arange(0, BLOCK_Q)
    if BLOCK_Q < BQ:
        queries += first_query
    state, start, token, hidden_token = at * (D * H), g * (D * H), at * (B * D), at * (B * H)
    query, hidden_query = at * (BQ * D), at * (BQ * H)
    A_at, A_bar_at = A_ptr + at * (B * B) + (B - BQ) * B, A_bar_ptr + at * (BQ * B)
    c = load_row(c_ptr + at * B + (B - BQ), queries, BQ)
    d = load_row(d_ptr + at * B + (B - BQ), queries, BQ)
    rest = 1.0 - c

    # Forward: f, the last layer's scores, and r.
    if DEPTH == 2:
        q = load_tile(q_ptr + query, features, queries, 1, D, D, BQ)
        k = load_tile(k_ptr + token, features, tokens, 1, D, D, B)
        attention = dot(tl.trans(k), q, tl.zeros([BLOCK_B, BLOCK_Q], tl.float32), PRECISION)
        attention = -attention * load_tile(A_at, tokens, queries, 1, B, B, BQ)
    f = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
    scores = tl.zeros([BLOCK_B, BLOCK_Q], tl.float32)
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        if DEPTH == 2:
            w = load_tile(first_w_ptr + state, features, hidden, H, 1, D, H)
            r = c[:, None] * dot(tl.trans(q), w, tl.zeros([BLOCK_Q, TILE], tl.float32), PRECISION)
            w = load_tile(first_s_ptr + state, features, hidden, H, 1, D, H)
            r += d[:, None] * dot(tl.trans(q), w, tl.zeros([BLOCK_Q, TILE], tl.float32), PRECISION)
            if FORGET_TO:
                w = load_tile(first_forget_to_ptr + start, features, hidden, H, 1, D, H)
                r += rest[:, None] * dot(tl.trans(q), w, tl.zeros([BLOCK_Q, TILE], tl.float32), PRECISION)
            p = load_tile(p_ptr + hidden_token, tokens, hidden, H, 1, B, H)
            a, slope = gelu_and_slope(load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H))
            r = dot(tl.trans(attention), p * slope, r, PRECISION)
            store_tile(r_ptr + hidden_query, r, queries, hidden, H, 1, BQ, H)
            x = gelu(r)
        else:
            x = load_tile(q_ptr + query, queries, hidden, D, 1, BQ, D).to(tl.float32)
            a = load_tile(k_ptr + token, tokens, hidden, D, 1, B, D)
        scores = dot(a, tl.trans(x), scores, PRECISION)
        w = load_tile(last_w_ptr + state, features, hidden, 1, D, D, H)
        f = dot(w, tl.trans(x * c[:, None]), f, PRECISION)
        w = load_tile(last_s_ptr + state, features, hidden, 1, D, D, H)
        f = dot(w, tl.trans(x * d[:, None]), f, PRECISION)
        if FORGET_TO:
            w = load_tile(last_forget_to_ptr + start, features, hidden, 1, D, D, H)
            f = dot(w, tl.trans(x * rest[:, None]), f, PRECISION)

    # The top: from the output's gradient to f's, the scores' and g_L's.
    k_top = load_tile(k_ptr + token, features, tokens, 1, D, D, B).to(tl.float32)
    v_top = load_tile(v_ptr + token, features, tokens, 1, D, D, B).to(tl.float32)
    f_key = load_tile(f_ptr + token, features, tokens, 1, D, D, B)
    norm_weight, norm_bias = features, features
    if NORM:
        norm_weight = load_row(norm_weight_ptr + g * D, features, D)
        norm_bias = load_row(norm_bias_ptr + g * D, features, D)
    _, top, _, _ = top_error(k_top, v_top, f_key, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM, DOT)
    A = load_tile(A_at, tokens, queries, 1, B, B, BQ)
    weighted = -A * scores
    f = dot(top, weighted, f, PRECISION)
    # Through memory, and so into a layout in which sums over features stay inside a warp.
    store_tile(read_f_ptr + query, f, features, queries, 1, D, D, BQ)
    tl.debug_barrier()
    f = load_tile(read_f_ptr + query, features, queries, 1, D, D, BQ)
    f_bar = load_tile(output_bar_ptr + query, features, queries, 1, D, D, BQ).to(tl.float32)
    if NORM:
        _, x_hat, rstd = layer_output(f, f, norm_weight, norm_bias, features, eps, D, False, True)
        _put_row(norm_weight_bar_ptr + at * D, tl.sum(f_bar * x_hat, 1), features, D, ADD)
        _put_row(norm_bias_bar_ptr + at * D, tl.sum(f_bar, 1), features, D, ADD)
        f_bar = norm_jacobian(f_bar * norm_weight[:, None], x_hat, rstd, features, D)
    top_bar = dot(f_bar, tl.trans(weighted), tl.zeros([BLOCK_D, BLOCK_B], tl.float32), PRECISION)
    _put_tile(top_bar_ptr + token, top_bar, features, tokens, 1, D, D, B, ADD)
    product_bar = -dot(tl.trans(top), f_bar, tl.zeros([BLOCK_B, BLOCK_Q], tl.float32), PRECISION)
    store_tile(A_bar_at, product_bar * scores, tokens, queries, 1, B, B, BQ)
    scores_bar = product_bar * A
    # The threads that read r, and in the end A's gradient, are not those that wrote them.
    tl.debug_barrier()

    # Back through the last layer.
    c_bar, d_bar = tl.zeros([BLOCK_Q, TILE], tl.float32), tl.zeros([BLOCK_Q, TILE], tl.float32)
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        if DEPTH == 2:
            x, slope = gelu_and_slope(load_tile(r_ptr + hidden_query, queries, hidden, H, 1, BQ, H))
            a = gelu(load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H))
        else:
            x = load_tile(q_ptr + query, queries, hidden, D, 1, BQ, D).to(tl.float32)
            a = load_tile(k_ptr + token, tokens, hidden, D, 1, B, D)
        x_bar = dot(tl.trans(scores_bar), a, tl.zeros([BLOCK_Q, TILE], tl.float32), PRECISION)
        x_bar, c_bar = _through_state(
            x_bar, c_bar, x, c, f_bar, last_w_ptr + state, features, hidden, 1, D, D, H, 1, PRECISION
        )
        x_bar, d_bar = _through_state(
            x_bar, d_bar, x, d, f_bar, last_s_ptr + state, features, hidden, 1, D, D, H, 1, PRECISION
        )
        if FORGET_TO:
            x_bar, c_bar = _through_state(
                x_bar, c_bar, x, rest, f_bar, last_forget_to_ptr + start, features, hidden, 1, D, D, H, -1, PRECISION
            )
        if DEPTH == 2:
            store_tile(r_ptr + hidden_query, x_bar * slope, queries, hidden, H, 1, BQ, H)
        else:
            if RESIDUAL:
                x_bar += load_tile(output_bar_ptr + query, queries, hidden, D, 1, BQ, D).to(tl.float32)
            store_tile(q_bar_ptr + query, x_bar, queries, hidden, D, 1, BQ, D)
        a_bar = dot(scores_bar, x, tl.zeros([BLOCK_B, TILE], tl.float32), PRECISION)
        if DEPTH == 2:
            _put_tile(hidden_bar_ptr + hidden_token, a_bar, tokens, hidden, H, 1, B, H, ADD)
        else:
            _put_tile(k_bar_ptr + token, a_bar, tokens, hidden, D, 1, B, D, ADD)
        w_bar = dot(f_bar, x * c[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
        _put_tile(last_w_bar_ptr + state, w_bar, features, hidden, 1, D, D, H, ADD)
        w_bar = dot(f_bar, x * d[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
        _put_tile(last_s_bar_ptr + state, w_bar, features, hidden, 1, D, D, H, ADD)
        if FORGET_TO:
            w_bar = dot(f_bar, x * rest[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
            _put_tile(last_forget_to_bar_ptr + state, w_bar, features, hidden, 1, D, D, H, ADD)

    c_bar, d_bar = tl.sum(c_bar, 1), tl.sum(d_bar, 1)
    if DEPTH == 2:
        tl.debug_barrier()
        # Back through the first layer; through_*: r's gradient times the transposed states.
        q = load_tile(q_ptr + query, features, queries, 1, D, D, BQ)
        k = load_tile(k_ptr + token, features, tokens, 1, D, D, B)
        scores = dot(tl.trans(k), q, tl.zeros([BLOCK_B, BLOCK_Q], tl.float32), PRECISION)
        weighted = -scores * load_tile(A_at, tokens, queries, 1, B, B, BQ)
        q = q.to(tl.float32)
        product_bar = tl.zeros([BLOCK_B, BLOCK_Q], tl.float32)
        through_w = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
        through_s = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
        if FORGET_TO:
            through_start = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
        for begin in range(0, H, TILE):
            hidden = begin + tl.arange(0, TILE)
            r_bar = computed_once(load_tile(r_ptr + hidden_query, queries, hidden, H, 1, BQ, H))
            p = load_tile(p_ptr + hidden_token, tokens, hidden, H, 1, B, H)
            a, slope = gelu_and_slope(load_tile(z_ptr + hidden_token, tokens, hidden, H, 1, B, H))
            product_bar = dot(p * slope, tl.trans(r_bar), product_bar, PRECISION)
            g_bar = dot(weighted, r_bar, tl.zeros([BLOCK_B, TILE], tl.float32), PRECISION)
            _put_tile(first_g_bar_ptr + hidden_token, g_bar, tokens, hidden, H, 1, B, H, ADD)
            w = load_tile(first_w_ptr + state, features, hidden, H, 1, D, H)
            through_w = dot(w, tl.trans(r_bar), through_w, PRECISION)
            w = load_tile(first_s_ptr + state, features, hidden, H, 1, D, H)
            through_s = dot(w, tl.trans(r_bar), through_s, PRECISION)
            w_bar = dot(q, r_bar * c[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
            _put_tile(first_w_bar_ptr + state, w_bar, features, hidden, H, 1, D, H, ADD)
            w_bar = dot(q, r_bar * d[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
            _put_tile(first_s_bar_ptr + state, w_bar, features, hidden, H, 1, D, H, ADD)
            if FORGET_TO:
                w = load_tile(first_forget_to_ptr + start, features, hidden, H, 1, D, H)
                through_start = dot(w, tl.trans(r_bar), through_start, PRECISION)
                w_bar = dot(q, r_bar * rest[:, None], tl.zeros([BLOCK_D, TILE], tl.float32), PRECISION)
                _put_tile(first_forget_to_bar_ptr + state, w_bar, features, hidden, H, 1, D, H, ADD)
        c_bar += tl.sum(q * through_w, 0)
        d_bar += tl.sum(q * through_s, 0)
        q_bar = c[None, :] * through_w + d[None, :] * through_s
        if FORGET_TO:
            c_bar -= tl.sum(q * through_start, 0)
            q_bar += rest[None, :] * through_start
        if RESIDUAL:
            q_bar += load_tile(output_bar_ptr + query, features, queries, 1, D, D, BQ).to(tl.float32)
        A_bar = load_tile(A_bar_at, tokens, queries, 1, B, B, BQ) - product_bar * scores
        store_tile(A_bar_at, A_bar, tokens, queries, 1, B, B, BQ)
        scores_bar = -product_bar * load_tile(A_at, tokens, queries, 1, B, B, BQ)
        store_tile(q_bar_ptr + query, dot(k, scores_bar, q_bar, PRECISION), features, queries, 1, D, D, BQ)
        k_bar = dot(q, tl.trans(scores_bar), tl.zeros([BLOCK_D, BLOCK_B], tl.float32), PRECISION)
        _put_tile(k_bar_ptr + token, k_bar, features, tokens, 1, D, D, B, ADD)
    tl.store(c_bar_ptr + at * BQ + queries, c_bar, mask=queries < BQ)
    tl.store(d_bar_ptr + at * BQ + queries, d_bar, mask=queries < BQ)
