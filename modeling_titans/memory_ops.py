# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The public neural memory op: checks its arguments and picks an implementation."""

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch

from .chunk_scan import chunk_scan, compiled_chunk_scan
from .kept_plan import SegmentEnds
from .memory_checks import (
    check_layout,
    check_options,
    check_parameters,
    check_rule,
    check_soup,
    check_state,
    check_tokens,
)
from .memory_ops_chunked import PLAIN_SCANS, MemoryCall, MemoryResult, chunked_memory
from .memory_ops_native import native_scan
from .memory_ops_native import reason_against as reason_against_native
from .memory_ops_recurrent import recurrent_memory
from .memory_state import MemoryState, PendingTokens, in_dtype
from .scan_inputs import RULES
from .state_pair import float32_matmul_precision
from .token_layout import TokenLayout


BACKENDS = ("auto", "triton", "chunked", "compiled", "native", "recurrent")
GATE_GRANULARITIES = ("token", "chunk")


def neural_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    state: MemoryState,
    *,
    chunk_size: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: bool = True,
    forget_to_weights: Sequence[torch.Tensor] | None = None,
    rule: str = "titans",
    gate_granularity: str = "token",
    layout: TokenLayout | None = None,
    start_state: MemoryState | None = None,
    kept_weights: Sequence[torch.Tensor] | None = None,
    mix: torch.Tensor | None = None,
    output_surprise: bool = False,
    backend: str = "auto",
    segments: SegmentEnds | None = None,
    read: bool = True,
) -> MemoryResult:
    """Writes each token into a memory network and reads the network back at that token.

        S_t = eta_t S_{t-1} - theta_t u_t        u_t = grad |M_W(k_t) - v_t|^2 at the weights of the chunk's start
        W_t = (1 - alpha_t) W_{t-1} + S_t        (+ alpha_t W_0 if ``forget_to_weights`` is given)
        y_t = M_{W_t}(q_t)                       read after the write of token t

    Titans, eq. 11-16 and 18. Other rules take other inner losses l in u_t = grad l, or another write:

        "dla"                 l = -<M_W(k_t), v_t>           deep linear attention (Memory Caching, eq. 30)
        "linear_attention"    the same for M(x) = x W        (Titans, eq. 4)
        "swla"                for M(x) = x W, with the pair of the token before (Memory Caching, eq. 28, c = 2):
                              W_t = (1 - alpha_t) W_{t-1} + eta_t k_{t-1}^T v_{t-1} + theta_t k_t^T v_t

    All three take the gates they are given; the papers' "dla" and "linear_attention" have alpha = eta = 0, and the
    latter theta = 1. The momentum of "swla" is the last token's pair, S_t = k_t^T v_t.

    Args:
        q, k, v: (B, T, H, D) queries, keys, values; floating point, all of one dtype.
        theta: (B, T, H) step sizes, >= 0.
        alpha: (B, T, H) forgetting, in [0, 1].
        eta: (B, T, H) decay of past surprise, in [0, 1]; in "swla" the weight of the token before, >= 0.
        state: the memory before the call; it is not changed.
        chunk_size: tokens per chunk, >= 1.
        norm_weight, norm_bias: (H, D) scale and shift of M's layer normalisation; both None: M has none.
        norm_eps: its epsilon, > 0.
        residual: whether M(x) contains x.
        forget_to_weights: (H, D_in, D_out) per layer: forgetting leads to these weights. None: to zero.
        rule: "titans", "dla", "linear_attention" or "swla"; the last two need depth 1, no residual and no norm.
        gate_granularity: "token": each token has the gates given for it; "chunk": all tokens of a chunk have those of
            the chunk's first real token (Titans, section 3.2), and the others' have no influence.
        layout: which tokens are real and where documents begin, built for this state's ``count`` and ``chunk_size``.
            None: every token is real and rows go on where the state stands.
        start_state: the state, of one row, in which a document begins; needed if the layout has document starts.
        kept_weights: (B, K, H, D_in, D_out) per layer: weights of earlier memories, K of them, which are read together
            with the running ones and never written. None: the running weights alone are read.
        mix: (B, T, H, 1 + K) each token's share of the running weights, and of each of ``kept_weights``; any numbers.
            The token is read with gamma_0 W_t + sum_i gamma_i W^(i) for W_t (Memory Caching, eq. 14-15). Needed
            with ``kept_weights``.
        output_surprise: whether to return the inner losses too.
        backend: "triton" (fused kernels; depth 1 and 2, no ``mix``, see `triton_scan` for the sizes), "chunked" (the
            same form in PyTorch), "compiled" (the same, whole chunks through torch.compile), "native" (the same in
            C++ on a CPU, compiled on first use, no ``mix``), "recurrent" (token by token), or "auto": "triton" on a
            GPU where it takes the call and is installed, else "chunked".
        segments: the chunks behind which a segment ends (Memory Caching, section 3), and whether the next one begins
            at ``start_state``; None: there are no segments. ``mix`` then has J more columns, the shares of the weights
            behind these J chunks, zero for the tokens before.
        read: whether to answer the queries. If not, the work is spared where the backend can do so, and neither
            output nor surprise has a meaning.

    Returns:
        ``output`` (B, T, H, D) in q's dtype, zero at masked tokens; ``state`` after the call, in float32 (float64 if
        the state or an input is), whatever the inputs' dtype and autocast; ``surprise`` (B, T, H) in the state's
        dtype or None: each token's inner loss at the weights of its chunk's start, negative for a pair that a memory
        with the loss -<M(k), v> knows; ``kept``, per layer (B, J, H, D_in, D_out), the weights behind the J chunks of
        ``segments``, in rows where no segment ends there with no meaning, or None.
        Output and state are differentiable in every tensor given, including both states; surprise is not.
        "chunked" and "native" take matrix products in float32; after ``torch.set_float32_matmul_precision("medium")``,
        which allows it, they round their operands to bfloat16. "triton" does so for bfloat16 inputs. Sums are float32.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        ImportError: "triton" is asked for and not installed, or "native" and there is no C++ compiler.
    """
    choices = {
        "rule": (rule, tuple(RULES)),
        "gate_granularity": (gate_granularity, GATE_GRANULARITIES),
        "backend": (backend, BACKENDS),
    }
    check_options(chunk_size, norm_eps, choices)
    check_tokens({"q": q, "k": k, "v": v}, {"theta": theta, "alpha": alpha, "eta": eta})
    check_state("state", state, q.shape[0], q)
    check_rule(rule, RULES[rule], state, residual, norm_weight)
    if layout is None:
        layout = TokenLayout.build(count=state.count, chunk_size=chunk_size, shape=tuple(q.shape[:2]))
    check_layout(layout, state, q, chunk_size, start_state, segments)
    check_parameters(norm_weight, norm_bias, forget_to_weights, state, q)
    check_soup(kept_weights, mix, 0 if segments is None else len(segments.chunks), state, q)

    dtype = torch.float32
    for tensor in (q, theta, alpha, eta, *state.weights):
        dtype = torch.promote_types(dtype, tensor.dtype)
    sizes = (len(state.weights), q.shape[3], state.weights[-1].shape[2], chunk_size, dtype)
    scan = _pick_scan(backend, sizes, q, mix)

    # Decoding has nothing to cast, and would spend more on asking each tensor in turn than on many an operation.
    given = (q, theta, alpha, eta, *state.weights, *state.momentum, *state.pending, norm_weight, norm_bias, mix)
    given = (*given, *(forget_to_weights or ()), *(kept_weights or ()))
    alike = start_state is None and all(t is None or t.dtype == dtype for t in given)

    def cast(tree):
        return tree if alike else in_dtype(tree, dtype)

    if not read and backend != "recurrent":
        q, mix, kept_weights, output_surprise = q[:, :0], None, None, False
    call = MemoryCall(
        *cast((q, PendingTokens(k, v, theta, alpha, eta), state)),
        chunk_size,
        cast(norm_weight),
        cast(norm_bias),
        norm_eps,
        residual,
        None if forget_to_weights is None else cast(tuple(forget_to_weights)),
        layout,
        cast(start_state),
        output_surprise,
        gate_granularity == "chunk",
        scan,
        torch.bfloat16 if dtype == torch.float32 and float32_matmul_precision() == "medium" else None,
        RULES[rule],
        None if kept_weights is None else cast(tuple(kept_weights)),
        cast(mix),
        segments,
    )
    if scan not in PLAIN_SCANS and q.dtype != dtype:
        call = _with_vectors(call, q, k, v)
    # Products of a state in float32 must not be taken in a lower precision behind the state's back.
    with torch.autocast(q.device.type, enabled=False):
        result = recurrent_memory(call) if backend == "recurrent" else chunked_memory(call)
    surprise = None if result.surprise is None else result.surprise.detach()
    return MemoryResult(result.output.to(q.dtype), cast(result.state), surprise, result.kept)


def _pick_scan(backend: str, sizes: tuple, q: torch.Tensor, mix: torch.Tensor | None) -> Callable:
    """The scan that ``backend`` names or, for "auto", the fastest one that takes these sizes here."""
    if backend == "triton" or (backend == "auto" and q.is_cuda and _has_triton()):
        from .memory_ops_triton import reason_against
        from .triton_decode import scan_or_decode

        reason = reason_against(*sizes, q, mix)
        if reason is None:
            return scan_or_decode
        if backend == "triton":
            raise ValueError(f'{reason}; backend="chunked" takes it')
    if backend == "native":
        reason = reason_against_native(sizes[-1], q, mix)
        if reason is not None:
            raise ValueError(f'{reason}; backend="chunked" takes it')
        return native_scan
    return compiled_chunk_scan if backend == "compiled" else chunk_scan


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _with_vectors(call: MemoryCall, q, k, v) -> MemoryCall:
    """``call`` with q, k and v as they came, and the open chunk's rounded back to their dtype, which they came in."""
    pending = call.state.pending
    state = call.state._replace(pending=pending._replace(k=pending.k.to(q.dtype), v=pending.v.to(q.dtype)))
    return call._replace(q=q, tokens=call.tokens._replace(k=k, v=v), state=state)
