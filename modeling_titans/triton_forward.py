# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of `chunk_scan` as Triton kernels: the sequential writer, and what runs on all chunks at once.

*Writer*: one program per row and head takes the weights from chunk to chunk; state n is read from slot n of the
boundary states and state n + 1 written to the next, tile by tile, so that states of any size pass through. *Factors*:
the same inner gradients from boundary states that are there already. *Reader*: one program per chunk, row and head.

The last layer is walked in tiles over its input: a two-layer memory's hidden features, whose first layer is computed
on the way, or a one-layer memory's key itself. Beside the states, only each chunk's z, p and f go through memory:

    z = k W_1, a = gelu(z)      f: the last layer's result     g_L from f, k, v      p = g_L W_2^T, g_1 = p gelu'(z)

Tiles are (features, tokens), see `triton_math`. Shapes: N chunks, G rows times heads, b tokens in a chunk of which the
last b_q are read, D head dimension, h width of the last layer's input (D for one layer).
"""

from typing import NamedTuple

import torch

from .chunk_coefficients import EndCoefficients, ReadCoefficients
from .inner_network import InnerNetwork
from .triton_configs import LaunchConfig, config_for
from .triton_launch import block_of, capability_of
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
    config = config or _default_config("writer", k, weights, precision)
    sizes, launch = _launch_parameters("writer", k, weights, config)
    sizes["BLOCK_B"] = _block_of_tokens(config, sizes["B"])
    top = torch.empty(k.shape[1:], dtype=torch.float32, device=k.device) if sizes["BLOCK_B"] < sizes["B"] else None
    _writer_kernel[(k.shape[1],)](
        *(k, v, *end, *_by_layer(weights), *_by_layer(momentum)),
        None if restart is None else restart.view(torch.uint8),
        *(*_by_layer(start_weights), *_by_layer(start_momentum), *_by_layer(forget_to)),
        *(*scratch, top, surprise, network.norm_weight, network.norm_bias, network.norm_eps, *k.shape[:2]),
        **sizes,
        RESTART=restart is not None,
        FORGET_TO=forget_to is not None,
        SURPRISE=surprise is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
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
    config = config or _default_config("factors", k, weights, precision)
    sizes, launch = _launch_parameters("factors", k, weights, config)
    sizes["BLOCK_B"] = _block_of_tokens(config, sizes["B"])
    _factors_kernel[(k.shape[0] * k.shape[1] * -(-sizes["B"] // sizes["BLOCK_B"]),)](
        *(k, v, *_by_layer(weights), *scratch, surprise),
        *(network.norm_weight, network.norm_bias, network.norm_eps, k.shape[1]),
        **sizes,
        SURPRISE=surprise is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        PRECISION=precision,
        **launch,
    )


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
    config = config or _default_config("reader", k, weights, precision)
    sizes, launch = _launch_parameters("reader", k, weights, config)
    num_queries = q.shape[-2]
    block = _block_of_tokens(config, num_queries)
    _reader_kernel[(k.shape[0] * k.shape[1] * -(-num_queries // block),)](
        *(q, k, v, *read, *_by_layer(weights), *_by_layer(momentum), *_by_layer(forget_to)),
        *(scratch.z, scratch.p, scratch.f, output),
        *(network.norm_weight, network.norm_bias, network.norm_eps, k.shape[1]),
        **sizes,
        BQ=num_queries,
        BLOCK_Q=block,
        BLOCK_K=min(sizes["BLOCK_B"], max(16, 64 * 64 // sizes["BLOCK_D"])),
        FORGET_TO=forget_to is not None,
        RESIDUAL=network.residual,
        NORM=network.norm_weight is not None,
        PRECISION=precision,
        **launch,
    )


def _by_layer(group: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The first layer's tensor, None where there is only one layer, and the last layer's."""
    if group is None:
        return None, None
    return (group[0] if len(group) == 2 else None), group[-1]


def _default_config(kernel: str, k: torch.Tensor, weights, precision: str) -> LaunchConfig:
    """How to launch a kernel whose operands of products are rounded to ``precision``."""
    operand_bytes = {"bf16": 2, "bf16_bits": 2, "tf32": 4}.get(precision, 8)
    return config_for(kernel, k.shape[-1], weights[-1].shape[-2], k.shape[-2], capability_of(k), operand_bytes)


def _block_of_tokens(config: LaunchConfig, num_tokens: int) -> int:
    """Tokens that are taken at a time."""
    return min(block_of(num_tokens), config.tokens or block_of(num_tokens))


def _launch_parameters(kernel: str, k: torch.Tensor, weights, config: LaunchConfig | None) -> tuple[dict, dict]:
    """Sizes, and launch options, of a kernel on keys k and these weights."""
    b, head_dim, hidden = *k.shape[-2:], weights[-1].shape[-2]
    capability = capability_of(k)
    config = config or config_for(kernel, head_dim, hidden, b, capability)
    sizes = {
        "DEPTH": len(weights),
        "D": head_dim,
        "H": hidden,
        "B": b,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_B": block_of(b),
        "TILE": config.tile,
    }
    return sizes, {"num_warps": config.num_warps, "num_stages": config.num_stages}


@triton.jit
def _forward_of_keys(
    k_at,
    first_at,
    last_at,
    z_at,
    features,
    tokens,
    DEPTH: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The last layer's result f (BLOCK_D, BLOCK_B) at a chunk's keys; leaves z behind ``z_at``."""
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
        last = load_tile(last_at, hidden, features, D, 1, H, D)
        f = dot(tl.trans(last), a, f, PRECISION)
    return f


@triton.jit
def _error_of_keys(
    k_at,
    v_at,
    f,
    f_at,
    surprise_at,
    norm_weight_at,
    norm_bias_at,
    eps,
    features,
    tokens,
    D: tl.constexpr,
    B: tl.constexpr,
    SURPRISE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
):
    """g_L (BLOCK_D, BLOCK_B) from f; leaves f, and the inner losses, behind ``f_at`` and ``surprise_at``."""
    store_tile(f_at, f, features, tokens, 1, D, D, B)
    k = load_tile(k_at, features, tokens, 1, D, D, B).to(tl.float32)
    v = load_tile(v_at, features, tokens, 1, D, D, B).to(tl.float32)
    norm_weight, norm_bias = features, features
    if NORM:
        norm_weight = load_row(norm_weight_at, features, D)
        norm_bias = load_row(norm_bias_at, features, D)
    error, g, _, _ = top_error(k, v, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
    if SURPRISE:
        tl.store(surprise_at + tokens, 0.25 * tl.sum(error * error, 0), mask=tokens < B)
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

        if B <= BLOCK_B:
            tokens = tl.arange(0, BLOCK_B)
            f = _forward_of_keys(k_at, first_w_at, last_w_at, z_at, features, tokens, DEPTH, D, H, B, TILE, PRECISION)
            top = _error_of_keys(
                k_at,
                v_at,
                f,
                f_at,
                surprise_at,
                norm_weight_at,
                norm_bias_at,
                eps,
                features,
                tokens,
                D,
                B,
                SURPRISE,
                RESIDUAL,
                NORM,
            )
            # The threads that read z in the update are not those that wrote it.
            tl.debug_barrier()
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
                tokens,
                DEPTH,
                D,
                H,
                B,
                TILE,
                FORGET_TO,
                PRECISION,
            )
        else:
            for block in range(0, B, BLOCK_B):
                tokens = block + tl.arange(0, BLOCK_B)
                f = _forward_of_keys(
                    k_at, first_w_at, last_w_at, z_at, features, tokens, DEPTH, D, H, B, TILE, PRECISION
                )
                top = _error_of_keys(
                    k_at,
                    v_at,
                    f,
                    f_at,
                    surprise_at,
                    norm_weight_at,
                    norm_bias_at,
                    eps,
                    features,
                    tokens,
                    D,
                    B,
                    SURPRISE,
                    RESIDUAL,
                    NORM,
                )
                store_tile(top_ptr + g * (B * D), top, features, tokens, 1, D, D, B)
                if DEPTH == 2:
                    _back_of_keys(last_w_at, p_at, top, features, tokens, D, H, B, TILE, PRECISION)
            tl.debug_barrier()
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
    PRECISION: tl.constexpr,
):
    """Program (n * G + g) * blocks + i: the tokens of block i in chunk n of row and head g."""
    NUM_BLOCKS: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    at = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    tokens = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_B + tl.arange(0, BLOCK_B)
    g = at % num_groups
    k_at, last_at = k_ptr + at * (B * D), last_w_ptr + at * (D * H)
    f = _forward_of_keys(
        k_at,
        first_w_ptr + at * (D * H) if DEPTH == 2 else first_w_ptr,
        last_at,
        z_ptr + at * (B * H) if DEPTH == 2 else z_ptr,
        features,
        tokens,
        DEPTH,
        D,
        H,
        B,
        TILE,
        PRECISION,
    )
    top = _error_of_keys(
        k_at,
        v_ptr + at * (B * D),
        f,
        f_ptr + at * (B * D),
        surprise_ptr + at * B if SURPRISE else surprise_ptr,
        norm_weight_ptr + g * D if NORM else norm_weight_ptr,
        norm_bias_ptr + g * D if NORM else norm_bias_ptr,
        eps,
        features,
        tokens,
        D,
        B,
        SURPRISE,
        RESIDUAL,
        NORM,
    )
    if DEPTH == 2:
        _back_of_keys(last_at, p_ptr + at * (B * H), top, features, tokens, D, H, B, TILE, PRECISION)


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
        _, top, _, _ = top_error(k, v, f_of_keys, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
        f = dot(top, _rows_from(scores, block, BLOCK_K), f, PRECISION)
    q = load_tile(q_at, features, queries, 1, D, D, BQ).to(tl.float32)
    output, _, _ = layer_output(q, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
    store_tile(output_ptr + at * (BQ * D), output, features, queries, 1, D, D, BQ)
