# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over a union of key sets through flash-attn: one call per set, merged by log-sum-exp, exact both ways.

Titans' attention sees a window, or a segment, together with persistent tokens that are always visible (arXiv
2501.00663, section 3.3). No mask of flash-attn describes that union, but each part of it alone is one:

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) out_p

Backward, P_p = exp(scores_p - lse) are the probabilities over the *union*, and dS_p = P_p (dP_p - <dout, out>). That
is what flash-attn's backward computes when it is given the merged ``lse`` and ``out`` in place of the part's own, so
that each part's dq, dk and dv come from one call and need no correction.

Dropout is exact as well: ``lse`` does not see it, each part draws its own mask, and flash-attn's backward repeats the
mask from the state of the random generator that the forward call has returned.

Letters: n sequences, H query heads, KV key heads, D head dimension; total_q, total_k: tokens of all sequences.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


# What flash-attn's kernels can compute in.
DTYPES = (torch.float16, torch.bfloat16)


class AttentionPart(NamedTuple):
    """Queries and one of the key sets that they see, in flash-attn's layout for sequences of unequal length.

    Sequence s holds the queries ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``, which see the keys of the same s and no
    others. Both end at the total, so that each query and key belongs to a sequence; a sequence may lack either.

    Attributes:
        query: (total_q, H, D). key, value: (total_k, KV, D), H a multiple of KV. All of one 16-bit dtype.
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on the same device.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequences' lengths.
        causal: whether a query sees only keys up to its own; the last query stands at the last key.
        window: the number of keys that a query sees, its own included; None: no limit. Needs ``causal``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: int | None


NUM_TENSORS = 5


class _Options(NamedTuple):
    """What holds for all parts, and by part the fields of `AttentionPart` that are no tensors."""

    library: "_Library"
    module: ModuleType
    scaling: float
    dropout: float
    deterministic: bool
    limits: tuple[tuple[int, int, bool, int | None], ...]

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[AttentionPart]:
        by_part = [tensors[i : i + NUM_TENSORS] for i in range(0, len(self.limits) * NUM_TENSORS, NUM_TENSORS)]
        return [AttentionPart(*t, *limits) for t, limits in zip(by_part, self.limits, strict=True)]


class _Library(NamedTuple):
    """One release line of flash-attn, and how its functions are called.

    ``forward(module, part, options)`` returns (out, lse, state of the random generator or None), where lse is
    (H, total_q), infinite for a query without keys. ``backward(module, part, options, dout, out, lse, state)`` returns
    (dq, dk, dv).
    """

    forward_name: str
    requirement: str
    forward: Callable
    backward: Callable


def merged_flash_attention(
    parts: Sequence[AttentionPart], scaling: float, implementation: str, dropout: float = 0.0
) -> torch.Tensor:
    """Softmax attention of each query over the keys of all parts together.

    The parts' queries are the same tokens in the same order, but may be rotated differently and cut into other
    sequences. A query that sees no key in any part gets zeros. Differentiable once, in query, key and value.

    Args:
        parts: at least one. scaling: the factor of the scores.
        implementation: "flash_attention_2" (package flash-attn) or "flash_attention_3" (package flash-attn-3).
        dropout: the probability with which an attention weight is dropped; "flash_attention_3" has none.

    Returns:
        (total_q, H, D) in the queries' dtype. Parts are merged in float32.

    Raises:
        ImportError: the implementation's package is missing or too old. No other backend takes its place.
        ValueError: a dtype other than float16 and bfloat16, parts that do not fit together, or an argument above.
    """
    library, module = _load(implementation)
    _check_parts(parts)
    if dropout > 0 and library is _LIBRARIES["flash_attention_3"]:
        raise ValueError(f"dropout={dropout}: flash_attention_3 has no dropout. Allowed: 0.0, or flash_attention_2.")
    options = _Options(
        library,
        module,
        scaling,
        dropout,
        torch.are_deterministic_algorithms_enabled() or os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1",
        tuple(part[NUM_TENSORS:] for part in parts),
    )
    head_dim = parts[0].query.shape[-1]
    # The kernels take multiples of 8; zeros behind a head change no score.
    missing = -head_dim % 8
    tensors = []
    for part in parts:
        heads = (F.pad(t, (0, missing)) if missing else t for t in part[:3])
        tensors += [*heads, part.cu_seqlens_q, part.cu_seqlens_k]
    return _MergedAttention.apply(options, *tensors)[..., :head_dim]


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: _Options, *tensors: torch.Tensor) -> torch.Tensor:
        results = [_forward_part(part, options) for part in options.parts(tensors)]
        out, lse = _merge([result[0] for result in results], [result[1] for result in results])
        ctx.save_for_backward(*tensors, out, lse, *(result[2] for result in results))
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor):
        options = ctx.options
        num_tensors = len(options.limits) * NUM_TENSORS
        out, lse, *states = ctx.saved_tensors[num_tensors:]
        gradients = []
        for part, state in zip(options.parts(ctx.saved_tensors[:num_tensors]), states, strict=True):
            if _is_empty(part):
                gradients += [torch.zeros_like(t) for t in part[:3]]
            else:
                gradients += options.library.backward(options.module, part, options, dout, out, lse, state)
            gradients += [None, None]
        return None, *gradients


def _is_empty(part: AttentionPart) -> bool:
    return part.query.shape[0] == 0 or part.key.shape[0] == 0


def _forward_part(part: AttentionPart, options: _Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if not _is_empty(part):
        return options.library.forward(options.module, part, options)
    # Kernels are not launched on empty grids.
    total, heads, _ = part.query.shape
    lse = part.query.new_full((heads, total), -torch.inf, dtype=_merge_dtype(part.query))
    return torch.zeros_like(part.query), lse, None


def _merge_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts' (total_q, H, D) and (H, total_q) -> those of the union, the log-sum-exp +inf for queries without keys."""
    lse = torch.stack(lses)
    # For a query without keys flash-attn 2 returns +inf, and 3 returns -inf.
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    merged = lse.logsumexp(0)
    # +inf and not -inf, because exp(-inf - inf) is 0 and exp(-inf - -inf) NaN, here and in flash-attn's backward.
    merged = merged.masked_fill(merged == -torch.inf, torch.inf)
    if len(outs) == 1:
        return outs[0], merged
    # Contiguous, because the output inherits its strides, and flash-attn copies what is not.
    weights = (lse - merged).exp().transpose(1, 2).contiguous().unsqueeze(-1)
    out = sum(weight * out.to(_merge_dtype(out)) for weight, out in zip(weights, outs, strict=True))
    return out.to(outs[0].dtype), merged


def _shared_arguments(part: AttentionPart, options: _Options) -> dict:
    """The arguments that bear the same names in all four functions.

    Tensors in front of them go by position: torch.compile takes a keyword `out` for a tensor to be written.
    """
    return {
        "cu_seqlens_q": part.cu_seqlens_q,
        "cu_seqlens_k": part.cu_seqlens_k,
        "max_seqlen_q": part.max_seqlen_q,
        "max_seqlen_k": part.max_seqlen_k,
        "softmax_scale": options.scaling,
        "window_size_left": -1 if part.window is None else part.window - 1,
        "window_size_right": -1 if part.window is None else 0,
    }


def _empty_gradients(part: AttentionPart) -> dict:
    return {
        "dq": torch.empty_like(part.query, memory_format=torch.contiguous_format),
        "dk": torch.empty_like(part.key, memory_format=torch.contiguous_format),
        "dv": torch.empty_like(part.value, memory_format=torch.contiguous_format),
    }


def _forward_2(module: ModuleType, part: AttentionPart, options: _Options):
    arguments = _shared_arguments(part, options)
    if part.query.shape[0] != part.cu_seqlens_q.shape[0] - 1:
        # At a bound of 1, flash-attn 2 takes it that each sequence has exactly one query, and fails if one has none.
        arguments["max_seqlen_q"] = max(2, part.max_seqlen_q)
    out, lse, _, state = module._flash_attn_varlen_forward(
        *part[:3], **arguments, dropout_p=options.dropout, causal=part.causal, return_softmax=False
    )
    return out, lse, state


def _backward_2(module: ModuleType, part: AttentionPart, options: _Options, dout, out, lse, state):
    gradients = _empty_gradients(part)
    module._flash_attn_varlen_backward(
        dout,
        *part[:3],
        out,
        lse,
        **_shared_arguments(part, options),
        **gradients,
        dropout_p=options.dropout,
        causal=part.causal,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=options.deterministic,
        rng_state=state,
    )
    return gradients["dq"], gradients["dk"], gradients["dv"]


def _forward_3(module: ModuleType, part: AttentionPart, options: _Options):
    out, lse, *_ = module._flash_attn_forward(*part[:3], **_shared_arguments(part, options), causal=part.causal)
    return out, lse, None


def _backward_3(module: ModuleType, part: AttentionPart, options: _Options, dout, out, lse, state):
    gradients = _empty_gradients(part)
    module._flash_attn_backward(
        dout,
        *part[:3],
        out,
        lse,
        **_shared_arguments(part, options),
        **gradients,
        is_causal=part.causal,
        deterministic=options.deterministic,
    )
    return gradients["dq"], gradients["dk"], gradients["dv"]


_LIBRARIES = {
    "flash_attention_2": _Library(
        "_flash_attn_varlen_forward",
        "flash-attn 2.7.0 or later, `pip install 'flash-attn>=2.7.0' --no-build-isolation`",
        _forward_2,
        _backward_2,
    ),
    "flash_attention_3": _Library(
        "_flash_attn_forward",
        "flash-attn-3 of August 2025 or later, built in the folder `hopper` of github.com/Dao-AILab/flash-attention",
        _forward_3,
        _backward_3,
    ),
}


def _load(implementation: str) -> tuple[_Library, ModuleType]:
    if implementation not in _LIBRARIES:
        allowed = ", ".join(_LIBRARIES)
        raise ValueError(f"implementation={implementation!r} is no flash attention. Allowed: {allowed}.")
    library = _LIBRARIES[implementation]
    try:
        # Inside `try`, because elsewhere an import makes the package a requirement of every checkpoint's own code.
        if implementation == "flash_attention_2":
            import flash_attn.flash_attn_interface as module
        else:
            import flash_attn_interface as module
        forward = getattr(module, library.forward_name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"attn_implementation={implementation!r} needs {library.requirement}: {error}.") from error
    # Releases that take the window as a pair also return other values, before 2.6 a log-sum-exp of another layout.
    if "window_size" in inspect.signature(forward).parameters:
        raise ImportError(f"attn_implementation={implementation!r} needs {library.requirement}; this one is older.")
    return library, module


def _check_parts(parts: Sequence[AttentionPart]) -> None:
    if not parts:
        raise ValueError("parts is empty. Allowed: at least one AttentionPart.")
    shape = parts[0].query.shape
    for index, part in enumerate(parts):
        if part.query.shape != shape:
            raise ValueError(
                f"parts[{index}].query has shape {tuple(part.query.shape)}, and parts[0].query {tuple(shape)}. "
                "Allowed: the same queries in every part."
            )
        if part.window is not None and not (part.causal and part.window >= 1):
            raise ValueError(
                f"parts[{index}].window={part.window} with causal={part.causal}. Allowed: None, or an integer of at "
                "least 1 with causal=True."
            )
        for name in ("query", "key", "value"):
            dtype = getattr(part, name).dtype
            if dtype not in DTYPES:
                allowed = " and ".join(str(d) for d in DTYPES)
                raise ValueError(
                    f"parts[{index}].{name} is {dtype}. Allowed in flash attention: {allowed}; load the model with "
                    'dtype=torch.bfloat16, or with attn_implementation="sdpa".'
                )
