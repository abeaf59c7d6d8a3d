# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The scan's forward and backward step by step, in plain PyTorch: what single kernels are held against.

Shapes: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from inner_pieces import (
    Factors,
    InnerNetwork,
    gelu,
    gelu_slope,
    inner_gradient,
    inner_gradient_adjoint,
    output_of,
)
from transformers_titans.chunk_coefficients import (
    EndCoefficients,
    ReadCoefficients,
    chunk_coefficients,
    chunk_coefficients_adjoint,
)


# Chunks whose intermediate values are alive together: enough for large products, few enough for memory to stay small.
SPAN = 16


class ScanOptions(NamedTuple):
    """Static facts of a scan: see `chunk_scan`."""

    depth: int
    residual: bool
    norm_eps: float
    write: bool
    restart_at: frozenset[int]
    surprise: bool


class ScanInputs(NamedTuple):
    """The tensors of a scan; see `chunk_scan`. Optional ones are None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    theta: torch.Tensor
    alpha: torch.Tensor
    eta: torch.Tensor
    full: torch.Tensor | None
    restart: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_bias: torch.Tensor | None
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    forget_to: tuple[torch.Tensor, ...] | None
    start_weights: tuple[torch.Tensor, ...] | None
    start_momentum: tuple[torch.Tensor, ...] | None

    def flatten(self) -> list[torch.Tensor | None]:
        # A list first: older compilers cannot slice a named tuple.
        fields = list(self)
        flat = fields[:10]
        for group in fields[10:]:
            flat.extend(group if group is not None else [None] * len(self.weights))
        return flat

    @classmethod
    def unflatten(cls, flat, depth: int) -> "ScanInputs":
        groups = [tuple(flat[10 + i * depth : 10 + (i + 1) * depth]) for i in range(5)]
        return cls(*flat[:10], *(None if group[0] is None else group for group in groups))

    def network(self, options: ScanOptions) -> InnerNetwork:
        return InnerNetwork(options.residual, self.norm_weight, self.norm_bias, options.norm_eps)


class ScanResult(NamedTuple):
    """Output (N, G, b_q, D), the state behind the last chunk, and the inner losses (N, G, b) or None."""

    output: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    surprise: torch.Tensor | None


def chunk_scan(inputs: ScanInputs, options: ScanOptions) -> ScanResult:
    """Runs a memory through N chunks.

    Args:
        inputs: ``q`` (N, G, b_q, D): the queries of each chunk's last b_q tokens; ``k``, ``v`` (N, G, b, D); gates
            (N, G, b); ``full`` (N, G) bool or None: chunks whose update takes place (None: all); ``restart`` (N, G)
            bool or None: chunks before which the state goes back to ``start_weights``, ``start_momentum``;
            ``norm_weight``, ``norm_bias`` (G, 1, D) or None; ``weights``, ``momentum``, ``forget_to`` and start
            states: per layer (G, D_in, D_out), the last three or None.
        options: ``write``: whether chunks update the state at all (if not, N must be 1); ``restart_at``: the chunks
            in which ``restart`` holds anywhere; ``surprise``: whether to return the inner losses.

    Returns:
        The result, differentiable in every floating-point input except through ``surprise``.
    """
    flat = inputs.flatten()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat):
        results = _ChunkScan.apply(options, *flat)
    else:
        results, _ = _forward(inputs, options, keep=False)
    surprise = results[-1] if options.surprise else None
    if not options.write:
        return ScanResult(results[0], inputs.weights, inputs.momentum, surprise)
    state = tuple(results[1 : 1 + 2 * options.depth])
    return ScanResult(results[0], state[: options.depth], state[options.depth :], surprise)


def _slice_chunks(inputs: ScanInputs, options: ScanOptions, begin: int, end: int) -> tuple[ScanInputs, ScanOptions]:
    flat = inputs.flatten()
    flat[:8] = [t if t is None else t[begin:end] for t in flat[:8]]
    restart_at = frozenset(n - begin for n in options.restart_at if begin <= n < end)
    return ScanInputs.unflatten(flat, options.depth), options._replace(restart_at=restart_at)


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: ScanOptions, *flat: torch.Tensor | None):
        inputs = ScanInputs.unflatten(flat, options.depth)
        results, boundary = _forward(inputs, options, keep=True)
        # The boundary states are all that grows with the sequence beside the inputs themselves.
        ctx.save_for_backward(*flat[:10], *flat[10 + 2 * options.depth :], *boundary)
        ctx.options, ctx.num_boundary = options, len(boundary)
        if options.surprise:
            ctx.mark_non_differentiable(results[-1])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_bar, *rest):
        options, depth = ctx.options, ctx.options.depth
        saved = ctx.saved_tensors
        boundary = saved[len(saved) - ctx.num_boundary :]
        weights, momentum = boundary[:depth], boundary[depth:]
        flat = [*saved[:10], *(w[0] for w in boundary), *saved[10 : len(saved) - ctx.num_boundary]]
        state_bar = rest[: 2 * depth] if options.write else None
        inputs = ScanInputs.unflatten(flat, depth)
        with torch.autocast(output_bar.device.type, enabled=False):
            gradients = _Backward(inputs, options, weights, momentum).run(output_bar, state_bar)
        return None, *gradients.flatten()


def _forward(inputs: ScanInputs, options: ScanOptions, keep: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Span by span, so that what a span needs in between does not grow with the number of chunks.

    Returns:
        [output, weights and momentum (if written), surprise (if asked for)], and with ``keep`` the states at the
        chunks' starts, each (N, G, D_in, D_out).
    """
    num_chunks = inputs.k.shape[0]
    state = [*inputs.weights, *inputs.momentum]
    boundary = [w.new_empty(num_chunks, *w.shape) for w in state] if keep else []
    outputs, surprises = [], []
    for begin in range(0, num_chunks, SPAN):
        span, span_options = _slice_chunks(inputs, options, begin, begin + SPAN)
        store = [w[begin : begin + SPAN] for w in boundary] or None
        output, surprise, state = _forward_span(span, span_options, state, store)
        outputs.append(output)
        surprises.append(surprise)
    results = [torch.cat(outputs), *(state if options.write else [])]
    return results + ([torch.cat(surprises)] if options.surprise else []), boundary


def _forward_span(inputs: ScanInputs, options: ScanOptions, state: list, store: list | None):
    """Writes a span's chunks one after another, then reads them all.

    Returns the output, the inner losses or None, and the state behind the span. The states at the chunks' starts are
    left in ``store`` if it is given.
    """
    depth, network = options.depth, inputs.network(options)
    coefficients = chunk_coefficients(inputs.theta, inputs.alpha, inputs.eta, inputs.q.shape[-2], inputs.full)
    weights, momentum = state[:depth], state[depth:]
    starts, kept = [], []
    for n in range(inputs.k.shape[0]):
        if n in options.restart_at:
            weights, momentum = _restart(inputs, n, weights, momentum)
        starts.append([*weights, *momentum])
        kept.append(inner_gradient(network, weights, inputs.k[n], inputs.v[n]))
        if options.write:
            weights, momentum = _update(inputs, coefficients.end, n, weights, momentum, kept[-1])
    starts = _stack_chunks(starts, store)
    a, g = _stack_chunks([factors.a for factors in kept]), _stack_chunks([factors.g for factors in kept])
    output = _read(network, starts[:depth], starts[depth:], inputs, coefficients.read, a, g).output
    surprise = torch.stack([0.25 * f.error.square().sum(-1) for f in kept]) if options.surprise else None
    return output, surprise, [*weights, *momentum]


def _stack_chunks(per_chunk: list[list[torch.Tensor]], store: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Lists of tensors by chunk -> a list of tensors with a chunk dimension in front; a lone chunk's are views."""
    if store is not None:
        return [torch.stack(chunks, out=out) for chunks, out in zip(zip(*per_chunk, strict=True), store, strict=True)]
    if len(per_chunk) == 1:
        return [t.unsqueeze(0) for t in per_chunk[0]]
    return [torch.stack(chunks) for chunks in zip(*per_chunk, strict=True)]


def _restart(inputs: ScanInputs, n: int, weights: list, momentum: list) -> tuple[list, list]:
    where = inputs.restart[n][:, None, None]
    weights = [torch.where(where, start, w) for start, w in zip(inputs.start_weights, weights, strict=True)]
    momentum = [torch.where(where, start, s) for start, s in zip(inputs.start_momentum, momentum, strict=True)]
    return weights, momentum


def _update(
    inputs: ScanInputs, end: EndCoefficients, n: int, weights: list, momentum: list, factors: Factors
) -> tuple[list, list]:
    """The state behind chunk n."""
    c, d, m = (x[n][:, None, None] for x in (end.c, end.d, end.m))
    A, E = end.A[n][:, None, :], end.E[n][:, None, :]
    new_weights, new_momentum = [], []
    for layer, (w, s, a, g) in enumerate(zip(weights, momentum, factors.a, factors.g, strict=True)):
        w_next = torch.baddbmm(c * w + d * s, a.mT * A, g, alpha=-1)
        if inputs.forget_to is not None:
            w_next = w_next + (1 - c) * inputs.forget_to[layer]
        new_weights.append(w_next)
        new_momentum.append(torch.baddbmm(m * s, a.mT * E, g, alpha=-1))
    return new_weights, new_momentum


class _Read(NamedTuple):
    """What a read leaves for its adjoint: layer inputs x, scores x a^T, pre-activations r, LN, output."""

    x: list[torch.Tensor]
    scores: list[torch.Tensor]
    r: list[torch.Tensor]
    norm: tuple | None
    output: torch.Tensor


def _read(
    network: InnerNetwork,
    weights: list[torch.Tensor],
    momentum: list[torch.Tensor],
    inputs: ScanInputs,
    coefficients: ReadCoefficients,
    a: list[torch.Tensor],
    g: list[torch.Tensor],
) -> _Read:
    """M_{W_t}(q_t) for all chunks at once: per layer, two products with the state and one masked b_q x b attention."""
    c, d = coefficients.c.unsqueeze(-1), coefficients.d.unsqueeze(-1)
    x, scores, r = [inputs.q], [], []
    for layer in range(len(weights)):
        scores.append(x[-1] @ a[layer].mT)
        z = (c * x[-1]) @ weights[layer] + (d * x[-1]) @ momentum[layer]
        z = z - (coefficients.A * scores[-1]) @ g[layer]
        if inputs.forget_to is not None:
            z = z + ((1 - c) * x[-1]) @ inputs.forget_to[layer]
        r.append(z)
        if layer + 1 < len(weights):
            x.append(gelu(z))
    output, norm = output_of(network, inputs.q, r[-1])
    return _Read(x, scores, r, norm, output)


class _Gradients:
    """Accumulates the gradients of a scan's inputs."""

    def __init__(self, inputs: ScanInputs):
        def zeros(group):
            return None if group is None else [torch.zeros_like(t) for t in group]

        tokens = [torch.empty_like(t) for t in list(inputs)[:6]]
        self.q, self.k, self.v, self.theta, self.alpha, self.eta = tokens
        norm = (inputs.norm_weight, inputs.norm_bias)
        self.norm_weight, self.norm_bias = (None, None) if norm[0] is None else zeros(norm)
        self.forget_to = zeros(inputs.forget_to)
        self.start_weights, self.start_momentum = zeros(inputs.start_weights), zeros(inputs.start_momentum)
        self.weights: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []

    def flatten(self) -> list[torch.Tensor | None]:
        tokens = [self.q, self.k, self.v, self.theta, self.alpha, self.eta]
        absent = [None] * len(self.weights)
        groups = [self.weights, self.momentum, self.forget_to, self.start_weights, self.start_momentum]
        flat = [*tokens, None, None, self.norm_weight, self.norm_bias]
        return flat + [t for group in groups for t in (absent if group is None else group)]


class _Backward:
    """The scan's backward: spans of chunks in reverse; in each, recompute and un-read all chunks at once, then go
    back through the updates one by one."""

    def __init__(self, inputs: ScanInputs, options: ScanOptions, weights, momentum):
        self.inputs, self.options = inputs, options
        self.network = inputs.network(options)
        self.weights, self.momentum = weights, momentum
        self.grads = _Gradients(inputs)

    def run(self, output_bar: torch.Tensor, state_bar) -> _Gradients:
        depth = self.options.depth
        if state_bar is None:
            state_bar = [torch.zeros_like(w[0]) for w in (*self.weights, *self.momentum)]
        w_bar, s_bar = list(state_bar[:depth]), list(state_bar[depth:])
        num_chunks = self.inputs.k.shape[0]
        for begin in reversed(range(0, num_chunks, SPAN)):
            w_bar, s_bar = self._span(slice(begin, min(begin + SPAN, num_chunks)), output_bar, w_bar, s_bar)
        self.grads.weights, self.grads.momentum = w_bar, s_bar
        return self.grads

    def _span(self, at: slice, output_bar: torch.Tensor, w_bar: list, s_bar: list) -> tuple[list, list]:
        inputs, options = _slice_chunks(self.inputs, self.options, at.start, at.stop)
        weights, momentum = [w[at] for w in self.weights], [s[at] for s in self.momentum]
        gates = (inputs.theta, inputs.alpha, inputs.eta)
        coefficients = chunk_coefficients(*gates, inputs.q.shape[-2], inputs.full)
        end = coefficients.end
        factors = inner_gradient(self.network, weights, inputs.k, inputs.v)
        unread = self._unread(inputs, weights, momentum, coefficients.read, factors, output_bar[at])
        self.grads.q[at] = unread.q
        end_bars = []
        for n in reversed(range(inputs.k.shape[0])):
            w_bar, s_bar, end_bar = self._chunk(inputs, end, weights, momentum, factors, unread, n, w_bar, s_bar, at)
            end_bars.append(end_bar)
            if n in options.restart_at:
                w_bar, s_bar = self._unrestart(inputs, n, w_bar, s_bar)
        read_bar, end_bar = ReadCoefficients(unread.c, unread.d, unread.A), None
        if options.write:
            end_bar = EndCoefficients(*(torch.stack(bar) for bar in zip(*reversed(end_bars), strict=True)))
        gate_bars = chunk_coefficients_adjoint(*gates, inputs.full, coefficients.products, read_bar, end_bar)
        for store, bar in zip((self.grads.theta, self.grads.alpha, self.grads.eta), gate_bars, strict=True):
            store[at] = bar
        return w_bar, s_bar

    def _unread(self, inputs, weights, momentum, coefficients, factors, output_bar) -> "_ReadAdjoint":
        """The adjoint of `_read`, with the read itself recomputed."""
        read = _read(self.network, weights, momentum, inputs, coefficients, factors.a, factors.g)
        r_bar = output_bar
        if read.norm is not None:
            self.grads.norm_weight += (output_bar * read.norm.x_hat).sum((0, -2)).unsqueeze(-2)
            self.grads.norm_bias += output_bar.sum((0, -2)).unsqueeze(-2)
            r_bar = read.norm.jacobian(output_bar * self.network.norm_weight)
        c, d = coefficients.c.unsqueeze(-1), coefficients.d.unsqueeze(-1)
        adjoint = _ReadAdjoint(len(weights), coefficients)
        for layer in reversed(range(len(weights))):
            x, a, g = read.x[layer], factors.a[layer], factors.g[layer]
            through_w, through_s = r_bar @ weights[layer].mT, r_bar @ momentum[layer].mT
            product_bar = -(r_bar @ g.mT)
            scores_bar = product_bar * coefficients.A
            adjoint.A.add_(product_bar * read.scores[layer])
            adjoint.c.add_((x * through_w).sum(-1))
            adjoint.d.add_((x * through_s).sum(-1))
            adjoint.a[layer] = scores_bar.mT @ x
            adjoint.g[layer] = -((coefficients.A * read.scores[layer]).mT @ r_bar)
            adjoint.weights[layer] = (c * x).mT @ r_bar
            adjoint.momentum[layer] = (d * x).mT @ r_bar
            x_bar = c * through_w + d * through_s + scores_bar @ a
            if inputs.forget_to is not None:
                through_start = r_bar @ inputs.forget_to[layer].mT
                adjoint.c.sub_((x * through_start).sum(-1))
                x_bar = x_bar + (1 - c) * through_start
                self.grads.forget_to[layer] += (((1 - c) * x).mT @ r_bar).sum(0)
            if layer:
                r_bar = x_bar * gelu_slope(read.r[layer - 1])
        adjoint.q = x_bar + output_bar if self.network.residual else x_bar
        return adjoint

    def _chunk(self, inputs, end, weights, momentum, factors, unread, n, w_bar, s_bar, at):
        """Back through chunk n's update and inner gradient: the state's gradient before it, given that behind it."""
        w_n, s_n = [w[n] for w in weights], [s[n] for s in momentum]
        chunk = _take_chunk(factors, n)
        a_bar, g_bar = [x[n] for x in unread.a], [x[n] for x in unread.g]
        new_w, new_s = [w[n] for w in unread.weights], [s[n] for s in unread.momentum]
        end_bar = None
        if self.options.write:
            end_bar = self._unupdate(inputs, end, n, w_n, s_n, chunk, w_bar, s_bar, a_bar, g_bar)
            c, d, m = (x[n][:, None, None] for x in (end.c, end.d, end.m))
            new_s = [s + d * w + m * t for s, w, t in zip(new_s, w_bar, s_bar, strict=True)]
            new_w = [w + c * t for w, t in zip(new_w, w_bar, strict=True)]
        else:
            new_w = [w + t for w, t in zip(new_w, w_bar, strict=True)]
            new_s = [s + t for s, t in zip(new_s, s_bar, strict=True)]
        adjoint = inner_gradient_adjoint(self.network, w_n, chunk, a_bar, g_bar)
        self.grads.k[at.start + n], self.grads.v[at.start + n] = adjoint.k, adjoint.v
        if adjoint.norm_weight is not None:
            self.grads.norm_weight += adjoint.norm_weight
            self.grads.norm_bias += adjoint.norm_bias
        return [w + t for w, t in zip(new_w, adjoint.weights, strict=True)], new_s, end_bar

    def _unupdate(self, inputs, end, n, w_n, s_n, factors, w_bar, s_bar, a_bar, g_bar):
        """The adjoint of `_update` with respect to factors (added to a_bar, g_bar) and coefficients (returned)."""
        A, E = end.A[n].unsqueeze(-1), end.E[n].unsqueeze(-1)
        c = end.c[n][:, None, None]
        c_bar = d_bar = m_bar = A_bar = E_bar = 0
        for layer, (a, g) in enumerate(zip(factors.a, factors.g, strict=True)):
            to_w, to_s = a @ w_bar[layer], a @ s_bar[layer]
            g_bar[layer] = g_bar[layer] - A * to_w - E * to_s
            a_bar[layer] = a_bar[layer] - A * (g @ w_bar[layer].mT) - E * (g @ s_bar[layer].mT)
            A_bar = A_bar - (to_w * g).sum(-1)
            E_bar = E_bar - (to_s * g).sum(-1)
            c_bar = c_bar + (w_n[layer] * w_bar[layer]).sum((-2, -1))
            d_bar = d_bar + (s_n[layer] * w_bar[layer]).sum((-2, -1))
            m_bar = m_bar + (s_n[layer] * s_bar[layer]).sum((-2, -1))
            if inputs.forget_to is not None:
                c_bar = c_bar - (inputs.forget_to[layer] * w_bar[layer]).sum((-2, -1))
                self.grads.forget_to[layer] += (1 - c) * w_bar[layer]
        return EndCoefficients(c_bar, d_bar, m_bar, A_bar, E_bar)

    def _unrestart(self, inputs, n: int, w_bar: list, s_bar: list) -> tuple[list, list]:
        where = inputs.restart[n][:, None, None]
        for store, bars in ((self.grads.start_weights, w_bar), (self.grads.start_momentum, s_bar)):
            for layer, bar in enumerate(bars):
                store[layer] += torch.where(where, bar, 0)
        return [torch.where(where, 0, bar) for bar in w_bar], [torch.where(where, 0, bar) for bar in s_bar]


class _ReadAdjoint:
    """Gradients through a read, chunk by chunk."""

    def __init__(self, depth: int, coefficients: ReadCoefficients):
        self.a, self.g, self.weights, self.momentum = ([None] * depth for _ in range(4))
        self.c, self.d, self.A = (torch.zeros_like(x) for x in coefficients)
        self.q: torch.Tensor | None = None


def _take_chunk(factors: Factors, n: int) -> Factors:
    def take(values):
        return [x[n] for x in values]

    norm = None if factors.norm is None else type(factors.norm)(*take(factors.norm))
    return Factors(take(factors.a), take(factors.g), take(factors.z), take(factors.p), norm, factors.error[n])
