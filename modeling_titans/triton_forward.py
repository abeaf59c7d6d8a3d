# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The writes of `chunk_scan` as Triton kernels.

*Writer*: one program per row and head takes the weights from chunk to chunk; state n is read from slot n of the
boundary states and state n + 1 written to the next, tile by tile, so that states of any size pass through. *Factors*:
the same inner gradients from boundary states that are there already, all chunks at once.

The last layer is walked in tiles over its input: a two-layer memory's hidden features, whose first layer is computed
on the way, or a one-layer memory's key itself. Beside the states, only each chunk's z, p and f go through memory:

    z = k W_1, a = gelu(z)      f: the last layer's result     g_L from f, k, v      p = g_L W_2^T, g_1 = p gelu'(z)

Tiles are (features, tokens), see `triton_math`. Shapes: N chunks, G rows times heads, b tokens in a chunk, D head
dimension, h width of the last layer's input (D for one layer).
"""

from typing import NamedTuple

import torch

from .chunk_coefficients import EndCoefficients
from .inner_network import InnerNetwork
from .triton_configs import LaunchConfig
from .triton_launch import by_layer, launch_parameters, token_block
from .triton_math import dot, gelu, gelu_and_slope, layer_output, load_row, load_tile, operand, store_tile, top_error


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


class Scratch(NamedTuple):
    """What the kernels hand to each other beside the states, float32.

    Attributes:
        z, p: pre-activations of the hidden layer and errors before its slope, (N, G, b, h); None for one layer.
        f: the last layer's result, (N, G, b, D).
    """

    z: torch.Tensor | None
    p: torch.Tensor | None
    f: torch.Tensor

    @classmethod
    def empty_for(cls, k: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> "Scratch":
        """Uninitialised, for keys (N, G, b, D) and weights (..., D_in, D_out) by layer."""
        hidden = [
            k.new_empty(*k.shape[:-1], weights[-1].shape[-2], dtype=torch.float32) if len(weights) == 2 else None
            for _ in range(2)
        ]
        return cls(*hidden, torch.empty_like(k, dtype=torch.float32))


def launch_writer(
    k: torch.Tensor,
    v: torch.Tensor,
    end: EndCoefficients,
    weights: tuple[torch.Tensor, ...],
    momentum: tuple[torch.Tensor, ...],
    scratch: Scratch,
    network: InnerNetwork,
    precision: str,
    *,
    restart: torch.Tensor | None = None,
    start_weights: tuple[torch.Tensor, ...] | None = None,
    start_momentum: tuple[torch.Tensor, ...] | None = None,
    forget_to: tuple[torch.Tensor, ...] | None = None,
    surprise: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """Takes the states through N chunks (Titans, eq. 12-14, 16).

    Args:
        k, v: (N, G, b, D) bfloat16, float16 or float32. All tensors are contiguous.
        end: c, d, m (N, G) and A, E (N, G, b), float32.
        weights, momentum: by layer, (N + 1, G, D_in, D_out) float32. Slot 0 holds the incoming state; slots 1 to N are
            written, and where ``restart`` holds also the slot before the chunk.
        scratch: written.
        restart: (N, G) bool: chunks before which the state goes back to ``start_weights`` and ``start_momentum``.
        start_weights, start_momentum, forget_to: by layer, (G, D_in, D_out) float32.
        surprise: (N, G, b) float32: the inner losses are written there.
        precision: of products, see `triton_math.dot`.
        config: how to launch; None: the default.

    Raises:
        ValueError: the tensors are not on a GPU and the kernels are not interpreted.
    """
    config, sizes, launch = launch_parameters("writer", k, weights, precision, config)
    sizes["BLOCK_B"] = token_block(config, sizes["B"])
    top = torch.empty(k.shape[1:], dtype=torch.float32, device=k.device) if sizes["BLOCK_B"] < sizes["B"] else None
    _writer_kernel[(k.shape[1],)](
        *(k, v, *end, *by_layer(weights), *by_layer(momentum)),
        None if restart is None else restart.view(torch.uint8),
        *(*by_layer(start_weights), *by_layer(start_momentum), *by_layer(forget_to)),
        *(*scratch, top, surprise, network.norm_weight, network.norm_bias, network.norm_eps, *k.shape[:2]),
        **sizes,
        RESTART=restart is not None,
        FORGET_TO=forget_to is not None,
        SURPRISE=surprise is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        DOT=network.dot,
        PRECISION=precision,
        **launch,
    )


def launch_factors(
    k: torch.Tensor,
    v: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    scratch: Scratch,
    network: InnerNetwork,
    precision: str,
    *,
    surprise: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """The inner gradients of N chunks at given weights: fills ``scratch`` (and ``surprise``) as the writer does.

    Args:
        weights: by layer, at least N slots (N.., G, D_in, D_out): the weights at each chunk's start.
        Others: as `launch_writer`.

    Raises:
        ValueError: as `launch_writer`.
    """
    config, sizes, launch = launch_parameters("factors", k, weights, precision, config)
    sizes["BLOCK_B"] = token_block(config, sizes["B"])
    _factors_kernel[(k.shape[0] * k.shape[1] * -(-sizes["B"] // sizes["BLOCK_B"]),)](
        *(k, v, *by_layer(weights), *scratch, surprise),
        *(network.norm_weight, network.norm_bias, network.norm_eps, k.shape[1]),
        **sizes,
        SURPRISE=surprise is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        DOT=network.dot,
        PRECISION=precision,
        **launch,
    )


@triton.jit
def _error_of_keys(
    k_at,
    v_at,
    first_at,
    last_at,
    z_at,
    f_at,
    surprise_at,
    norm_weight_at,
    norm_bias_at,
    eps,
    features,
    tokens,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
    SURPRISE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """g_L (BLOCK_D, tokens) of these keys; leaves z, f and the inner losses behind ``z_at``, ``f_at``, ..."""
    f = tl.zeros([features.shape[0], tokens.shape[0]], tl.float32)
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        if DEPTH == 2:
            k = load_tile(k_at, features, tokens, 1, D, D, B)
            first = load_tile(first_at, hidden, features, 1, H, H, D)
            z = dot(first, k, tl.zeros([TILE, tokens.shape[0]], tl.float32), PRECISION)
            store_tile(z_at, z, hidden, tokens, 1, H, H, B)
            a = gelu(z)
        else:
            a = load_tile(k_at, hidden, tokens, 1, D, D, B)
        if NORM or SURPRISE or not DOT:
            last = load_tile(last_at, hidden, features, D, 1, H, D)
            f = dot(tl.trans(last), a, f, PRECISION)
    store_tile(f_at, f, features, tokens, 1, D, D, B)

    k = load_tile(k_at, features, tokens, 1, D, D, B).to(tl.float32)
    v = load_tile(v_at, features, tokens, 1, D, D, B).to(tl.float32)
    norm_weight, norm_bias = features, features
    if NORM:
        norm_weight = load_row(norm_weight_at, features, D)
        norm_bias = load_row(norm_bias_at, features, D)
    error, g, _, _ = top_error(k, v, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM, DOT)
    if SURPRISE:
        loss = 0.25 * tl.sum(error * error, 0)
        if DOT:
            output, _, _ = layer_output(k, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
            loss = -tl.sum(output * v, 0)
        tl.store(surprise_at + tokens, loss, mask=tokens < B)
    return g


@triton.jit
def _back_of_keys(
    last_at,
    p_at,
    g,
    features,
    tokens,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Leaves p = g_2 W_2^T behind ``p_at``."""
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        last = load_tile(last_at, hidden, features, D, 1, H, D)
        p = dot(last, g, tl.zeros([TILE, tokens.shape[0]], tl.float32), PRECISION)
        store_tile(p_at, p, hidden, tokens, 1, H, H, B)


@triton.jit
def _decayed_tile(
    w,
    s_at,
    forget_to_at,
    c,
    d,
    m,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    FORGET_TO: tl.constexpr,
):
    """One tile of c W + d S [+ (1 - c) W_0] and of m S, given that of W."""
    s = load_tile(s_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
    w_next = c * w + d * s
    if FORGET_TO:
        start = load_tile(forget_to_at, rows, columns, ROW_STRIDE, COLUMN_STRIDE, ROW_END, COLUMN_END)
        w_next += (1.0 - c) * start
    return w_next, m * s


@triton.jit
def _update_at_once(
    k_at,
    z_at,
    p_at,
    A_at,
    E_at,
    top,
    first_w_at,
    first_s_at,
    last_w_at,
    last_s_at,
    step,
    first_forget_to_at,
    last_forget_to_at,
    c,
    d,
    m,
    features,
    tokens,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
    FORGET_TO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state behind a chunk, ``step`` elements behind that before it; p on the way.

    Args:
        top: g_L of all the chunk's tokens, (BLOCK_D, BLOCK_B).
    """
    A, E = load_row(A_at, tokens, B), load_row(E_at, tokens, B)
    g_A, g_E = tl.trans(top * -A[None, :]), tl.trans(top * -E[None, :])
    if DEPTH == 2:
        k = load_tile(k_at, tokens, features, D, 1, B, D).to(tl.float32)
        k_A, k_E = k * -A[:, None], k * -E[:, None]
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        w = load_tile(last_w_at, hidden, features, D, 1, H, D)
        if DEPTH == 2:
            p = dot(w, top, tl.zeros([TILE, tokens.shape[0]], tl.float32), PRECISION)
            store_tile(p_at, p, hidden, tokens, 1, H, H, B)
            a, slope = gelu_and_slope(load_tile(z_at, hidden, tokens, 1, H, H, B))
            a, first_g = operand(a, PRECISION), operand(p * slope, PRECISION)
        else:
            a = load_tile(k_at, hidden, tokens, 1, D, D, B)
        w_next, s_next = _decayed_tile(
            w, last_s_at, last_forget_to_at, c, d, m, hidden, features, D, 1, H, D, FORGET_TO
        )
        store_tile(last_w_at + step, dot(a, g_A, w_next, PRECISION), hidden, features, D, 1, H, D)
        store_tile(last_s_at + step, dot(a, g_E, s_next, PRECISION), hidden, features, D, 1, H, D)
        if DEPTH == 2:
            # Tiles of the first layer are transposed.
            w = load_tile(first_w_at, hidden, features, 1, H, H, D)
            w_next, s_next = _decayed_tile(
                w, first_s_at, first_forget_to_at, c, d, m, hidden, features, 1, H, H, D, FORGET_TO
            )
            store_tile(first_w_at + step, dot(first_g, k_A, w_next, PRECISION), hidden, features, 1, H, H, D)
            store_tile(first_s_at + step, dot(first_g, k_E, s_next, PRECISION), hidden, features, 1, H, H, D)


@triton.jit
def _update_in_blocks(
    k_at,
    z_at,
    p_at,
    A_at,
    E_at,
    top_at,
    first_w_at,
    first_s_at,
    last_w_at,
    last_s_at,
    step,
    first_forget_to_at,
    last_forget_to_at,
    c,
    d,
    m,
    features,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    FORGET_TO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same for chunks whose keys and errors do not fit into shared memory: p and g_L (b, D) are in memory."""
    for begin in range(0, H, TILE):
        hidden = begin + tl.arange(0, TILE)
        w = load_tile(last_w_at, hidden, features, D, 1, H, D)
        w_next, s_next = _decayed_tile(
            w, last_s_at, last_forget_to_at, c, d, m, hidden, features, D, 1, H, D, FORGET_TO
        )
        for block in range(0, B, BLOCK_B):
            tokens = block + tl.arange(0, BLOCK_B)
            A, E = load_row(A_at, tokens, B), load_row(E_at, tokens, B)
            if DEPTH == 2:
                a = gelu(load_tile(z_at, hidden, tokens, 1, H, H, B))
            else:
                a = load_tile(k_at, hidden, tokens, 1, D, D, B)
            g = load_tile(top_at, tokens, features, D, 1, B, D)
            w_next = dot(a, g * -A[:, None], w_next, PRECISION)
            s_next = dot(a, g * -E[:, None], s_next, PRECISION)
        store_tile(last_w_at + step, w_next, hidden, features, D, 1, H, D)
        store_tile(last_s_at + step, s_next, hidden, features, D, 1, H, D)
        if DEPTH == 2:
            w = load_tile(first_w_at, hidden, features, 1, H, H, D)
            w_next, s_next = _decayed_tile(
                w, first_s_at, first_forget_to_at, c, d, m, hidden, features, 1, H, H, D, FORGET_TO
            )
            for block in range(0, B, BLOCK_B):
                tokens = block + tl.arange(0, BLOCK_B)
                A, E = load_row(A_at, tokens, B), load_row(E_at, tokens, B)
                _, slope = gelu_and_slope(load_tile(z_at, hidden, tokens, 1, H, H, B))
                first_g = load_tile(p_at, hidden, tokens, 1, H, H, B) * slope
                k = load_tile(k_at, tokens, features, D, 1, B, D).to(tl.float32)
                w_next = dot(first_g, k * -A[:, None], w_next, PRECISION)
                s_next = dot(first_g, k * -E[:, None], s_next, PRECISION)
            store_tile(first_w_at + step, w_next, hidden, features, 1, H, H, D)
            store_tile(first_s_at + step, s_next, hidden, features, 1, H, H, D)


@triton.jit
def _copy_matrix(source_at, target_at, columns, H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """Copies an (H, D) matrix."""
    for begin in range(0, H, TILE):
        rows = begin + tl.arange(0, TILE)
        store_tile(target_at, load_tile(source_at, rows, columns, D, 1, H, D), rows, columns, D, 1, H, D)


@triton.jit(do_not_specialize=["num_chunks", "num_groups"])
def _writer_kernel(
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
    restart_ptr,
    first_start_w_ptr,
    last_start_w_ptr,
    first_start_s_ptr,
    last_start_s_ptr,
    first_forget_to_ptr,
    last_forget_to_ptr,
    z_ptr,
    p_ptr,
    f_ptr,
    top_ptr,
    surprise_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
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
    SURPRISE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program g: row and head g through all chunks."""
    g = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    start, step = g * (D * H), num_groups.to(tl.int64) * (D * H)
    # Places of row and head g that chunks do not move, and, once ``at`` steps are added, of chunk n in (N, G, ...).
    norm_weight_at = norm_weight_ptr + g * D if NORM else norm_weight_ptr
    norm_bias_at = norm_bias_ptr + g * D if NORM else norm_bias_ptr
    first_forget_to_at = first_forget_to_ptr + start if FORGET_TO and DEPTH == 2 else first_forget_to_ptr
    last_forget_to_at = last_forget_to_ptr + start if FORGET_TO else last_forget_to_ptr
    at = g
    for _ in range(num_chunks):
        k_at, v_at, f_at = k_ptr + at * (B * D), v_ptr + at * (B * D), f_ptr + at * (B * D)
        z_at = z_ptr + at * (B * H) if DEPTH == 2 else z_ptr
        p_at = p_ptr + at * (B * H) if DEPTH == 2 else p_ptr
        first_w_at = first_w_ptr + at * (D * H) if DEPTH == 2 else first_w_ptr
        first_s_at = first_s_ptr + at * (D * H) if DEPTH == 2 else first_s_ptr
        last_w_at, last_s_at = last_w_ptr + at * (D * H), last_s_ptr + at * (D * H)
        surprise_at = surprise_ptr + at * B if SURPRISE else surprise_ptr
        if RESTART:
            if tl.load(restart_ptr + at) != 0:
                _copy_matrix(last_start_w_ptr + start, last_w_at, features, H, D, TILE)
                _copy_matrix(last_start_s_ptr + start, last_s_at, features, H, D, TILE)
                if DEPTH == 2:
                    # The first layer is (D, h); as memory to copy, (h, D) is the same.
                    _copy_matrix(first_start_w_ptr + start, first_w_at, features, H, D, TILE)
                    _copy_matrix(first_start_s_ptr + start, first_s_at, features, H, D, TILE)
            tl.debug_barrier()
        c, d, m = tl.load(end_c_ptr + at), tl.load(end_d_ptr + at), tl.load(end_m_ptr + at)

        top = tl.zeros([BLOCK_D, BLOCK_B], tl.float32)
        for block in range(0, B, BLOCK_B):
            tokens = block + tl.arange(0, BLOCK_B)
            top = _error_of_keys(
                k_at,
                v_at,
                first_w_at,
                last_w_at,
                z_at,
                f_at,
                surprise_at,
                norm_weight_at,
                norm_bias_at,
                eps,
                features,
                tokens,
                DEPTH,
                D,
                H,
                B,
                TILE,
                SURPRISE,
                RESIDUAL,
                NORM,
                DOT,
                PRECISION,
            )
            if B > BLOCK_B:
                store_tile(top_ptr + g * (B * D), top, features, tokens, 1, D, D, B)
                if DEPTH == 2:
                    _back_of_keys(last_w_at, p_at, top, features, tokens, D, H, B, TILE, PRECISION)
        # The threads that read z in the update are not those that wrote it.
        tl.debug_barrier()
        if B > BLOCK_B:
            _update_in_blocks(
                k_at,
                z_at,
                p_at,
                end_A_ptr + at * B,
                end_E_ptr + at * B,
                top_ptr + g * (B * D),
                first_w_at,
                first_s_at,
                last_w_at,
                last_s_at,
                step,
                first_forget_to_at,
                last_forget_to_at,
                c,
                d,
                m,
                features,
                DEPTH,
                D,
                H,
                B,
                BLOCK_B,
                TILE,
                FORGET_TO,
                PRECISION,
            )
        else:
            _update_at_once(
                k_at,
                z_at,
                p_at,
                end_A_ptr + at * B,
                end_E_ptr + at * B,
                top,
                first_w_at,
                first_s_at,
                last_w_at,
                last_s_at,
                step,
                first_forget_to_at,
                last_forget_to_at,
                c,
                d,
                m,
                features,
                tl.arange(0, BLOCK_B),
                DEPTH,
                D,
                H,
                B,
                TILE,
                FORGET_TO,
                PRECISION,
            )
        at += num_groups
        # The next chunk reads what this one wrote.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_groups"])
def _factors_kernel(
    k_ptr,
    v_ptr,
    first_w_ptr,
    last_w_ptr,
    z_ptr,
    p_ptr,
    f_ptr,
    surprise_ptr,
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
    SURPRISE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (n * G + g) * blocks + i: the tokens of block i in chunk n of row and head g."""
    NUM_BLOCKS: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    at = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    tokens = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_B + tl.arange(0, BLOCK_B)
    g = at % num_groups
    k_at, last_at = k_ptr + at * (B * D), last_w_ptr + at * (D * H)
    top = _error_of_keys(
        k_at,
        v_ptr + at * (B * D),
        first_w_ptr + at * (D * H) if DEPTH == 2 else first_w_ptr,
        last_at,
        z_ptr + at * (B * H) if DEPTH == 2 else z_ptr,
        f_ptr + at * (B * D),
        surprise_ptr + at * B if SURPRISE else surprise_ptr,
        norm_weight_ptr + g * D if NORM else norm_weight_ptr,
        norm_bias_ptr + g * D if NORM else norm_bias_ptr,
        eps,
        features,
        tokens,
        DEPTH,
        D,
        H,
        B,
        TILE,
        SURPRISE,
        RESIDUAL,
        NORM,
        DOT,
        PRECISION,
    )
    if DEPTH == 2:
        _back_of_keys(last_at, p_ptr + at * (B * H), top, features, tokens, D, H, B, TILE, PRECISION)
