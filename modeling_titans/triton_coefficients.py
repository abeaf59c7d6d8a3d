# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""`chunk_coefficients` and its adjoint as Triton kernels: one program of one warp per chunk, all chunks at once.

A chunk's rows of coefficients follow from each other as the weights they stand for do,

    E_t = eta_t E_{t-1} + theta_t 1_t        A_t = (1 - alpha_t) A_{t-1} + E_t        (1_t: one at i = t)

or, where the write slides over the last two tokens,

    E_t = 1_t                                A_t = (1 - alpha_t) A_{t-1} + eta_t E_{t-1} + theta_t 1_t

which is a few instructions per row where the products of two triangles would be b^3 in float32, and knows neither
quotients nor logarithms: gates of exactly 0 and 1 are no exceptions. The adjoint goes through the rows in reverse.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which the last b_q are read.
"""

import torch

from .chunk_coefficients import EndCoefficients, ReadCoefficients
from .triton_configs import LaunchConfig, config_for
from .triton_launch import block_of, capability_of


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


def launch_coefficients(
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    full: torch.Tensor | None,
    config: LaunchConfig | None = None,
    sliding: bool = False,
) -> tuple[ReadCoefficients, EndCoefficients]:
    """The coefficients of N chunks, for all their b tokens. Titans, eq. 13-14, unrolled; see `chunk_coefficients`.

    Args:
        theta, alpha, eta: (N, G, b) float32, contiguous.
        full: (N, G) bool, contiguous, or None: chunks whose update takes place.
        config: how to launch; None: the default.
        sliding: whether the write slides over the last two tokens.

    Returns:
        At each token c, d (N, G, b) and A (N, G, b, b); at the chunk's end c, d, m (N, G) and A, E (N, G, b); float32.

    Raises:
        ValueError: the tensors are not on a GPU and the kernels are not interpreted.
    """
    b, capability = theta.shape[-1], capability_of(theta)
    config = config or config_for("coefficients", 0, 0, b, capability)
    read = ReadCoefficients(torch.empty_like(theta), torch.empty_like(theta), theta.new_empty(*theta.shape, b))
    c, d, m = (theta.new_empty(theta.shape[:-1]) for _ in range(3))
    end = EndCoefficients(c, d, m, torch.empty_like(theta), torch.empty_like(theta))
    _coefficients_kernel[(c.numel(),)](
        *(theta, alpha, eta, theta if full is None else full, *read, *end),
        b=b,
        BT=block_of(b),
        HAS_FULL=full is not None,
        SLIDING=sliding,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return read, end


def launch_coefficients_backward(
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    full: torch.Tensor | None,
    read: ReadCoefficients,
    read_bar: ReadCoefficients,
    end_bar: EndCoefficients,
    config: LaunchConfig | None = None,
    sliding: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the gates, given those of the coefficients; see `chunk_coefficients_adjoint`.

    Args:
        theta, alpha, eta, full: what `launch_coefficients` was given; ``read``: what it returned.
        read_bar: c, d (N, G, b_q) and A (N, G, b_q, b): an outer loss's gradients at the tokens that are read.
        end_bar: c, d, m (N, G) and A, E (N, G, b); ignored where ``full`` is false.
        config, sliding: as for `launch_coefficients`.

    Returns:
        The gradients of theta, alpha and eta, (N, G, b) float32.

    Raises:
        ValueError: as `launch_coefficients`.
    """
    b, capability = theta.shape[-1], capability_of(theta)
    config = config or config_for("coefficients_backward", 0, 0, b, capability)
    E, m = (None, None) if sliding else (torch.empty_like(read.A), torch.empty_like(theta))
    bars = tuple(torch.empty_like(theta) for _ in range(3))
    _coefficients_backward_kernel[(theta.shape[0] * theta.shape[1],)](
        *(theta, alpha, eta, theta if full is None else full, *read, E, m, *read_bar, *end_bar, *bars),
        b=b,
        b_q=read_bar.c.shape[-1],
        BT=block_of(b),
        HAS_FULL=full is not None,
        SLIDING=sliding,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return bars


@triton.jit
def _coefficients_kernel(
    theta_ptr,
    alpha_ptr,
    eta_ptr,
    full_ptr,
    c_ptr,
    d_ptr,
    A_ptr,
    end_c_ptr,
    end_d_ptr,
    end_m_ptr,
    end_A_ptr,
    end_E_ptr,
    b: tl.constexpr,
    BT: tl.constexpr,
    HAS_FULL: tl.constexpr,
    SLIDING: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BT)
    gates, rows = chunk * b, chunk * (b * b)
    E, A = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    c, d, m = 1.0, 0.0, 1.0
    for t in range(b):
        keep, eta = 1.0 - tl.load(alpha_ptr + gates + t), tl.load(eta_ptr + gates + t)
        if SLIDING:
            A = A * keep + E * eta + tl.where(token == t, tl.load(theta_ptr + gates + t), 0.0)
            d = d * keep + m * eta
            E = tl.where(token == t, 1.0, 0.0)
            m = m * 0.0
        else:
            E = E * eta + tl.where(token == t, tl.load(theta_ptr + gates + t), 0.0)
            A = A * keep + E
            m = m * eta
            d = d * keep + m
        c = c * keep
        tl.store(c_ptr + gates + t, c)
        tl.store(d_ptr + gates + t, d)
        tl.store(A_ptr + rows + t * b + token, A, mask=token < b)
    if HAS_FULL:
        # A chunk that stays open leaves the state as it was.
        full = tl.load(full_ptr + chunk)
        c, d, m = tl.where(full, c, 1.0), tl.where(full, d, 0.0), tl.where(full, m, 1.0)
        A, E = tl.where(full, A, 0.0), tl.where(full, E, 0.0)
    tl.store(end_c_ptr + chunk, c)
    tl.store(end_d_ptr + chunk, d)
    tl.store(end_m_ptr + chunk, m)
    tl.store(end_A_ptr + gates + token, A, mask=token < b)
    tl.store(end_E_ptr + gates + token, E, mask=token < b)


@triton.jit
def _coefficients_backward_kernel(
    theta_ptr,
    alpha_ptr,
    eta_ptr,
    full_ptr,
    c_ptr,
    d_ptr,
    A_ptr,
    E_ptr,
    m_ptr,
    c_bar_ptr,
    d_bar_ptr,
    A_bar_ptr,
    end_c_bar_ptr,
    end_d_bar_ptr,
    end_m_bar_ptr,
    end_A_bar_ptr,
    end_E_bar_ptr,
    theta_bar_ptr,
    alpha_bar_ptr,
    eta_bar_ptr,
    b: tl.constexpr,
    b_q: tl.constexpr,
    BT: tl.constexpr,
    HAS_FULL: tl.constexpr,
    SLIDING: tl.constexpr,
):
    """E, m: scratch, (N, G, b, b) and (N, G, b), None if SLIDING. Of b tokens the last b_q have bars."""
    chunk = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BT)
    real = token < b
    gates, rows, queries = chunk * b, chunk * (b * b), chunk * b_q - (b - b_q)
    if not SLIDING:
        E, m = tl.zeros([BT], tl.float32), 1.0
        for t in range(b):
            eta = tl.load(eta_ptr + gates + t)
            E = E * eta + tl.where(token == t, tl.load(theta_ptr + gates + t), 0.0)
            m = m * eta
            tl.store(E_ptr + rows + t * b + token, E, mask=real)
            tl.store(m_ptr + gates + t, m)
        tl.debug_barrier()

    # The bars of all that later rows, and the chunk's end, make of row t.
    A_bar = tl.load(end_A_bar_ptr + gates + token, mask=real, other=0.0)
    E_bar = tl.load(end_E_bar_ptr + gates + token, mask=real, other=0.0)
    c_bar, d_bar = tl.load(end_c_bar_ptr + chunk), tl.load(end_d_bar_ptr + chunk)
    m_bar = tl.load(end_m_bar_ptr + chunk)
    if HAS_FULL:
        full = tl.load(full_ptr + chunk)
        A_bar, E_bar = tl.where(full, A_bar, 0.0), tl.where(full, E_bar, 0.0)
        c_bar, d_bar, m_bar = tl.where(full, c_bar, 0.0), tl.where(full, d_bar, 0.0), tl.where(full, m_bar, 0.0)
    last = tl.full([], b - 1, tl.int32)
    for step in range(b):
        t = last - step
        is_read, has_earlier = t >= b - b_q, t > 0
        c_bar += tl.load(c_bar_ptr + queries + t, mask=is_read, other=0.0)
        d_bar += tl.load(d_bar_ptr + queries + t, mask=is_read, other=0.0)
        A_bar += tl.load(A_bar_ptr + (queries + t) * b + token, mask=token < tl.where(is_read, b, 0), other=0.0)
        if SLIDING:
            tl.store(theta_bar_ptr + gates + token, A_bar, mask=token == t)
        else:
            E_bar += A_bar
            m_bar += d_bar
            tl.store(theta_bar_ptr + gates + token, E_bar, mask=token == t)
        # A_{t-1} and its like; in front of the first token W is W_in and S is S_in.
        c = tl.load(c_ptr + gates + t - 1, mask=has_earlier, other=1.0)
        d = tl.load(d_ptr + gates + t - 1, mask=has_earlier, other=0.0)
        if not SLIDING:
            m = tl.load(m_ptr + gates + t - 1, mask=has_earlier, other=1.0)
        A = tl.load(A_ptr + rows + (t - 1) * b + token, mask=token < tl.where(has_earlier, b, 0), other=0.0)
        if SLIDING:
            # S_{t-1} is the pair of token t - 1 or, before the first token, S_in.
            eta_bar = tl.sum(tl.where(token == t - 1, A_bar, 0.0), 0) + tl.where(has_earlier, 0.0, d_bar)
        else:
            E = tl.load(E_ptr + rows + (t - 1) * b + token, mask=token < tl.where(has_earlier, b, 0), other=0.0)
            eta_bar = tl.sum(E_bar * E, 0) + m_bar * m
        tl.store(alpha_bar_ptr + gates + t, -(tl.sum(A_bar * A, 0) + d_bar * d + c_bar * c))
        tl.store(eta_bar_ptr + gates + t, eta_bar)
        keep, eta = 1.0 - tl.load(alpha_ptr + gates + t), tl.load(eta_ptr + gates + t)
        A_bar, d_bar, c_bar = A_bar * keep, d_bar * keep, c_bar * keep
        if not SLIDING:
            E_bar, m_bar = E_bar * eta, m_bar * eta
