# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A stand-in with flash-attn's contract, under its module names and signatures, for machines without a GPU.

Per part it returns (out, lse), and it computes gradients from the out, lse and dout that it is given. It refuses what
the library refuses, so that callers cannot lean on it.

Letters: H query heads; total_q, total_k: tokens of all sequences.
"""

import contextlib
import sys
from types import ModuleType

import torch
from torch import Tensor

from transformers_titans import merged_flash_attention as merged


IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3")


class StandIn:
    """Attention of one part with flash-attn's contract, in any dtype on any device."""

    def __init__(self, lse_of_none: float):
        self.lse_of_none = lse_of_none
        self.states = []
        self.deterministic = []

    @staticmethod
    def check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert q.dtype == k.dtype == v.dtype and q.shape[-1] % 8 == 0 and len(q) > 0 and len(k) > 0
        assert q.shape[1] % k.shape[1] == 0 and k.shape == v.shape
        for total, bounds, longest in ((len(q), cu_seqlens_q, max_seqlen_q), (len(k), cu_seqlens_k, max_seqlen_k)):
            assert bounds.dtype == torch.int32 and bounds.is_contiguous() and isinstance(longest, int)
            assert bounds[0] == 0 and bounds[-1] == total and bounds.diff().min() >= 0
            assert bounds.diff().max() <= longest
        assert len(cu_seqlens_q) == len(cu_seqlens_k)

    @staticmethod
    def keep_mask(state: torch.Tensor, shape: tuple[int, ...], dropout: float) -> torch.Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(int(state[0]))) >= dropout

    def scores(self, q, k, cu_seqlens_q, cu_seqlens_k, scale, causal, left, right):
        """(H, total_q, total_k); -inf where the query does not see the key."""
        sequence_q = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:].long(), right=True)
        sequence_k = torch.bucketize(torch.arange(len(k)), cu_seqlens_k[1:].long(), right=True)
        behind_q = cu_seqlens_q[sequence_q + 1] - torch.arange(len(q))
        behind_k = cu_seqlens_k[sequence_k + 1] - torch.arange(len(k))
        # How far the key lies before the query, both counted from their sequence's end.
        distance = behind_k[None, :] - behind_q[:, None]
        seen = sequence_q[:, None] == sequence_k[None, :]
        if left >= 0:
            seen &= distance <= left
        if causal or right >= 0:
            seen &= distance >= -max(0 if causal else right, 0)
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qghd,kgd->ghqk", grouped, k).flatten(0, 1) * scale
        return torch.where(seen, scores, -torch.inf)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, left, right, dropout):
        dtype = q.dtype
        q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
        scores = self.scores(q, k, cu_seqlens_q, cu_seqlens_k, scale, causal, left, right)
        lse = scores.logsumexp(-1)
        probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        state = torch.randint(2**31, (2,))
        self.states.append(state)
        if dropout:
            probabilities = probabilities * self.keep_mask(state, scores.shape, dropout).to(scores) / (1 - dropout)
        out = torch.einsum("ghqk,kgd->qghd", probabilities.unflatten(0, (k.shape[1], -1)), v).flatten(1, 2)
        return out.to(dtype).contiguous(), lse.masked_fill(lse == -torch.inf, self.lse_of_none), state

    def backward(self, dout, q, k, v, out, lse, dq, dk, dv, bounds, scale, causal, left, right, dropout, state):
        assert dout.shape == q.shape and lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
        assert dout.dtype == q.dtype == out.dtype and out.is_contiguous()
        dout, q, k, v, out = (t.to(lse.dtype) for t in (dout, q, k, v, out))
        scores = self.scores(q, k, *bounds, scale, causal, left, right)
        groups = (k.shape[1], -1)
        # As in flash-attn: nothing is normalised again, all comes from the lse and out that the caller has given.
        probabilities = torch.exp(scores - lse[..., None]).unflatten(0, groups)
        q, dout, out = (t.unflatten(1, groups) for t in (q, dout, out))
        dp, dropped = torch.einsum("qghd,kgd->ghqk", dout, v), probabilities
        if dropout:
            keep = self.keep_mask(state, scores.shape, dropout).unflatten(0, groups).to(scores) / (1 - dropout)
            dp, dropped = dp * keep, probabilities * keep
        ds = probabilities * (dp - torch.einsum("qghd,qghd->ghq", dout, out)[..., None]) * scale
        dq.copy_(torch.einsum("ghqk,kgd->qghd", ds, k).flatten(1, 2))
        dk.copy_(torch.einsum("ghqk,qghd->kgd", ds, q))
        dv.copy_(torch.einsum("ghqk,qghd->kgd", dropped, dout))

    def module_2(self) -> ModuleType:
        def _flash_attn_varlen_forward(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
            block_table=None,
        ):
            self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and window_size_left < 0 and not dropout_p:
                # The library folds the heads of a group into the queries here.
                q.reshape(len(cu_seqlens_q) - 1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
            window = (window_size_left, window_size_right)
            out, lse, state = self.forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window, dropout_p
            )
            return out, lse, q.new_empty(0), state

        def _flash_attn_varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            dq,
            dk,
            dv,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            deterministic,
            rng_state=None,
        ):
            self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            self.deterministic.append(deterministic)
            bounds, window = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
            tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
            self.backward(*tensors, bounds, softmax_scale, causal, *window, dropout_p, rng_state)
            return softmax_lse.new_empty(0)

        module = ModuleType("flash_attn.flash_attn_interface")
        module._flash_attn_varlen_forward = _flash_attn_varlen_forward
        module._flash_attn_varlen_backward = _flash_attn_varlen_backward
        return module

    def module_3(self) -> ModuleType:
        def _flash_attn_forward(
            q,
            k,
            v,
            k_new=None,
            v_new=None,
            qv=None,
            out_=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            cu_seqlens_k_new=None,
            seqused_q=None,
            seqused_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            softmax_scale=None,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
        ):
            self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            window = (window_size_left, window_size_right)
            out, lse, _ = self.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window, 0.0)
            return out, lse, q.new_empty(0), q.new_empty(0)

        def _flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            sequed_q=None,
            sequed_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            dq=None,
            dk=None,
            dv=None,
            softmax_scale=None,
            is_causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            deterministic=False,
            sm_margin=0,
        ):
            self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            self.deterministic.append(deterministic)
            bounds, window = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
            tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
            self.backward(*tensors, bounds, softmax_scale, is_causal, *window, 0.0, None)
            return softmax_lse.new_empty(0)

        module = ModuleType("flash_attn_interface")
        module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
        return module


@contextlib.contextmanager
def stand_in(implementation: str, monkeypatch):
    """The stand-in under the library's module names; float64 is allowed, so that the merge itself can be judged."""
    library = StandIn(torch.inf if implementation == "flash_attention_2" else -torch.inf)
    with monkeypatch.context() as patch:
        patch.setattr(merged, "DTYPES", (*merged.DTYPES, torch.float64))
        if implementation == "flash_attention_2":
            package, module = ModuleType("flash_attn"), library.module_2()
            package.flash_attn_interface = module
            patch.setitem(sys.modules, "flash_attn", package)
            patch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
        else:
            patch.setitem(sys.modules, "flash_attn_interface", library.module_3())
        yield library


def as_custom_ops(module: ModuleType) -> None:
    """Makes the functions of `StandIn.module_2` what the library's are: ops that a compiler does not look into."""
    plain_forward, plain_backward = module._flash_attn_varlen_forward, module._flash_attn_varlen_backward

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bounds, lengths = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        window = (window_size_left, window_size_right)
        return plain_forward(q, k, v, *bounds, *lengths, dropout_p, softmax_scale, causal, *window)

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k)
        window = (window_size_left, window_size_right)
        rest = (dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, deterministic, rng_state)
        return plain_backward(*tensors, max_seqlen_q, max_seqlen_k, *rest)

    forward_op = torch.library.custom_op("flash_stand_in::forward", forward, mutates_args=())
    backward_op = torch.library.custom_op("flash_stand_in::backward", backward, mutates_args=("dq", "dk", "dv"))

    @forward_op.register_fake
    def _(q, *args, **kwargs):
        lse, state = q.new_empty(q.shape[1], q.shape[0]), q.new_empty(2, dtype=torch.int64)
        return torch.empty_like(q), lse, q.new_empty(0), state

    @backward_op.register_fake
    def _(dout, q, k, v, out, softmax_lse, *args, **kwargs):
        return softmax_lse.new_empty(0)

    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward_op, backward_op
