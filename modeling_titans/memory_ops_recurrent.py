# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The neural memory one token at a time, as the equations stand: slow, and what the fast forms are held against."""

import math

import torch

from .inner_network import gelu
from .memory_ops_chunked import MemoryCall, MemoryResult, handed_out
from .memory_state import MemoryState, PendingTokens


class _Network:
    """M and the gradient of its inner loss, plainly: autograd differentiates what stands here.

    Tokens are (B, H, 1, D), weights (B, H, D_in, D_out).
    """

    def __init__(self, call: MemoryCall):
        self.residual, self.eps, self.dot = call.residual, call.norm_eps, call.rule.dot
        self.scale, self.shift = (None if t is None else t.unsqueeze(1) for t in (call.norm_weight, call.norm_bias))

    def output(self, weights, x: torch.Tensor) -> tuple[list, list, tuple | None, torch.Tensor]:
        """The layers' inputs, their results, LN's x_hat and 1 / sigma, and M(x)."""
        inputs, results, norm = [x], [], None
        for layer, w in enumerate(weights):
            if layer:
                inputs.append(gelu(results[-1]))
            results.append(inputs[-1] @ w)
        y = results[-1]
        if self.scale is not None:
            centered = y - y.mean(-1, keepdim=True)
            rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
            norm = centered * rstd, rstd
            y = norm[0] * self.scale + self.shift
        return inputs, results, norm, x + y if self.residual else y

    def factors(self, weights, k: torch.Tensor, v: torch.Tensor) -> tuple[list, list, torch.Tensor]:
        """The layers' inputs a and back-propagated errors g, and the inner loss (B, H)."""
        inputs, results, norm, y = self.output(weights, k)
        if self.dot:
            error, loss = -v, -(y * v).sum((-2, -1))
        else:
            error, loss = 2 * (y - v), (y - v).square().sum((-2, -1))
        g = error
        if norm is not None:
            x_hat, rstd = norm
            scaled = error * self.scale
            along = x_hat * (scaled * x_hat).mean(-1, keepdim=True)
            g = rstd * (scaled - scaled.mean(-1, keepdim=True) - along)
        errors = [g]
        for w, z in zip(reversed(weights[1:]), reversed(results[:-1]), strict=True):
            errors.insert(0, errors[0] @ w.mT * _gelu_slope(z))
        return inputs, errors, loss


def _gelu_slope(z: torch.Tensor) -> torch.Tensor:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (z + 0.044715 * z * z * z))
    return 0.5 * (1 + tanh + z * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * z * z))


class _Walk:
    """The memory's weights while it walks along a row: W_t and S_t, and both at the start of the open chunk."""

    def __init__(self, call: MemoryCall):
        self.call = call
        batch_size = call.q.shape[0]
        self.network = _Network(call)
        self.weights, self.momentum = list(call.state.weights), list(call.state.momentum)
        self.anchor, self.anchor_momentum = self.weights, self.momentum
        self.position = torch.zeros(batch_size, dtype=torch.long, device=call.q.device)
        self.chunk_gates = [torch.zeros_like(gate[:, 0]) for gate in call.tokens[2:]]
        number = 0 if call.segments is None else len(call.segments.chunks)
        self.ended = [[torch.zeros_like(w) for w in self.weights] for _ in range(number)]

    def restart(self, rows: torch.Tensor) -> None:
        """Rows (B,) bool go back to the start state."""
        self.weights = _where(rows, self.call.start_state.weights, self.weights)
        self.momentum = _where(rows, self.call.start_state.momentum, self.momentum)
        self.anchor = _where(rows, self.weights, self.anchor)
        self.anchor_momentum = _where(rows, self.momentum, self.anchor_momentum)
        self.position = torch.where(rows, 0, self.position)

    def write(self, k, v, theta, alpha, eta, real: torch.Tensor) -> torch.Tensor:
        """One token (B, H, ...) in the rows where it is real; returns its inner loss (B, H)."""
        a, g, loss = self.network.factors(self.anchor, k.unsqueeze(2), v.unsqueeze(2))
        gates = self._gates([theta, alpha, eta], real)
        theta, alpha, eta = (gate[..., None, None] for gate in gates)
        weights, momentum = [], []
        for layer, (w, s, a_l, g_l) in enumerate(zip(self.weights, self.momentum, a, g, strict=True)):
            if self.call.rule.sliding:
                # Of a matrix memory the layer's input is k and the error -v: S is the pair of the token before.
                pair = k.unsqueeze(3) * v.unsqueeze(2)
                w, s = (1 - alpha) * w + eta * s + theta * pair, pair
            else:
                s = eta * s - theta * (a_l.mT @ g_l)
                w = (1 - alpha) * w + s
            if self.call.forget_to_weights is not None:
                w = w + alpha * self.call.forget_to_weights[layer]
            weights.append(w)
            momentum.append(s)
        self.weights = _where(real, weights, self.weights)
        self.momentum = _where(real, momentum, self.momentum)
        self.position = self.position + real
        return loss

    def _gates(self, gates: list[torch.Tensor], real: torch.Tensor) -> list[torch.Tensor]:
        """A token's own gates (B, H), or those of its chunk's first token."""
        if not self.call.chunk_gates:
            return gates
        first = (real & (self.position == 0))[:, None]
        self.chunk_gates = [torch.where(first, new, old) for new, old in zip(gates, self.chunk_gates, strict=True)]
        return self.chunk_gates

    def read(self, q: torch.Tensor, mix: torch.Tensor | None) -> torch.Tensor:
        """M(q) of q (B, H, D), with the shares ``mix`` (B, H, 1 + K) of the running and the kept weights, or None."""
        weights = self.weights if mix is None else self._mixed(mix)
        return self.network.output(weights, q.unsqueeze(2))[-1].squeeze(2)

    def _mixed(self, mix: torch.Tensor) -> list[torch.Tensor]:
        """gamma_0 W_t + sum_i gamma_i W^(i) by layer (Memory Caching, eq. 14)."""
        mixed = []
        for layer, (running, kept) in enumerate(zip(self.weights, self.call.kept, strict=True)):
            ended = [weights[layer].unsqueeze(1) for weights in self.ended]
            every = torch.cat([running.unsqueeze(1), kept, *ended], 1)
            mixed.append((mix.transpose(1, 2)[..., None, None] * every).sum(1))
        return mixed

    def end_segments(self, chunk: torch.Tensor) -> None:
        """Hands out the weights where the chunk (B,) that a row has just filled is the last of a segment."""
        segments = self.call.segments
        for number, last in enumerate(segments.chunks):
            ends = (self.position == self.call.chunk_size) & (chunk == last)
            if segments.rows is not None:
                ends = ends & segments.rows[:, number]
            self.ended[number] = _where(ends, self.weights, self.ended[number])
            if segments.restarts:
                start = self.call.start_state
                self.weights = _where(ends, start.weights, self.weights)
                self.momentum = _where(ends, start.momentum, self.momentum)

    def close_full_chunks(self) -> None:
        closed = self.position == self.call.chunk_size
        self.anchor = _where(closed, self.weights, self.anchor)
        self.anchor_momentum = _where(closed, self.momentum, self.anchor_momentum)
        self.position = torch.where(closed, 0, self.position)


def recurrent_memory(call: MemoryCall) -> MemoryResult:
    """See `neural_memory`."""
    walk, layout, pending = _Walk(call), call.layout, call.state.pending
    counts = torch.as_tensor(call.state.count, device=call.q.device).expand(call.q.shape[0])
    for j in range(pending.k.shape[1]):
        walk.write(*(t[:, j] for t in pending), j < counts)
    everyone = torch.ones_like(counts, dtype=torch.bool)
    open_chunk = [list(row) for row in _open_rows(pending, counts)]
    outputs, surprises = [], []
    for t in range(call.q.shape[1]):
        real = everyone if layout.mask is None else layout.mask[:, t]
        # What stands at a masked token, be it NaN, must not even be multiplied by zero.
        q, mix, *token = (
            x if x is None else torch.where(real.view(-1, *(1,) * (x.dim() - 2)), x[:, t], 0)
            for x in (call.q, call.mix, *call.tokens)
        )
        if layout.document_starts is not None:
            starts = layout.document_starts[:, t] & real
            walk.restart(starts)
            open_chunk = [[] if new else row for row, new in zip(open_chunk, starts.tolist(), strict=True)]
        surprises.append(torch.where(real[:, None], walk.write(*token, real), 0))
        outputs.append(torch.where(real[:, None, None], walk.read(q, mix), 0))
        for row, is_real in enumerate(real.tolist()):
            if is_real:
                open_chunk[row] = (open_chunk[row] + [[x[row] for x in token]])[-call.chunk_size :]
        closing = (walk.position == call.chunk_size).tolist()
        open_chunk = [[] if closed else row for row, closed in zip(open_chunk, closing, strict=True)]
        if call.segments is not None:
            walk.end_segments(_chunk_of(call, t))
        walk.close_full_chunks()
    pending, count = _stack_open_chunks(open_chunk, call)
    state = MemoryState(tuple(walk.anchor), tuple(walk.anchor_momentum), pending, count)
    surprise = torch.stack(surprises, 1) if call.output_surprise else None
    kept = [torch.stack(layer, 1) for layer in zip(*walk.ended, strict=True)]
    return MemoryResult(torch.stack(outputs, 1), state, surprise, handed_out(kept, call))


def _chunk_of(call: MemoryCall, t: int) -> torch.Tensor:
    """(B,) the chunk of column t, counted from the call's first one."""
    slots = call.layout.slots
    slot = torch.as_tensor(call.state.count + t) if slots is None else slots.slot[:, t]
    return slot // call.chunk_size


def _where(rows: torch.Tensor, chosen, other) -> list[torch.Tensor]:
    rows = rows.view(-1, 1, 1, 1)
    return [torch.where(rows, x, y) for x, y in zip(chosen, other, strict=True)]


def _open_rows(pending: PendingTokens, counts: torch.Tensor):
    """For each row the list of its pending tokens, each [k, v, theta, alpha, eta]."""
    for row, count in enumerate(counts.tolist()):
        yield [[t[row, j] for t in pending] for j in range(count)]


def _stack_open_chunks(rows, call: MemoryCall) -> tuple[PendingTokens, int | torch.Tensor]:
    counts = [len(row) for row in rows]
    alike = call.layout.slots is None
    width = counts[0] if alike else call.chunk_size - 1
    zeros = [torch.zeros_like(x[0, 0]) for x in call.tokens]
    columns = []
    for part, zero in enumerate(zeros):
        padded = [[token[part] for token in row] + [zero] * (width - len(row)) for row in rows]
        stacked = [torch.stack(row) if row else zero.new_zeros(0, *zero.shape) for row in padded]
        columns.append(torch.stack(stacked))
    return PendingTokens(*columns), counts[0] if alike else torch.tensor(counts, device=call.q.device)
