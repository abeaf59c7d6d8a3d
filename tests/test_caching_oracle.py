# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The oracle of memory caching against a memory so small that it can be worked out with numbers alone.

One head, a matrix memory without norm and residual whose keys and queries are all e_0: only W[0, 0] ever matters, a
number w that each token moves towards its value.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from caching_oracle import CachingMemory, blocks_of


F64 = torch.float64
DIM, SEGMENT, LENGTH, W0 = 4, 2, 15, 0.4
# What the gates are for every token, and the value and the connector that the persistent token has.
THETA, ALPHA, ETA = 0.25, 0.1, 0.5
PREFIX = (0.7, -1.0)

VALUES = [math.sin(1.7 * t) + 0.2 for t in range(LENGTH)]
CONNECTORS = [math.cos(2.3 * t) for t in range(LENGTH)]


def config_of(**fields):
    return SimpleNamespace(
        memory_num_heads=1,
        memory_head_dim=DIM,
        memory_depth=1,
        memory_rule="titans",
        memory_chunk_size=1,
        memory_residual=False,
        memory_forget_to="zero",
        memory_gate_granularity="token",
        memory_max_lr=2 * THETA,
        memory_max_forget=2 * ALPHA,
        connector="projection",
        cache_segment_length=SEGMENT,
        cache_top_k=2,
        cache_max_segments=None,
        **fields,
    )


def parameters_of() -> dict[str, torch.Tensor]:
    """Tokens are (1, value, connector)."""
    to_key, to_value, to_u = (torch.zeros(DIM, 3, dtype=F64) for _ in range(3))
    to_key[0, 0] = to_value[0, 1] = 1
    to_u[:, 2] = 1
    start = torch.zeros(1, DIM, DIM, dtype=F64)
    start[0, 0, 0] = W0
    gates = {f"{name}_proj.weight": torch.zeros(1, 3, dtype=F64) for name in ("theta", "alpha", "eta")}
    gates |= {f"{name}_proj.bias": torch.zeros(1, dtype=F64) for name in ("theta", "alpha", "eta")}
    projections = {"q_proj": to_key, "k_proj": to_key, "v_proj": to_value, "u_proj": to_u}
    return gates | {f"{name}.weight": w for name, w in projections.items()} | {"start_weights.0": start}


class BareMemory(CachingMemory):
    """Gives the memories' answers as they are."""

    def _answer(self, answers, x):
        return answers[:, 0, 0]


def tokens_of(values, connectors) -> torch.Tensor:
    return torch.tensor([[1.0, v, u] for v, u in zip(values, connectors, strict=True)], dtype=F64)


def step(w: float, s: float, value: float) -> tuple[float, float]:
    """(w, s) after a token; values go through SiLU on their way."""
    s = ETA * s - THETA * 2 * (w - value / (1 + math.exp(-value)))
    return (1 - ALPHA) * w + s, s


def read_tokens(w: float, s: float, values) -> tuple[float, float]:
    for value in values:
        w, s = step(w, s, value)
    return w, s


def expected_answers(aggregation: str, initialization: str, segmentation: str) -> list[float]:
    """Each token's answer from numbers: the members, (w, key) each, are found anew for every token."""
    begin, answers = step(W0, 0.0, PREFIX[0]), []
    for t in range(LENGTH):
        complete = t // SEGMENT * SEGMENT
        if segmentation == "constant":
            cuts = list(range(0, complete + 1, SEGMENT))
        else:
            cuts, bits = [0], bin(complete // SEGMENT)[2:]
            for i, bit in enumerate(bits):
                cuts += [cuts[-1] + SEGMENT * 2 ** (len(bits) - 1 - i)] * (bit == "1")
        members = []
        for a, b in [*zip(cuts, cuts[1:], strict=False), (complete, t + 1)]:
            first = a if initialization == "independent" else 0
            members.append((read_tokens(*begin, VALUES[first:b])[0], sum(CONNECTORS[a:b]) / (b - a)))
        scores = [DIM * CONNECTORS[t] * key / math.sqrt(DIM) for _, key in members]
        if aggregation == "residual":
            shares = [1.0] * len(members)
        elif aggregation == "average":
            shares = [1 / len(members)] * len(members)
        else:
            best = sorted(scores[:-1])[-2:] if aggregation == "ssc" else scores[:-1]
            sizes = [math.exp(r) * (r in best) for r in scores[:-1]] + [math.exp(scores[-1])]
            shares = [size / sum(sizes) for size in sizes]
        answers.append(sum(share * w for share, (w, _) in zip(shares, members, strict=True)))
    return answers


@pytest.mark.parametrize("aggregation", ["residual", "average", "grm", "soup", "ssc"])
@pytest.mark.parametrize("segmentation", ["constant", "logarithmic"])
@pytest.mark.parametrize("initialization", ["checkpoint", "independent"])
def test_equals_the_numbers(aggregation, segmentation, initialization):
    config = config_of(
        memory_caching=aggregation, cache_segmentation=segmentation, cache_initialization=initialization
    )
    memory = BareMemory(parameters_of(), config, tokens_of(*([x] for x in PREFIX)))
    answers = memory.run(tokens_of(VALUES, CONNECTORS))
    expected = torch.tensor(expected_answers(aggregation, initialization, segmentation), dtype=F64)
    torch.testing.assert_close(answers, expected, rtol=1e-12, atol=1e-12)


def test_reads_without_writing_ask_the_memories_as_they_stand():
    """MAC's h: beside kept memories the running one only if it has a token; without any, the running one alone."""
    config = config_of(memory_caching="residual", cache_segmentation="constant", cache_initialization="independent")
    begin = step(W0, 0.0, PREFIX[0])
    memory, question = BareMemory(parameters_of(), config, tokens_of(*([x] for x in PREFIX))), tokens_of([5], [5])
    kept = []
    for t in range(2 * SEGMENT + 1):
        running = [read_tokens(*begin, VALUES[t // SEGMENT * SEGMENT : t])[0]] if t % SEGMENT or not kept else []
        assert memory.read(question).item() == pytest.approx(sum(kept + running), rel=1e-12), t
        memory.run(tokens_of(VALUES[t : t + 1], CONNECTORS[t : t + 1]))
        if (t + 1) % SEGMENT == 0:
            kept.append(read_tokens(*begin, VALUES[t + 1 - SEGMENT : t + 1])[0])


def test_logarithmic_blocks_are_a_binary_expansion():
    assert blocks_of(37, "logarithmic") == [(0, 32), (32, 36), (36, 37)]
    assert blocks_of(8, "logarithmic") == [(0, 8)]
    assert blocks_of(7, "logarithmic") == [(0, 4), (4, 6), (6, 7)]
    assert blocks_of(0, "logarithmic") == blocks_of(0, "constant") == []
    assert blocks_of(3, "constant") == [(0, 1), (1, 2), (2, 3)]
