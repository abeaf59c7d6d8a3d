# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of the chunked scan: writes chunks one after another, and reads the chunks of a span at once.

Shapes: N chunks of the scan, n of a span, G rows times heads, b tokens in a chunk of which b_q are read, D head
dimension. A layer's state is the pair X that `state_pair` describes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .chunk_coefficients import ChunkCoefficients, EndCoefficients, ReadCoefficients, chunk_coefficients
from .inner_network import (
    Factors,
    Hidden,
    InnerNetwork,
    Normalized,
    gelu_alone,
    inner_gradient,
    inner_losses,
    output_of,
)
from .memory_soup import Soup, own_part
from .scan_inputs import ScanInputs, ScanOptions
from .state_pair import Products, StatePair


# Elements of a hidden layer whose values are alive together: enough for an operation to be worth its call, few enough
# to stay in a core's cache. An accelerator wants as many as memory allows.
CPU_ELEMENTS, ACCELERATOR_CHUNKS = 2**17, 16


class Scan:
    """What the spans of a scan have in common."""

    def __init__(self, inputs: ScanInputs, options: ScanOptions):
        self.inputs, self.options = inputs, options
        self.products = Products(options.products, inputs.theta.dtype)
        self.pairs = [StatePair(w.shape[-2] > w.shape[-1]) for w in inputs.weights]
        self.forget_to, self.start = None, None
        self._networks: dict[int, InnerNetwork] = {}
        if inputs.forget_to is not None:
            self.forget_to = [pair.oriented(w) for pair, w in zip(self.pairs, inputs.forget_to, strict=True)]
        if inputs.start_weights is not None:
            self.start = self.join(inputs.start_weights, inputs.start_momentum)

    def join(self, weights, momentum) -> list[torch.Tensor]:
        return [pair.join(w, s) for pair, w, s in zip(self.pairs, weights, momentum, strict=True)]

    def split(self, state: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pairs -> weights of each layer, then momentum of each layer."""
        halves = [pair.weights(x) for pair, x in zip(self.pairs, state, strict=True)]
        halves += [pair.momentum(x) for pair, x in zip(self.pairs, state, strict=True)]
        return [half.contiguous() for half in halves]

    def coefficients(self) -> ChunkCoefficients:
        gates = (self.inputs.theta, self.inputs.alpha, self.inputs.eta)
        sliding = self.options.rule.sliding
        return chunk_coefficients(*gates, self.inputs.q.shape[-2], self.inputs.full, sliding)

    def network(self, num_chunks: int) -> InnerNetwork:
        """The memory network for tokens of ``num_chunks`` chunks, (n * G, b, D)."""
        if num_chunks not in self._networks:
            network = self.inputs.network(self.options)
            if num_chunks > 1:
                network = network.map_norm(lambda t: t.repeat(num_chunks, 1, 1))
            self._networks[num_chunks] = network
        return self._networks[num_chunks]


def spans_of(inputs: ScanInputs, options: ScanOptions) -> list[slice]:
    """The chunks of each span; one, where it is compiled: every span is then alike, and soon compiled. Where weights
    are handed out a span ends."""
    num_chunks, rows, length = inputs.k.shape[:3]
    size = 1 if options.compiled else ACCELERATOR_CHUNKS
    if inputs.k.device.type == "cpu":
        width = max(w.shape[-1] for w in inputs.weights)
        size = min(max(CPU_ELEMENTS // (rows * length * width), 1), size)
    borders = [0, *(chunk + 1 for chunk in options.ends)]
    if borders[-1] < num_chunks:
        borders.append(num_chunks)
    return [
        slice(first, min(first + size, stop))
        for begin, stop in itertools.pairwise(borders)
        for first in range(begin, stop, size)
    ]


def as_asked(function: Callable, inputs: ScanInputs, options: ScanOptions) -> Callable:
    """``function`` of a span, compiled if the options say so and the span is one of many alike."""
    alike = options.write and not options.restart_at and inputs.q.shape[2] in (0, inputs.k.shape[2])
    return _compiled(function) if options.compiled and alike else function


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def take_span(inputs: ScanInputs, options: ScanOptions, at: slice) -> tuple[ScanInputs, ScanOptions]:
    """What a scan over a span alone is given."""
    return inputs.slice_chunks(at.start, at.stop), options.of_chunks(at.start, at.stop)


class Ends(NamedTuple):
    """`EndCoefficients` as the update takes them, chunk by chunk.

    Attributes:
        c, d, m: per chunk (G, 1, 1).
        written: A and E, per chunk (G, b, 2).
    """

    c: tuple[torch.Tensor, ...]
    d: tuple[torch.Tensor, ...]
    m: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, end: EndCoefficients) -> "Ends":
        scalars = (x[..., None, None].unbind(0) for x in (end.c, end.d, end.m))
        return cls(*scalars, torch.stack([end.A, end.E], -1).unbind(0))

    def mix(self, n: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Puts [c W + d S; m S] of x = [W; S] into ``out``."""
        (w, s), (w_out, s_out) = x.chunk(2, -2), out.chunk(2, -2)
        w_out.copy_(w).mul_(self.c[n]).addcmul_(s, self.d[n])
        s_out.copy_(s).mul_(self.m[n])


def scan_forward(inputs: ScanInputs, options: ScanOptions, keep: bool):
    """Span by span, so that what a span needs in between does not grow with the number of chunks.

    Returns:
        [output, weights and momentum (if written), weights handed out, surprise (if asked for)], and with ``keep`` for
        each span the pairs at its chunks' starts, per layer (n, G, 2 * narrow, wide).
    """
    scan, spans = Scan(inputs, options), spans_of(inputs, options)
    state = scan.join(inputs.weights, inputs.momentum)
    outputs, surprises, kept = [], [], []
    ended = [w.new_empty(len(options.ends), *w.shape) for w in inputs.weights] if options.ends else []
    number = 0
    for at in spans:
        starts = _starts(state, at.stop - at.start)
        span = take_span(inputs, options, at)
        output, surprise, state = as_asked(forward_span, *span)(*span, starts)
        outputs.append(output)
        surprises.append(surprise)
        if keep:
            kept.append(starts)
        # Not "in": a tracer may know the ends as symbols.
        if number < len(options.ends) and at.stop - 1 == options.ends[number]:
            for room, pair, x in zip(ended, scan.pairs, state, strict=True):
                room[number] = pair.weights(x)
            number += 1
    results = [outputs[0] if len(outputs) == 1 else torch.cat(outputs)]
    if options.write:
        results += scan.split(state) + ended
    if options.surprise:
        results.append(torch.cat(surprises))
    return results, kept


def _starts(state: list[torch.Tensor], num_chunks: int) -> list[torch.Tensor]:
    """Room for the pairs at the starts of a span's chunks, the first of them filled."""
    if num_chunks == 1:
        return [x.unsqueeze(0) for x in state]
    # One block a span: an allocator can use it again, which it cannot with one as long as the sequence.
    starts = [x.new_empty(num_chunks, *x.shape) for x in state]
    for slot, x in zip(starts, state, strict=True):
        slot[0] = x
    return starts


def forward_span(inputs: ScanInputs, options: ScanOptions, starts: list[torch.Tensor]):
    """Writes a span's chunks one after another, then reads them all.

    Args:
        inputs, options: of the span.
        starts: per layer (n, G, 2 * narrow, wide): the first chunk's is given, the others are filled in.

    Returns:
        Output (n, G, b_q, D), inner losses (n, G, b) or None, and per layer the pair behind the span.
    """
    scan, num_chunks = Scan(inputs, options), inputs.k.shape[0]
    products = scan.products
    coefficients = scan.coefficients()
    ends, network, kept, losses = Ends.of(coefficients.end), scan.network(1), [], []
    after = [torch.empty_like(slot[0]) for slot in starts] if options.write else [slot[0] for slot in starts]
    states = [[slot[n] for slot in starts] for n in range(num_chunks)] + [after]
    for n in range(num_chunks):
        if n in options.restart_at:
            _restart(scan, inputs.restart[n], states[n])
        weights = [pair.weights(products.operand(x)) for pair, x in zip(scan.pairs, states[n], strict=True)]
        kept.append(inner_gradient(network, weights, inputs.k[n], inputs.v[n]))
        if options.surprise:
            losses.append(inner_losses(network, weights[-1], kept[-1], inputs.v[n]))
        if options.write:
            _update(scan, ends, n, states[n], kept[-1], states[n + 1])
    a, g = (_join_chunks([factors[i] for factors in kept]) for i in (0, 1))
    operands = [products.operand(slot.flatten(0, 1)) for slot in starts]
    terms = ReadTerms.of(scan, inputs, coefficients.read)
    output = read(scan, scan.network(num_chunks), terms, operands, a, g).output
    return output.unflatten(0, (num_chunks, -1)), torch.stack(losses) if options.surprise else None, after


def _join_chunks(per_chunk: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """By chunk, lists of (G, ...) -> a list of (n * G, ...)."""
    return per_chunk[0] if len(per_chunk) == 1 else [torch.cat(chunks) for chunks in zip(*per_chunk, strict=True)]


def _restart(scan: Scan, restart: torch.Tensor, state: list[torch.Tensor]) -> None:
    for start, x in zip(scan.start, state, strict=True):
        x.copy_(torch.where(restart[:, None, None], start, x))


def _update(scan: Scan, ends: Ends, n: int, state: list, factors: Factors, after: list) -> None:
    """Puts the state behind chunk n into ``after``."""
    for layer, (pair, x, x_after) in enumerate(zip(scan.pairs, state, after, strict=True)):
        ends.mix(n, x, x_after)
        left, right = pair.outer(factors.a[layer], factors.g[layer], ends.written[n])
        scan.products.add_(x_after, left.mT, right, alpha=-1)
        if scan.forget_to is not None:
            x_after.chunk(2, -2)[0].addcmul_(scan.forget_to[layer], 1 - ends.c[n])


class ReadTerms(NamedTuple):
    """What a read takes beside the state, chunks and rows in one dimension.

    Attributes:
        q: (n * G, b_q, D).
        coefficients: c and d, (n * G, b_q, 2); these and A have the running memory's share of a mixture in them.
        minus_A: (n * G, b_q, b).
        forget_to: per layer (n * G, D_in, D_out), or None.
        soup: what else a mixture is made of, or None.
    """

    q: torch.Tensor
    coefficients: torch.Tensor
    minus_A: torch.Tensor
    forget_to: list[torch.Tensor] | None
    soup: Soup | None

    @classmethod
    def of(cls, scan: Scan, inputs: ScanInputs, coefficients: ReadCoefficients) -> "ReadTerms":
        soup = None
        if inputs.mix is not None:
            soup, coefficients = Soup.of(inputs, scan.products), own_part(coefficients, inputs.mix[..., 0])
        both = torch.stack([coefficients.c, coefficients.d], -1)
        start = inputs.forget_to
        if start is not None:
            start = [scan.products.operand(w).repeat(inputs.k.shape[0], 1, 1) for w in start]
        return cls(inputs.q.flatten(0, 1), both.flatten(0, 1), coefficients.A.flatten(0, 1).neg(), start, soup)

    @property
    def forgotten(self) -> torch.Tensor:
        """(n * G, b_q, 1)."""
        return (1 if self.soup is None else self.soup.own) - self.coefficients[..., :1]


class Read(NamedTuple):
    """What a read leaves for its adjoint: layer inputs x, scores x a^T, activations, what the pairs kept, LN, M."""

    x: list[torch.Tensor]
    scores: list[torch.Tensor]
    hidden: list[Hidden]
    kept: list[torch.Tensor]
    norm: Normalized | None
    output: torch.Tensor


def read(scan: Scan, network: InnerNetwork, terms: ReadTerms, state, a, g, activate=gelu_alone) -> Read:
    """M_{W_t}(q_t) for all chunks at once: per layer, one product with the state and one masked b_q x b attention."""
    products = scan.products
    x, scores, hidden, kept = [terms.q], [], [], []
    for layer, pair in enumerate(scan.pairs):
        scores.append(products.mm(x[-1], a[layer].mT))
        z, kept_by_pair = pair.apply(products, x[-1], terms.coefficients, state[layer])
        products.add_(z, terms.minus_A * scores[-1], g[layer])
        if terms.forget_to is not None:
            products.add_(z, terms.forgotten * x[-1], terms.forget_to[layer])
        if terms.soup is not None:
            terms.soup.add_to_(products, layer, x[-1], z)
        kept.append(kept_by_pair)
        if layer + 1 < len(scan.pairs):
            hidden.append(activate(z))
            x.append(hidden[-1].value)
    output, norm = output_of(network, terms.q, z)
    return Read(x, scores, hidden, kept, norm, output)
