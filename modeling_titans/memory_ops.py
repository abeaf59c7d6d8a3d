# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The public neural memory op: checks its arguments and picks an implementation."""

from collections.abc import Sequence

import torch

from .memory_ops_chunked import MemoryCall, MemoryResult, chunked_memory
from .memory_ops_recurrent import recurrent_memory
from .memory_state import MemoryState, PendingTokens, map_tensors
from .token_layout import TokenLayout


BACKENDS = {"auto": chunked_memory, "chunked": chunked_memory, "recurrent": recurrent_memory}
RULES = ("titans",)


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
    layout: TokenLayout | None = None,
    start_state: MemoryState | None = None,
    output_surprise: bool = False,
    backend: str = "auto",
) -> MemoryResult:
    """Writes each token into a memory network and reads the network back at that token.

        S_t = eta_t S_{t-1} - theta_t u_t        u_t = grad |M_W(k_t) - v_t|^2 at the weights of the chunk's start
        W_t = (1 - alpha_t) W_{t-1} + S_t        (+ alpha_t W_0 if ``forget_to_weights`` is given)
        y_t = M_{W_t}(q_t)                       read after the write of token t

    Titans, eq. 11-16 and 18.

    Args:
        q, k, v: (B, T, H, D) queries, keys, values; floating point, all of one dtype.
        theta: (B, T, H) step sizes, >= 0.
        alpha: (B, T, H) forgetting, in [0, 1].
        eta: (B, T, H) decay of past surprise, in [0, 1].
        state: the memory before the call; it is not changed.
        chunk_size: tokens per chunk, >= 1.
        norm_weight, norm_bias: (H, D) scale and shift of M's layer normalisation; both None: M has none.
        norm_eps: its epsilon, > 0.
        residual: whether M(x) contains x.
        forget_to_weights: (H, D_in, D_out) per layer: forgetting leads to these weights. None: to zero.
        rule: the inner loss and coefficients; "titans".
        layout: which tokens are real and where documents begin, built for this state's ``count`` and ``chunk_size``.
            None: every token is real and rows go on where the state stands.
        start_state: the state, of one row, in which a document begins; needed if the layout has document starts.
        output_surprise: whether to return the inner losses too.
        backend: "chunked" (the fast form), "recurrent" (token by token) or "auto" (the fastest one here).

    Returns:
        ``output`` (B, T, H, D) in q's dtype, zero at masked tokens; ``state`` after the call, in float32 (float64 if
        the state or an input is), whatever the inputs' dtype and autocast; ``surprise`` (B, T, H) in the state's
        dtype or None: each token's inner loss at the weights of its chunk's start.
        Output and state are differentiable in every tensor given, including both states; surprise is not.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    _check_options(chunk_size, rule, backend, norm_weight, norm_bias, norm_eps)
    _check_tokens({"q": q, "k": k, "v": v}, {"theta": theta, "alpha": alpha, "eta": eta})
    _check_state("state", state, q.shape[0], q)
    layout = layout if layout is not None else _plain_layout(state, q, chunk_size)
    _check_layout(layout, state, q, chunk_size, start_state)
    _check_parameters(norm_weight, norm_bias, forget_to_weights, state, q)

    dtype = torch.float32
    for tensor in (q, theta, alpha, eta, *state.weights):
        dtype = torch.promote_types(dtype, tensor.dtype)

    def cast(tree):
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    call = MemoryCall(
        *cast((q, k, v, theta, alpha, eta, state)),
        chunk_size,
        cast(norm_weight),
        cast(norm_bias),
        norm_eps,
        residual,
        None if forget_to_weights is None else cast(tuple(forget_to_weights)),
        layout,
        cast(start_state),
        output_surprise,
    )
    # Products of a state in float32 must not be taken in a lower precision behind the state's back.
    with torch.autocast(q.device.type, enabled=False):
        result = BACKENDS[backend](call)
    return result._replace(
        output=result.output.to(q.dtype), surprise=None if result.surprise is None else result.surprise.detach()
    )


def _check_options(chunk_size, rule, backend, norm_weight, norm_bias, norm_eps) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer >= 1, got {chunk_size!r}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {tuple(BACKENDS)}, got {backend!r}")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("norm_weight and norm_bias must both be given or both be None")
    if not norm_eps > 0:
        raise ValueError(f"norm_eps must be > 0, got {norm_eps!r}")


def _check_tokens(vectors: dict[str, torch.Tensor], gates: dict[str, torch.Tensor]) -> None:
    q = vectors["q"]
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q must be (B, T, H, D) with at least one token, got {tuple(q.shape)}")
    if not q.is_floating_point():
        raise ValueError(f"q must be floating point, got {q.dtype}")
    for name, tensor in vectors.items():
        if tensor.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
    for name, gate in gates.items():
        if gate.shape != q.shape[:3]:
            raise ValueError(f"{name} must be (B, T, H) = {tuple(q.shape[:3])}, got {tuple(gate.shape)}")
        if not gate.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {gate.dtype}")


def _check_state(name: str, state: MemoryState, batch_size: int, q: torch.Tensor) -> None:
    if not all(hasattr(state, field) for field in MemoryState._fields):
        raise ValueError(f"{name} must be a MemoryState, got {type(state).__name__}")
    num_heads, head_dim = q.shape[2:]
    if not state.weights or len(state.weights) != len(state.momentum):
        raise ValueError(
            f"{name} must hold weights and momentum of one depth >= 1, got {len(state.weights)}, {len(state.momentum)}"
        )
    width = head_dim
    for layer, (w, s) in enumerate(zip(state.weights, state.momentum, strict=True)):
        expected = (batch_size, num_heads, width)
        if w.dim() != 4 or tuple(w.shape[:3]) != expected:
            raise ValueError(
                f"{name}.weights[{layer}] must be (B, H, D_in, D_out) = (*{expected}, D_out), got {tuple(w.shape)}"
            )
        if s.shape != w.shape:
            raise ValueError(f"{name}.momentum[{layer}] must be {tuple(w.shape)}, got {tuple(s.shape)}")
        if w.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}.weights[{layer}] must be float32 or float64, got {w.dtype}")
        width = w.shape[3]
    if width != head_dim:
        raise ValueError(f"{name}.weights must lead back to the head dimension {head_dim}, got {width}")
    _check_pending(name, state, batch_size, q)


def _check_pending(name: str, state: MemoryState, batch_size: int, q: torch.Tensor) -> None:
    width = state.pending.k.shape[1]
    if isinstance(state.count, int) and state.count != width:
        raise ValueError(f"{name}.count is {state.count}, but {width} tokens are pending")
    if isinstance(state.count, torch.Tensor) and tuple(state.count.shape) != (batch_size,):
        raise ValueError(f"{name}.count must be an int or (B,) = ({batch_size},), got {tuple(state.count.shape)}")
    for field, tensor in zip(PendingTokens._fields, state.pending, strict=True):
        shape = (batch_size, width, *q.shape[2:]) if field in ("k", "v") else (batch_size, width, q.shape[2])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.pending.{field} must be {shape}, got {tuple(tensor.shape)}")


def _plain_layout(state: MemoryState, q: torch.Tensor, chunk_size: int) -> TokenLayout:
    return TokenLayout.build(count=state.count, chunk_size=chunk_size, shape=tuple(q.shape[:2]))


def _check_layout(layout: TokenLayout, state: MemoryState, q, chunk_size: int, start_state) -> None:
    if layout.chunk_size != chunk_size:
        raise ValueError(f"layout was built for chunk_size {layout.chunk_size}, not {chunk_size}")
    if type(layout.count) is not type(state.count) or (isinstance(layout.count, int) and layout.count != state.count):
        raise ValueError(f"layout was built for the count {layout.count}, but state.count is {state.count}")
    width = state.pending.k.shape[1]
    allowed = range(chunk_size) if isinstance(state.count, int) else (chunk_size - 1,)
    if width not in allowed:
        raise ValueError(f"state has room for {width} pending tokens; with chunk_size {chunk_size} allowed: {allowed}")
    if layout.mask is not None and layout.mask.shape != q.shape[:2]:
        raise ValueError(f"layout was built for (B, T) = {tuple(layout.mask.shape)}, got q {tuple(q.shape)}")
    if layout.document_starts is not None:
        if start_state is None:
            raise ValueError("start_state is needed where the layout has document starts")
        _check_state("start_state", start_state, 1, q[:1])
        if start_state.count != 0:
            raise ValueError(f"start_state must have no pending tokens, got count {start_state.count}")


def _check_parameters(norm_weight, norm_bias, forget_to_weights, state: MemoryState, q: torch.Tensor) -> None:
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None and tensor.shape != q.shape[2:]:
            raise ValueError(f"{name} must be (H, D) = {tuple(q.shape[2:])}, got {tuple(tensor.shape)}")
    if forget_to_weights is not None:
        shapes = [tuple(w.shape[1:]) for w in state.weights]
        if [tuple(w.shape) for w in forget_to_weights] != shapes:
            raise ValueError(
                f"forget_to_weights must be {shapes} by layer, got {[tuple(w.shape) for w in forget_to_weights]}"
            )
