# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The neural memory, a chunk at a time: the form that trains (Titans, section 3.2), with its own backward.

A sequential *writer* takes the weights from chunk to chunk; a *reader* then answers the queries of several chunks at
once, since every weight that a chunk passes through is a combination of the chunk's incoming state and its tokens'
factors (`chunk_coefficients`). Weights are never built per token. The backward keeps the states at the chunks' starts
and recomputes everything else. MEMORY.md derives the formulas.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension, K kept weights.
"""

import torch
from torch.autograd.function import once_differentiable

from .chunk_backward import scan_backward
from .chunk_forward import scan_forward
from .scan_inputs import ScanInputs, ScanOptions, ScanResult


def chunk_scan(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """Runs a memory through N chunks.

    Args:
        inputs: ``q`` (N, G, b_q, D): the queries of each chunk's last b_q tokens; ``k``, ``v`` (N, G, b, D); gates
            (N, G, b); ``full`` (N, G) bool or None: chunks whose update takes place (None: all); ``restart`` (N, G)
            bool or None: chunks before which the state goes back to ``start_weights``, ``start_momentum``;
            ``norm_weight``, ``norm_bias`` (G, 1, D) or None; ``weights``, ``momentum``, ``forget_to`` and start
            states: per layer (G, D_in, D_out), the last three or None; ``kept``: per layer (G, K, D_in, D_out) weights
            of which a mixture with the running ones is read, and ``mix`` (N, G, b_q, 1 + K) its shares, that of the
            running weights first, or None: these alone are read. What is written does not depend on them.
        options: ``write``: whether chunks update the state at all (if not, N must be 1); ``restart_at``: the chunks
            in which ``restart`` holds anywhere; ``surprise``: whether to return the inner losses; ``ends``: the chunks
            behind which weights are handed out, before anything restarts.

    Returns:
        The result, differentiable in every floating-point input except through ``surprise``.
    """
    flat = inputs.flatten()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat):
        results = _ChunkScan.apply(options, *flat)
    else:
        results, _ = scan_forward(inputs, options, keep=False)
    return ScanResult.of(results, inputs, options)


def compiled_chunk_scan(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """As `chunk_scan`; spans of whole chunks go through torch.compile, once for each of their sizes."""
    return chunk_scan(inputs, options._replace(compiled=True))


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: ScanOptions, *flat: torch.Tensor | None):
        results, starts = scan_forward(ScanInputs.unflatten(flat, options.depth), options, keep=True)
        # The states at the chunks' starts are all that grows with the sequence beside the inputs themselves.
        ctx.save_for_backward(*flat, *(x for span in starts for x in span))
        ctx.options = options
        if options.surprise:
            ctx.mark_non_differentiable(results[-1])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar, *rest):
        options, saved, depth = ctx.options, ctx.saved_tensors, ctx.options.depth
        inputs, starts = ScanInputs.unflatten(saved, depth), saved[ScanInputs.num_tensors(depth) :]
        starts = [list(starts[i : i + depth]) for i in range(0, len(starts), depth)]
        state_bar = list(rest[: 2 * depth]) if options.write else None
        kept_bar = list(rest[2 * depth : 3 * depth]) if options.ends else []
        with torch.autocast(output_bar.device.type, enabled=False):
            return None, *scan_backward(inputs, options, starts, output_bar, state_bar, kept_bar)
