# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward of the chunked scan: spans of chunks in reverse; in each, recompute and un-read all chunks at once,
then go back through the updates one by one. MEMORY.md derives the formulas.

Shapes: as in `chunk_forward`.
"""

from typing import NamedTuple

import torch

from .chunk_coefficients import EndCoefficients, ReadCoefficients, chunk_coefficients_adjoint
from .chunk_forward import Ends, ReadTerms, Scan, as_asked, read, spans_of, take_span
from .inner_network import (
    Factors,
    Hidden,
    InnerNetwork,
    gelu_and_slope,
    gelu_slope_and_curvature,
    inner_gradient,
    inner_gradient_adjoint,
)
from .memory_soup import own_part_adjoint
from .scan_inputs import ScanInputs, ScanOptions


class SpanGradients(NamedTuple):
    """Gradients of what a span is given.

    Attributes:
        tokens: of q, k, v, theta, alpha and eta, as `ScanInputs` has them, and of ``mix`` if it is given.
        norm: of LN's scale and shift (G, 1, D), or [].
        forget_to: per layer (G, D_in, D_out), or [].
        start: of the pairs in which a row restarts, or [].
        kept: per layer (G, K, D_in, D_out), or [].
        state: of the pairs before the span.
    """

    tokens: list[torch.Tensor]
    norm: list[torch.Tensor]
    forget_to: list[torch.Tensor]
    start: list[torch.Tensor]
    kept: list[torch.Tensor]
    state: list[torch.Tensor]


class _Unread(NamedTuple):
    """Gradients through a span's reads.

    Attributes:
        coefficients: of c and d, (n * G, b_q, 2).
        A: (n * G, b_q, b).
        a, g: of the factors, per layer (n * G, b, .).
        state: per layer the factors left, right (n * G, b_q, .) of X's gradient left^T right.
    """

    coefficients: torch.Tensor
    A: torch.Tensor
    a: list[torch.Tensor]
    g: list[torch.Tensor]
    state: list[tuple[torch.Tensor, torch.Tensor]]


def scan_backward(
    inputs: ScanInputs,
    options: ScanOptions,
    starts: list[list[torch.Tensor]],
    output_bar: torch.Tensor,
    state_bar: list[torch.Tensor] | None,
    kept_bar: list[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of `ScanInputs.flatten()`.

    Args:
        starts: what `scan_forward` kept.
        output_bar: (N, G, b_q, D).
        state_bar: gradients of the weights and of the momentum behind the last chunk, or None: nothing was written.
        kept_bar: gradients of the weights handed out, per layer (J, G, D_in, D_out), or [].
    """
    scan, depth = Scan(inputs, options), options.depth
    if state_bar is None:
        state_bar = [torch.zeros_like(x[0]) for x in starts[0]]
    else:
        state_bar = scan.join(state_bar[:depth], state_bar[depth:])
    tokens = [torch.empty_like(t) for t in (*list(inputs)[:6], inputs.mix) if t is not None]
    sums: list[list[torch.Tensor]] = [[], [], [], []]
    number = len(options.ends)
    for at, span_starts in zip(reversed(spans_of(inputs, options)), reversed(starts), strict=True):
        if number and at.stop - 1 == options.ends[number - 1]:
            number -= 1
            for pair, bar, ended_bar in zip(scan.pairs, state_bar, kept_bar, strict=True):
                pair.weights(bar).add_(ended_bar[number])
        span = take_span(inputs, options, at)
        grads = as_asked(backward_span, *span)(*span, span_starts, output_bar[at], state_bar)
        for store, bar in zip(tokens, grads.tokens, strict=True):
            store[at] = bar
        for i, bars in enumerate(grads[1:5]):
            sums[i] = [x.add_(y) for x, y in zip(sums[i], bars, strict=True)] if sums[i] else bars
        state_bar = grads.state
    norm, forget_to, start, kept = sums
    forget_to, kept, norm = forget_to or [None] * depth, kept or [None] * depth, norm or [None] * 2
    start = scan.split(start) if start else [None] * (2 * depth)
    mix = tokens[6:] or [None]
    return [*tokens[:6], None, None, *norm, *scan.split(state_bar), *forget_to, *start, *kept, *mix]


def backward_span(
    inputs: ScanInputs, options: ScanOptions, starts: list[torch.Tensor], output_bar: torch.Tensor, state_bar
) -> SpanGradients:
    """The adjoint of `forward_span`, whose values are computed again.

    Args:
        output_bar: (n, G, b_q, D).
        state_bar: per layer, of the pair behind the span; overwritten.
    """
    return _Backward(Scan(inputs, options), starts).run(output_bar, state_bar)


class _Backward:
    """The backward of one span."""

    def __init__(self, scan: Scan, starts: list[torch.Tensor]):
        self.scan, self.inputs, self.starts = scan, scan.inputs, starts
        self.products = scan.products
        inputs = scan.inputs

        def zeros(group):
            return [] if group is None or group[0] is None else [torch.zeros_like(t) for t in group]

        self.norm = zeros((inputs.norm_weight, inputs.norm_bias))
        self.forget_to, self.start = zeros(inputs.forget_to), zeros(scan.start)
        self.kept, self.mix = [], zeros((inputs.mix,))

    def run(self, output_bar: torch.Tensor, state_bar: list[torch.Tensor]) -> SpanGradients:
        scan, inputs, num_chunks = self.scan, self.inputs, self.inputs.k.shape[0]
        gates = (inputs.theta, inputs.alpha, inputs.eta)
        coefficients = scan.coefficients()
        ends, network = Ends.of(coefficients.end), scan.network(num_chunks)
        state = [self.products.operand(x.flatten(0, 1)) for x in self.starts]
        weights = [pair.weights(x) for pair, x in zip(scan.pairs, state, strict=True)]
        tokens = (inputs.k.flatten(0, 1), inputs.v.flatten(0, 1))
        factors = inner_gradient(network, weights, *tokens, activate=gelu_slope_and_curvature)
        terms = ReadTerms.of(scan, inputs, coefficients.read)
        unread, q_bar = self._unread(network, terms, state, factors, output_bar.flatten(0, 1))
        chunks = _Chunks(num_chunks, factors, unread, weights)
        token_bars, end_bars = [], []
        for n in reversed(range(num_chunks)):
            end_bar, token_bar = self._chunk(ends, n, chunks, state_bar)
            token_bars.append(token_bar)
            end_bars.append(end_bar)
            if n in scan.options.restart_at:
                self._unrestart(inputs.restart[n], state_bar)
        c_bar, d_bar = unread.coefficients.unflatten(0, (num_chunks, -1)).unbind(-1)
        read_bar = ReadCoefficients(c_bar, d_bar, unread.A.unflatten(0, (num_chunks, -1)))
        end_bar = EndCoefficients(*_stack_reversed(end_bars)) if scan.options.write else None
        if terms.soup is not None:
            read_bar, own_bar = own_part_adjoint(coefficients.read, inputs.mix[..., 0], read_bar)
            self.mix[0][..., 0] += own_bar
        gate_bars = chunk_coefficients_adjoint(*gates, inputs.full, coefficients.products, read_bar, end_bar)
        tokens_bar = [q_bar.view_as(inputs.q), *_stack_reversed(token_bars), *gate_bars, *self.mix]
        return SpanGradients(tokens_bar, self.norm, self.forget_to, self.start, self.kept, state_bar)

    def _add_norm(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """Adds gradients (n * G, 1, D)."""
        for store, bar in zip(self.norm, (weight, bias), strict=False):
            if bar is not None:
                store += bar.unflatten(0, (-1, store.shape[0])).sum(0)

    def _unread(self, network: InnerNetwork, terms: ReadTerms, state, factors: Factors, output_bar: torch.Tensor):
        """The adjoint of `read`, with the read itself recomputed, and the gradient of the queries."""
        scan, products = self.scan, self.products
        done = read(scan, network, terms, state, factors.a, factors.g, activate=gelu_and_slope)
        r_bar = output_bar
        if done.norm is not None:
            weight_bar = torch.mul(output_bar, done.norm.x_hat).sum(-2, keepdim=True)
            self._add_norm(weight_bar, output_bar.sum(-2, keepdim=True))
            r_bar = done.norm.jacobian(output_bar * network.norm_weight)
        A_bar, coefficients_bar = torch.zeros_like(terms.minus_A), torch.zeros_like(terms.coefficients)
        a_bar, g_bar, state_bar = [], [], []
        for layer in reversed(range(len(scan.pairs))):
            x, scores, a, g = done.x[layer], done.scores[layer], factors.a[layer], factors.g[layer]
            product_bar = products.mm(r_bar, g.mT)
            A_bar.addcmul_(product_bar, scores, value=-1)
            scores_bar = product_bar.mul_(terms.minus_A)
            a_bar.insert(0, products.mm(scores_bar.mT, x))
            g_bar.insert(0, products.mm(scores.mul_(terms.minus_A).mT, r_bar))
            x_bar, bar, outer = scan.pairs[layer].apply_adjoint(
                products, x, r_bar, terms.coefficients, state[layer], done.kept[layer]
            )
            coefficients_bar += bar
            state_bar.insert(0, outer)
            products.add_(x_bar, scores_bar, a)
            if terms.forget_to is not None:
                self._unforget_read(terms, layer, x, r_bar, x_bar, coefficients_bar)
            if terms.soup is not None:
                self._unmix(terms, layer, x, r_bar, x_bar)
            r_bar = x_bar.mul_(done.hidden[layer - 1].slope) if layer else x_bar
        q_bar = r_bar + output_bar if network.residual else r_bar
        return _Unread(coefficients_bar, A_bar, a_bar, g_bar, state_bar), q_bar

    def _unforget_read(self, terms: ReadTerms, layer: int, x, r_bar, x_bar, coefficients_bar) -> None:
        """Adds what comes through (1 - c) x W_0 to x_bar and to c's gradient; in a mixture, 1 is a share."""
        through = self.products.mm(r_bar, terms.forget_to[layer].mT)
        forgotten_bar = torch.linalg.vecdot(x, through)
        coefficients_bar[..., 0] -= forgotten_bar
        if terms.soup is not None:
            self.mix[0][..., 0] += forgotten_bar.unflatten(0, (len(self.inputs.q), -1))
        x_bar.addcmul_(terms.forgotten, through)
        bar = self.products.mm((terms.forgotten * x).mT, r_bar)
        store = self.forget_to[layer]
        store += bar.unflatten(0, (-1, store.shape[0])).sum(0)

    def _unmix(self, terms: ReadTerms, layer: int, x, r_bar, x_bar) -> None:
        """Adds what comes through the kept weights to x_bar and to the shares' gradients."""
        shares_bar, bar = terms.soup.adjoint(self.products, layer, x, r_bar, x_bar)
        self.mix[0][..., 1:] += shares_bar
        self.kept.insert(0, bar.view_as(self.inputs.kept[layer]))

    def _chunk(self, ends: Ends, n: int, chunks: "_Chunks", state_bar: list):
        """Back through a chunk's update and inner gradient: ``state_bar`` becomes that of the state before it.

        Returns the gradients of the end coefficients, or None, and those of k and v.
        """
        scan = self.scan
        factors, a_bar, g_bar = chunks.factors[n], chunks.a[n], chunks.g[n]
        end_bar = None
        if scan.options.write:
            end_bar = self._unupdate(ends, n, factors, state_bar, a_bar, g_bar)
        adjoint = inner_gradient_adjoint(scan.network(1), chunks.weights[n], factors, a_bar, g_bar)
        self._add_norm(adjoint.norm_weight, adjoint.norm_bias)
        for pair, bar, read_factors, inner_factors in zip(
            scan.pairs, state_bar, chunks.state[n], adjoint.weights, strict=True
        ):
            left, right = read_factors
            self.products.add_(bar, left.mT, right)
            pair.add_to_weights_(self.products, bar, inner_factors)
        return end_bar, (adjoint.k, adjoint.v)

    def _unupdate(self, ends: Ends, n: int, factors: Factors, state_bar: list, a_bar, g_bar):
        """The adjoint of the update with respect to factors (added to a_bar, g_bar) and coefficients (returned);
        ``state_bar`` becomes that of the state before it."""
        scan, products, before = self.scan, self.products, [x[n] for x in self.starts]
        # Of [W' ; S'] = [c d; 0 m] [W; S].
        mix_bar, written_bar = before[0].new_zeros(len(before[0]), 2, 2), torch.zeros_like(ends.written[n])
        for layer, (pair, x, bar) in enumerate(zip(scan.pairs, before, state_bar, strict=True)):
            a, g, operand = factors.a[layer], factors.g[layer], products.operand(bar)
            through, kept = pair.apply(products, a, ends.written[n], operand)
            g_bar[layer].sub_(through)
            through, coefficients_bar, _ = pair.apply_adjoint(products, a, g, ends.written[n], operand, kept)
            a_bar[layer].sub_(through)
            written_bar -= coefficients_bar
            mix_bar.baddbmm_(_halves(bar), _halves(x).mT)
            w_bar, s_bar = bar.chunk(2, -2)
            if scan.forget_to is not None:
                mix_bar[:, 0, 0] -= (scan.forget_to[layer] * w_bar).sum((-2, -1))
                self.forget_to[layer] += (1 - ends.c[n]) * pair.oriented(w_bar)
            # In place: the gradient of the state behind the chunk is of no more use.
            s_bar.mul_(ends.m[n]).addcmul_(w_bar, ends.d[n])
            w_bar.mul_(ends.c[n])
        return EndCoefficients(mix_bar[:, 0, 0], mix_bar[:, 0, 1], mix_bar[:, 1, 1], *written_bar.unbind(-1))

    def _unrestart(self, restart: torch.Tensor, state_bar: list[torch.Tensor]) -> None:
        where = restart[:, None, None]
        for store, bar in zip(self.start, state_bar, strict=True):
            store += torch.where(where, bar, 0)
            bar.masked_fill_(where, 0)


class _Chunks:
    """A span's values (n * G, ...), chunk by chunk."""

    def __init__(self, num_chunks: int, factors: Factors, unread: _Unread, weights: list[torch.Tensor]):
        def cut(tensors):
            """Per layer (n * G, ...) -> by chunk, per layer (G, ...)."""
            parts = [t.chunk(num_chunks) for t in tensors]
            return [[part[n] for part in parts] for n in range(num_chunks)]

        a, g, p, weights = (cut(tensors) for tensors in (factors.a, factors.g, factors.p, weights))
        hidden = [cut(layer) for layer in factors.hidden]
        norm = None if factors.norm is None else cut(factors.norm)
        error = factors.error.chunk(num_chunks)
        self.factors = [
            Factors(
                a[n],
                g[n],
                [Hidden(*layer[n]) for layer in hidden],
                p[n],
                None if norm is None else type(factors.norm)(*norm[n]),
                error[n],
            )
            for n in range(num_chunks)
        ]
        self.weights = weights
        self.a, self.g = cut(unread.a), cut(unread.g)
        lefts, rights = (cut([pair[i] for pair in unread.state]) for i in (0, 1))
        self.state = [list(zip(lefts[n], rights[n], strict=True)) for n in range(num_chunks)]


def _stack_reversed(per_chunk: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Tuples of tensors by chunk, the last chunk first -> tensors with a chunk dimension in front."""
    return [torch.stack(parts) for parts in zip(*reversed(per_chunk), strict=True)]


def _halves(pair: torch.Tensor) -> torch.Tensor:
    """(G, 2 * narrow, wide) -> (G, 2, narrow * wide)."""
    return pair.flatten(1).unflatten(1, (2, -1))
