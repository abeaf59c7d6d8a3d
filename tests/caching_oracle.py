# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The oracle of memory caching: a neural memory that keeps what it was, token by token (arXiv 2602.24281, section 3).

One document, without padding, in the parameters' own dtype (float64 in the tests). Kept memories are a list, each of
them is read by itself, and what a block of tokens comes to is computed by reading the block's tokens. Nothing comes
from the package under test.

Letters: T tokens, C hidden size, H heads, D head dimension, N memories that a token reads, n complete segments.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from titans_testing import inner_loss_and_gradient, memory_network
from variant_oracle import Block, DocumentMemory, linear


# Aggregations in which a token is compared with the memories' keys.
ROUTED = ("grm", "soup", "ssc")


class Member(NamedTuple):
    """A memory that is read: its layers' weights (H, D_in, D_out), and its key (H, D), the mean of its tokens' u."""

    weights: list[torch.Tensor]
    key: torch.Tensor


class Writer:
    """One memory that reads tokens (Titans, eq. 13-16); the first one begins a chunk.

    Args:
        weights, momentum: (W, S) before the first token.
        chunk_size: tokens whose inner gradients are taken at the same weights.
        forget_to: the weights that forgetting leads to; None: to zero.
        network: norm_weight, norm_bias, residual of `memory_network`.
        rule: as `memory_rule`.
    """

    def __init__(self, weights, momentum, chunk_size: int, forget_to, network: dict[str, Any], rule: str):
        self.weights, self.momentum, self.rule = list(weights), list(momentum), rule
        self.chunk_size, self.forget_to, self.network = chunk_size, forget_to, network
        self.count, self.anchor = 0, []

    def write(self, k, v, theta, alpha, eta) -> None:
        """k, v (H, D); theta, alpha, eta (H,)."""
        if self.count % self.chunk_size == 0:
            # Copies: keys and values may come from a reading of these very weights (MAC), and are given all the same.
            self.anchor = [w.clone() for w in self.weights]
        self.count += 1
        _, gradient = inner_loss_and_gradient(k, v, self.anchor, self.rule, **self.network)
        theta, alpha, eta = (gate[:, None, None] for gate in (theta, alpha, eta))
        for layer, u in enumerate(gradient):
            added = eta * self.momentum[layer] - theta * u
            # A window of two tokens (Memory Caching, eq. 28): what is carried on is the last pair as it is.
            self.momentum[layer] = -u if self.rule == "swla" else added
            kept = (1 - alpha) * self.weights[layer]
            if self.forget_to is not None:
                kept = kept + alpha * self.forget_to[layer]
            self.weights[layer] = kept + added


def blocks_of(num_segments: int, segmentation: str) -> list[tuple[int, int]]:
    """The blocks [first, end) of complete segments whose memories are kept, oldest first.

    "logarithmic": the binary expansion of their number, largest first; "constant": each segment by itself.
    """
    if segmentation == "constant":
        return [(i, i + 1) for i in range(num_segments)]
    blocks, begin = [], 0
    for level in reversed(range(num_segments.bit_length())):
        if num_segments >> level & 1:
            blocks.append((begin, begin + 2**level))
            begin += 2**level
    return blocks


def mean(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(vectors) / len(vectors)


class CachingMemory(DocumentMemory):
    """A layer's neural memory with memory caching while it reads one document; see `DocumentMemory`.

    Attributes:
        kept: the memories that the next token reads beside the running one, oldest first.
        running: the running memory.
        completed: n.
    """

    def __init__(self, parameters, config, prefix: torch.Tensor | None):
        super().__init__(parameters, config, prefix)
        # What every document starts from: the persistent tokens have been read and belong to no segment.
        self.beginning = (self.weights, self.momentum)
        self.running, self.completed = self._new_writer(), 0
        self.kept: list[Member] = []
        self.tokens: list[tuple[torch.Tensor, ...]] = []
        self.u: list[torch.Tensor] = []
        # The running memory's weights at each segment's end, and the blocks that were read already.
        self.ends: list[list[torch.Tensor]] = []
        self.blocks: dict[tuple[int, int], Member] = {}

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Writes and reads T tokens (T, C), the first of which begins a chunk; returns (T, C)."""
        q, k, v = self._project(x)
        theta, alpha, eta = self._gates(x, self.config.memory_chunk_size)
        u = self._connect(x, q)
        answers = []
        for t in range(len(x)):
            token = (k[t], v[t], theta[t], alpha[t], eta[t])
            self.tokens.append(token)
            self.u.append(u[t])
            self.running.write(*token)
            answers.append(self._aggregate(q[t], u[t], self.kept, self._running_member()))
            if len(self.tokens) % self.config.cache_segment_length == 0:
                self._complete_segment()
        return self._answer(torch.stack(answers), x)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Asks the memories as they stand, (T, C) -> (T, C); an empty running one only if there is no other."""
        q = self._ask(x)
        u = self._connect(x, q)
        running = self._running_member() if self._running_u() or not self.kept else None
        answers = [self._aggregate(q[t], u[t], self.kept, running) for t in range(len(x))]
        return self._answer(torch.stack(answers), x)

    def _new_writer(self) -> Writer:
        forget_to = self.start if self.config.memory_forget_to == "start" else None
        return Writer(
            *self.beginning, self.config.memory_chunk_size, forget_to, self._network(), self.config.memory_rule
        )

    def _connect(self, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """u (T, H, D) of tokens (T, C) with these queries. Memory Caching, eq. 10."""
        if self.config.memory_caching in ROUTED and self.config.connector == "projection":
            return self._heads(linear(self.parameters, "u_proj", x))
        return q

    def _running_u(self) -> list[torch.Tensor]:
        return self.u[self.completed * self.config.cache_segment_length :]

    def _running_member(self) -> Member:
        vectors = self._running_u()
        # Without a token it is read alone or not at all, and its key does not matter.
        nothing = self.start[0].new_zeros(self.config.memory_num_heads, self.config.memory_head_dim)
        return Member(list(self.running.weights), mean(vectors) if vectors else nothing)

    def _complete_segment(self) -> None:
        self.completed += 1
        self.ends.append(list(self.running.weights))
        kept = [self._block(*block) for block in blocks_of(self.completed, self.config.cache_segmentation)]
        most = self.config.cache_max_segments
        self.kept = kept if most is None else kept[-most:]
        if self.config.cache_initialization == "independent":
            self.running = self._new_writer()

    def _block(self, first: int, end: int) -> Member:
        """What is kept of the segments first..end-1."""
        if (first, end) not in self.blocks:
            length = self.config.cache_segment_length
            tokens = slice(first * length, end * length)
            weights = self.ends[end - 1]
            if self.config.cache_initialization == "independent":
                writer = self._new_writer()
                for token in self.tokens[tokens]:
                    writer.write(*token)
                weights = writer.weights
            self.blocks[first, end] = Member(weights, mean(self.u[tokens]))
        return self.blocks[first, end]

    def _aggregate(self, q: torch.Tensor, u: torch.Tensor, kept: list[Member], running: Member | None) -> torch.Tensor:
        """The answer (H, D) to q (H, D), asked by a token with u (H, D). Memory Caching, eq. 7-17."""
        members = [*kept, running] if running is not None else list(kept)
        network, how = self._network(), self.config.memory_caching
        if how == "soup":
            gamma = self._gamma(u, members, [[True] * len(members)] * len(u))
            mixed = [torch.zeros_like(w) for w in members[0].weights]
            for i, member in enumerate(members):
                mixed = [m + gamma[i][:, None, None] * w for m, w in zip(mixed, member.weights, strict=True)]
            return memory_network(q, mixed, **network)
        answers = [memory_network(q, member.weights, **network) for member in members]
        if how == "residual":
            return sum(answers)
        if how == "average":
            return sum(answers) / len(answers)
        allowed = [[True] * len(members)] * len(u)
        if how == "ssc":
            allowed = [self._selected(u, head, kept, running is not None) for head in range(len(u))]
        gamma = self._gamma(u, members, allowed)
        return sum(gamma[i][:, None] * answer for i, answer in enumerate(answers))

    def _score(self, u: torch.Tensor, member: Member, head: int) -> torch.Tensor:
        return (u[head] * member.key[head]).sum() / math.sqrt(self.config.memory_head_dim)

    def _selected(self, u: torch.Tensor, head: int, kept: list[Member], has_running: bool) -> list[bool]:
        """Which ones a head reads: the running one, and the kept ones of the highest scores, the later of equals."""
        scores = [round(self._score(u, member, head).item(), 12) for member in kept]
        best = sorted(range(len(kept)), key=lambda i: (scores[i], i), reverse=True)[: self.config.cache_top_k]
        return [i in best for i in range(len(kept))] + [True] * has_running

    def _gamma(self, u: torch.Tensor, members: list[Member], allowed: list[list[bool]]) -> list[torch.Tensor]:
        """A share (H,) for each member: per head the softmax over the allowed ones, zero for others."""
        shares = [[u.new_zeros(()) for _ in u] for _ in members]
        for head, may in enumerate(allowed):
            chosen = [i for i in range(len(members)) if may[i]]
            values = torch.softmax(torch.stack([self._score(u, members[i], head) for i in chosen]), 0)
            for i, value in zip(chosen, values, strict=True):
                shares[i][head] = value
        return [torch.stack(share) for share in shares]


class CachingBlock(Block):
    """For `variant_oracle.oracle_logits`: a layer whose memory keeps what it was."""

    memory_class = CachingMemory


def oracle_layer(layer, hidden_states: torch.Tensor, prefix_states: torch.Tensor | None = None) -> torch.Tensor:
    """What a `TitansNeuralMemory` gives for one document.

    Args:
        layer: the layer, for its configuration and parameters, in which the result is differentiable.
        hidden_states: (T, C), no token of which is masked.
        prefix_states: (N_p, C) persistent tokens that the memory reads first, or None.

    Returns:
        (T, C)
    """
    memory = DocumentMemory if layer.config.memory_caching is None else CachingMemory
    return memory(dict(layer.named_parameters()), layer.config, prefix_states).run(hidden_states)
