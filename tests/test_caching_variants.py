# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory caching in each architecture: whole models against the oracle, in logits and every gradient."""

import pytest
import torch

from caching_oracle import CachingBlock
from caching_testing import AGGREGATIONS, F64, WAYS, every_way, weights_of
from titans_testing import TOLERANCE, assert_close, logits_of, parameter_gradients, random_ids
from variant_oracle import VARIANTS, oracle_logits, variant_model


# Those of `variant_oracle.VARIANTS`.
CHUNK, SEGMENT = 4, 8
GRM, SOUP, SSC = (AGGREGATIONS[f"{name}_projection"] for name in ("grm", "soup", "ssc"))

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def caching_model(variant: str, *cases: dict, **fields):
    """A model whose memories keep what they were at the end of each chunk of four tokens, unless told otherwise."""
    merged = {"cache_segment_length": CHUNK}
    for case in (*cases, fields):
        merged |= case
    return variant_model(variant, dtype=F64, **merged).train()


def assert_equals_oracle(model, ids: torch.Tensor, documents=None, **kwargs) -> None:
    """Logits and every parameter's gradient of rows (B, T), each of which has these documents."""
    logits = model(ids, **kwargs).logits
    expected = torch.stack([oracle_logits(model, row, documents, CachingBlock) for row in ids])
    assert_close("logits", logits, expected, TOLERANCE[F64])
    weights, parameters = weights_of(logits.shape), dict(model.named_parameters())
    reference = torch.autograd.grad(
        (weights * expected).sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    gradients = parameter_gradients(model, (weights * logits).sum())
    assert gradients.keys() == parameters.keys()
    for name, gradient in zip(parameters, reference, strict=True):
        assert_close(name, gradients[name], gradient, TOLERANCE[F64])


@every_way
@pytest.mark.parametrize("variant", ["lmm", "mal", "mag"])
def test_equals_the_oracle_in_each_variant(variant, way):
    assert_equals_oracle(caching_model(variant, SOUP, way), random_ids(2, 3 * CHUNK + 2))


# Every aggregation in every way, and each connector in half of them: what is compared is not the way's concern.
IN_TURN = [
    (name, way)
    for way, connector in zip(WAYS, ["projection", "query"] * 2, strict=True)
    for name in ("residual", "average", f"grm_{connector}", f"soup_{connector}", f"ssc_{connector}")
]


@pytest.mark.parametrize(("name", "way"), IN_TURN)
def test_mac_equals_the_oracle(name, way):
    """h asks the memories that were kept by its segment's start, y those that are kept by then."""
    model = caching_model("mac", AGGREGATIONS[name], WAYS[way], num_hidden_layers=1)
    assert_equals_oracle(model, random_ids(1, 3 * SEGMENT + 3))


# (MAC's segment, caching's): the same, shorter and longer, ending together, now and then, and never within the text.
LENGTHS = [(8, 8), (8, 4), (4, 8), (8, 16), (8, 12), (12, 8), (4, 12), (8, 40), (40, 8)]


@pytest.mark.parametrize(("attended", "kept"), LENGTHS, ids=[f"mac{m}_caching{c}" for m, c in LENGTHS])
@pytest.mark.parametrize(
    ("aggregation", "initialization"), [(GRM, "checkpoint"), (SSC, "independent")], ids=["grm", "ssc"]
)
def test_mac_equals_the_oracle_for_both_lengths(aggregation, initialization, attended, kept):
    """Where a caching segment is open at a segment's start, h asks the running memory too."""
    model = caching_model(
        "mac",
        aggregation,
        cache_initialization=initialization,
        segment_length=attended,
        cache_segment_length=kept,
        num_hidden_layers=1,
    )
    assert_equals_oracle(model, random_ids(1, 29))


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("initialization", ["checkpoint", "independent"])
def test_mac_drops_the_oldest_memories(initialization, most):
    model = caching_model(
        "mac", GRM, cache_initialization=initialization, cache_max_segments=most, num_hidden_layers=1
    )
    assert_equals_oracle(model, random_ids(1, 3 * SEGMENT + 3))


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT], ids="T{}".format)
@every_variant
def test_equals_the_oracle_at_each_length(variant, length):
    way = WAYS["logarithmic_independent"]
    assert_equals_oracle(caching_model(variant, SSC, way, num_hidden_layers=1), random_ids(2, length))


DOCUMENTS = [5, 1, 14, 9]


@pytest.mark.parametrize("way", ["constant_independent", "logarithmic_checkpoint"])
@pytest.mark.parametrize("aggregation", [GRM, SOUP, SSC], ids=["grm", "soup", "ssc"])
@every_variant
def test_packed_documents_equal_the_oracle(variant, aggregation, way):
    """A document knows nothing of what the one before it has kept, and counts its own segments."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    model = caching_model(variant, aggregation, WAYS[way], num_hidden_layers=1)
    assert_equals_oracle(model, random_ids(1, sum(DOCUMENTS)), DOCUMENTS, position_ids=positions)


@pytest.mark.parametrize("way", ["constant_checkpoint", "logarithmic_independent"])
@pytest.mark.parametrize("aggregation", [GRM, SOUP, SSC], ids=["grm", "soup", "ssc"])
@every_variant
def test_masked_rows_equal_the_oracle_on_their_real_tokens(variant, aggregation, way):
    model = caching_model(variant, aggregation, WAYS[way], num_hidden_layers=1)
    ids, mask = random_ids(4, 21), torch.ones(4, 21, dtype=torch.long)
    mask[0, :6] = mask[1, 15:] = mask[2, [2, 3, 9, 17]] = mask[3, 1:20] = 0
    logits = logits_of(model, ids, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        with torch.no_grad():
            expected = oracle_logits(model, ids[row, real], block=CachingBlock)
        assert_close(f"row {row}", logits[row, real], expected, TOLERANCE[F64])


@every_way
@every_variant
def test_no_logit_moves_before_the_token_that_changes(variant, way):
    model, length = caching_model(variant, SSC, way, num_hidden_layers=1), 3 * SEGMENT + 1
    ids = random_ids(1, length).repeat(length, 1)
    changed = ids.clone()
    changed[torch.arange(length), torch.arange(length)] = (ids[0] - 3 + 7) % 61 + 3
    moved = (logits_of(model, changed) - logits_of(model, ids)).abs().amax(-1)
    for j in range(length):
        assert not moved[j, :j].gt(1e-13).any(), j
        assert moved[j, j] > 1e-6, j


@every_way
def test_mac_in_its_first_segment_is_mac_without_caching(way):
    model, ids = caching_model("mac", GRM, way, cache_segment_length=SEGMENT), random_ids(2, SEGMENT)
    plain = variant_model("mac", dtype=F64)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert_close("logits", logits_of(model, ids), logits_of(plain, ids), TOLERANCE[F64])
