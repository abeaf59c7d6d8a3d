# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What memory caching is for (arXiv 2602.24281): what later writes have overwritten is still there to be read.

The layers are set up by hand. A token is [query | key | value | 1 | writes | forgets | fresh]: a matrix memory writes
a pair at once where it is told to, keys are orthogonal, and the layer's output is the memory's answer itself.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from caching_testing import F64
from titans_testing import assert_close, tiny_config
from transformers_titans.memory_layer import TitansNeuralMemory


DIM, SEGMENT = 6, 4
ONE, WRITES, FORGETS = 3 * DIM, 3 * DIM + 1, 3 * DIM + 2
# How sharply tokens are compared by a projection, so that the softmax all but picks. A query's length matters there: a
# token's own u is in the running memory's key, so what is kept must have asked for a thing more loudly than it does.
SHARP, LOUD = 60.0, 3.0
# RMSNorm with an epsilon far above the answer's size is a factor, which its scale takes back.
EPS = 1e8
UNIT = torch.eye(DIM, dtype=F64)


def hand_made_layer(**fields) -> TitansNeuralMemory:
    """One head: M(x) = x W, W_0 = 0; a write replaces what was under the key; forgetting halves all there is."""
    config = tiny_config(
        hidden_size=3 * DIM + 3,
        num_attention_heads=1,
        head_dim=2,
        memory_num_heads=1,
        memory_head_dim=DIM,
        memory_depth=1,
        memory_norm=False,
        memory_residual=False,
        memory_momentum=False,
        memory_conv_kernel_size=0,
        memory_chunk_size=1,
        memory_max_lr=1.0,
        memory_max_forget=0.5,
        rms_norm_eps=EPS,
        cache_segment_length=SEGMENT,
        **fields,
    )
    layer = TitansNeuralMemory(config).to(F64)
    for parameter in layer.parameters():
        parameter.data.zero_()
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        getattr(layer, name).weight.data[:, place * DIM : (place + 1) * DIM] = UNIT
    # theta = 1/2 where a token writes: W + k (v - k W). alpha = 1/2 where it forgets. Else both are next to nothing.
    layer.theta_proj.weight.data[0, WRITES], layer.theta_proj.bias.data[:] = 80.0, -80.0
    layer.alpha_proj.weight.data[0, FORGETS], layer.alpha_proj.bias.data[:] = 120.0, -80.0
    layer.o_norm.weight.data[:] = math.sqrt(EPS)
    layer.o_gate_proj.weight.data[:, ONE] = 1.0
    layer.o_proj.weight.data[:DIM] = UNIT / F.silu(torch.ones((), dtype=F64))
    if getattr(layer, "u_proj", None) is not None:
        # Comparing by the query too, but without its unit length.
        layer.u_proj.weight.data[:, :DIM] = SHARP**0.5 * UNIT
    return layer


def token(query=None, key=None, value=None, forgets: bool = False) -> torch.Tensor:
    """(C,): key and value are written if there is a value; queries and keys are made unit vectors by the layer."""
    parts = [torch.zeros(DIM, dtype=F64) if part is None else part for part in (query, key, value)]
    return torch.cat([*parts, torch.tensor([1.0, value is not None, forgets], dtype=F64)])


def answers(layer: TitansNeuralMemory, tokens: list[torch.Tensor]) -> torch.Tensor:
    """(T, DIM) what the memory answers at each token."""
    with torch.no_grad():
        return layer(torch.stack(tokens)[None]).hidden_states[0, :, :DIM]


def recalled(answer: torch.Tensor, value: torch.Tensor) -> float:
    """The share of a value that is in an answer."""
    return ((answer * value).sum() / value.square().sum()).item()


def overwritten_text() -> tuple[list[torch.Tensor], torch.Tensor]:
    """A first segment about one pair alone, four segments of other pairs under strong forgetting, and the question.

    Returns the tokens and the first pair's value, as it is after SiLU.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1 + 4 * SEGMENT, DIM, generator=generator, dtype=F64) + 0.5
    tokens = [token(LOUD * UNIT[0])] * (SEGMENT - 1) + [token(LOUD * UNIT[0], UNIT[0], values[0])]
    for i, value in enumerate(values[1:]):
        key = UNIT[1 + i % (DIM - 1)]
        tokens.append(token(key, key, value, forgets=True))
    return [*tokens, token(UNIT[0])], F.silu(values[0])


def test_the_hand_made_memory_writes_at_once_and_forgets_by_halves():
    values = torch.rand(2, DIM, generator=torch.Generator().manual_seed(0), dtype=F64) + 0.5
    tokens = [token(key=UNIT[0], value=values[0]), token(UNIT[0]), token(key=UNIT[0], value=values[1])]
    actual = answers(hand_made_layer(), [*tokens, token(UNIT[0], forgets=True), token(UNIT[0]), token(UNIT[1])])
    expected = torch.stack([F.silu(values[0]), *[F.silu(values[1]) / 2] * 2, torch.zeros(DIM, dtype=F64)])
    assert_close("answers", actual[[1, 3, 4, 5]], expected, 1e-7)


def test_without_caching_an_early_pair_is_lost():
    tokens, value = overwritten_text()
    assert abs(recalled(answers(hand_made_layer(), tokens)[-1], value)) < 1e-4


CACHING = {
    "residual": {"memory_caching": "residual"},
    "grm": {"memory_caching": "grm"},
    "soup": {"memory_caching": "soup"},
    "ssc": {"memory_caching": "ssc", "cache_top_k": 1},
}


@pytest.mark.parametrize("segmentation", ["constant", "logarithmic"])
@pytest.mark.parametrize("caching", CACHING.values(), ids=CACHING)
def test_with_independent_segments_an_early_pair_is_recalled(caching, segmentation):
    """Constant: its segment was kept. Logarithmic: its block has four segments, in which it is forgotten as well."""
    layer = hand_made_layer(**caching, cache_initialization="independent", cache_segmentation=segmentation)
    tokens, value = overwritten_text()
    answer = answers(layer, tokens)[-1]
    if segmentation == "logarithmic":
        assert abs(recalled(answer, value)) < 1e-2
    else:
        assert recalled(answer, value) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("caching", CACHING.values(), ids=CACHING)
def test_with_checkpoints_an_early_pair_is_recalled(caching):
    """As a sum of all checkpoints, each of which holds what forgetting had left: 1 + 2^-4 + 2^-8 + ..."""
    layer, (tokens, value) = hand_made_layer(**caching), overwritten_text()
    expected = sum(2.0 ** (-SEGMENT * i) for i in range(5)) if caching["memory_caching"] == "residual" else 1.0
    assert recalled(answers(layer, tokens)[-1], value) == pytest.approx(expected, abs=0.01)


def test_an_average_recalls_an_early_pair_by_its_share():
    layer, (tokens, value) = (
        hand_made_layer(memory_caching="average", cache_initialization="independent"),
        overwritten_text(),
    )
    assert recalled(answers(layer, tokens)[-1], value) == pytest.approx(1 / 6, abs=0.01)


def test_a_pair_that_was_written_anew_is_answered_by_the_segment_that_is_asked_for():
    """One key with another value in each segment, whose tokens ask alike: the query decides which value comes back."""
    layer = hand_made_layer(memory_caching="ssc", cache_top_k=1, cache_initialization="independent")
    values = torch.rand(4, DIM, generator=torch.Generator().manual_seed(0), dtype=F64) + 0.5
    tokens = []
    for i in range(4):
        query = LOUD * UNIT[1 + i]
        tokens += [token(query, UNIT[0], values[i])] + [token(query)] * (SEGMENT - 1)
    for i in range(4):
        answer = answers(layer, [*tokens, token(UNIT[0] + UNIT[1 + i])])[-1]
        assert_close(f"value {i}", answer * math.sqrt(2), F.silu(values[i]), 1e-6)


def shares_of_the_kept(layer: TitansNeuralMemory, asked: int) -> torch.Tensor:
    """(4,) what four kept segments contribute to the answer to a query between a common key and segment ``asked``.

    Under the common key segment i keeps the value e_i, and all its tokens have the query e_{i+1}.
    """
    one = torch.zeros((), dtype=F64)
    for _ in range(50):  # SiLU(one) = 1
        one = 1 + torch.exp(-one)
    tokens = []
    for i in range(4):
        tokens += [token(UNIT[1 + i], UNIT[0], one * UNIT[i])] + [token(UNIT[1 + i])] * (SEGMENT - 1)
    answer = answers(layer, [*tokens, token(UNIT[0] + UNIT[1 + asked])])[-1]
    return answer[:4] * math.sqrt(2)


@pytest.mark.parametrize("asked", range(4))
@pytest.mark.parametrize("caching", ["grm", "soup", "ssc"])
def test_gamma_picks_the_segment_that_holds_the_key(caching, asked):
    """Memory Caching, eq. 10 with u = q: gamma is the softmax of 1 / sqrt(2 D) for the segment that is asked for,
    1 / sqrt(D) for the running one, which holds the query itself, and 0 for the others, which ssc leaves out."""
    layer = hand_made_layer(
        memory_caching=caching, connector="query", cache_top_k=1, cache_initialization="independent"
    )
    scores = torch.zeros(5, dtype=F64)
    scores[asked], scores[4] = 1 / math.sqrt(2 * DIM), 1 / math.sqrt(DIM)
    if caching == "ssc":
        scores[[i for i in range(4) if i != asked]] = -math.inf
    shares = shares_of_the_kept(layer, asked)
    assert_close("gamma", shares, scores.softmax(0)[:4], 1e-6)
    assert shares.argmax() == asked


@pytest.mark.parametrize("asked", range(4))
def test_a_sharp_projection_all_but_leaves_the_others_out(asked):
    """With `projection` the length of u is learned, and the softmax becomes a choice."""
    layer = hand_made_layer(memory_caching="grm", cache_initialization="independent")
    # What is common does not count, so that the query fits its segment as well as it fits the running one, itself.
    layer.u_proj.weight.data[0] = 0
    shares = shares_of_the_kept(layer, asked)
    assert shares[asked] == pytest.approx(0.5, abs=1e-6)
    assert shares[[i for i in range(4) if i != asked]].abs().max() < 1e-6


def test_a_dropped_memory_is_lost():
    fields = {"memory_caching": "residual", "cache_initialization": "independent"}
    tokens, value = overwritten_text()
    kept, dropped = (answers(hand_made_layer(**fields, cache_max_segments=most), tokens)[-1] for most in (5, 4))
    assert recalled(kept, value) == pytest.approx(1, abs=0.01)
    assert abs(recalled(dropped, value)) < 1e-3
