# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules by which a memory learns beside Titans' own: what they compute, written out, and models that have them.

The op is held against the oracle for each of them in `test_memory_ops.py` too; here against formulas without chunks.
"""

import pytest
import torch

from test_memory_ops import DOCUMENTS, MASKS, assert_equals_oracle, assert_same, both_backends, run_in_pieces
from titans_testing import (
    MATRIX_MEMORY,
    RULES,
    TOLERANCE,
    assert_close,
    input_gradients,
    logits_of,
    make_inputs,
    memory_network,
    parameter_gradients,
    random_ids,
    result_tensors,
    run_op,
    run_oracle,
    tiny_config,
    tiny_model,
)
from transformers_titans import TitansCache, TitansForCausalLM
from transformers_titans.memory_layer import TitansNeuralMemory
from transformers_titans.memory_ops import neural_memory
from variant_oracle import VARIANTS, variant_model


F64 = torch.float64
every_rule = pytest.mark.parametrize("rule", RULES)
matrix_rules = pytest.mark.parametrize("rule", ["linear_attention", "swla"])

CALLS = {
    "no_whole_chunk": {"chunk_size": 8, "length": 3, "count": 2},
    "many_chunks": {"chunk_size": 2, "length": 41, "count": 1},
    "closes_the_chunk": {"chunk_size": 8, "length": 1, "count": 7},
    "chunk1": {"chunk_size": 1, "length": 7},
    "ragged": {"count": [0, 3, 1], "batch": 3, "length": 6},
    "ragged_open": {"count": [1, 2], "length": 1},
    "padded": {"mask": MASKS["mixed"], "count": [1, 2]},
    "packed": {"mask": DOCUMENTS["around_gaps"][0], "document_starts": DOCUMENTS["around_gaps"][1], "count": [2, 1]},
    "every_token_a_document": {"document_starts": DOCUMENTS["every_token"][1]},
}


@every_rule
@pytest.mark.parametrize("call", CALLS)
def test_equals_oracle(rule, call):
    assert_equals_oracle(make_inputs(**CALLS[call], **RULES[rule]))


@every_rule
@both_backends
@pytest.mark.parametrize("rows", ["alike", "ragged"])
def test_split_at_every_point(backend, rule, rows):
    options = {"count": 2} if rows == "alike" else {"count": [1, 3], "mask": MASKS["interior"]}
    inputs = make_inputs(length=13, **options, **RULES[rule]).require_grad()
    expected = result_tensors(run_op(inputs, backend), 4)
    gradients = input_gradients(expected, inputs)
    for cut in range(1, 13):
        actual = result_tensors(run_in_pieces(inputs, [0, cut, 13], backend), 4)
        assert_same(actual, expected, 1e-10)
        assert_same(input_gradients(actual, inputs), gradients, 1e-10)


@every_rule
@pytest.mark.parametrize("pieces", [[1] * 13, [3, 2, 1, 4, 1, 2]], ids=["single_tokens", "few_tokens"])
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("rows", ["alike", "ragged", "ragged_chunk_gates"])
def test_decoding_equals_oracle(rule, rows, forgets, pieces):
    """Without a graph, what open chunks come to is kept; made anew from their tokens it is the same."""
    options = {"gate_granularity": "chunk"} if rows == "ragged_chunk_gates" else {}
    options |= {"count": 2} if rows == "alike" else {"count": [1, 3], "mask": MASKS["mixed"]}
    inputs = make_inputs(length=13, **options, forget_to="start" if forgets else "zero", **RULES[rule])
    cuts = [0, *torch.tensor(pieces).cumsum(0).tolist()]
    with torch.no_grad():
        actual = run_in_pieces(inputs, cuts)
        losses = run_op(inputs.columns(0, 1), output_surprise=True).surprise
    expected = run_oracle(inputs)
    assert_close("surprise", losses, expected.pop("surprise")[:, :1], TOLERANCE[F64])
    assert_same(result_tensors(actual, 4), expected, TOLERANCE[F64])
    if pieces == [1] * 13:
        whole = run_op(inputs.columns(0, 12)).state
        with torch.no_grad():
            kept = run_in_pieces(inputs.columns(0, 12), cuts[:-1]).state
        assert kept.chunk is not None and whole.chunk is None


def swla_written_out(inputs) -> torch.Tensor:
    """Memory Caching, eq. 28: the state is a sum over all pairs, and nobody knows of chunks. One row, no pads."""
    q, k, v, own, forget, past = (inputs.tokens[name][0] for name in ("q", "k", "v", "theta", "alpha", "eta"))
    pairs = [inputs.momentum[0][0], *torch.einsum("thi,tho->thio", k, v)]
    weights, outputs = inputs.weights[0][0], []
    for t in range(len(q)):
        gate = [g[t][:, None, None] for g in (own, forget, past)]
        weights = (1 - gate[1]) * weights + gate[2] * pairs[t] + gate[0] * pairs[t + 1]
        outputs.append(torch.einsum("hi,hio->ho", q[t], weights))
    return torch.stack(outputs)[None]


@both_backends
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 32], ids="C{}".format)
def test_swla_takes_the_pair_before_across_chunks_and_calls(backend, chunk_size):
    inputs = make_inputs(batch=1, length=17, chunk_size=chunk_size, **RULES["swla"])
    expected = swla_written_out(inputs)
    assert_close("one call", run_op(inputs, backend).output, expected, TOLERANCE[F64])
    with torch.no_grad():
        for cuts in ([0, 2, 3, 6, 11, 17], list(range(18))):
            assert_close(str(cuts), run_in_pieces(inputs, cuts, backend).output, expected, TOLERANCE[F64])
    # Each pair but the last is written twice, however the chunks lie.
    last = inputs.tokens["k"][:, -1, :, :, None] * inputs.tokens["v"][:, -1, :, None, :]
    closed = run_op(make_inputs(batch=1, length=17, chunk_size=17, **RULES["swla"]), backend).state.momentum[0]
    assert_close("momentum", closed, last, TOLERANCE[F64])


@both_backends
def test_swla_without_the_token_before_is_linear_attention_with_forgetting(backend):
    inputs = make_inputs(length=14, count=2, **RULES["swla"])
    inputs.pending = (*inputs.pending[:4], torch.zeros_like(inputs.pending[4]))
    inputs.tokens["eta"] = torch.zeros_like(inputs.tokens["eta"])
    inputs.momentum = tuple(torch.zeros_like(s) for s in inputs.momentum)
    alone = run_op(inputs, backend)
    gated = run_op(inputs, backend, rule="linear_attention")
    assert_close("output", alone.output, gated.output, TOLERANCE[F64])
    assert_close("weights", alone.state.weights[0], gated.state.weights[0], TOLERANCE[F64])


@both_backends
@pytest.mark.parametrize("chunk_size", [1, 4, 16], ids="C{}".format)
def test_linear_attention_is_a_masked_product(backend, chunk_size):
    inputs = make_inputs(length=13, chunk_size=chunk_size, **RULES["linear_attention"])
    inputs.momentum = tuple(torch.zeros_like(s) for s in inputs.momentum)
    for name, value in (("theta", 1.0), ("alpha", 0.0), ("eta", 0.0)):
        inputs.tokens[name] = torch.full_like(inputs.tokens[name], value)
    q, k, v = (inputs.tokens[name].transpose(1, 2) for name in "qkv")
    expected = (q @ k.mT).tril() @ v + q @ inputs.weights[0]
    assert_close("output", run_op(inputs, backend).output, expected.transpose(1, 2), TOLERANCE[F64])


@both_backends
@pytest.mark.parametrize("network", [{}, {"norm": False}, {"depth": 3}, {"residual": False}], ids=str)
def test_dla_raises_the_product_of_a_written_pair(backend, network):
    """A step down the gradient of -<M(k), v>, in every row and head, and its surprise is that loss."""
    inputs = make_inputs(length=1, chunk_size=1, head_dim=8, rule="dla", **network)
    inputs.momentum = tuple(torch.zeros_like(s) for s in inputs.momentum)
    for name, value in (("theta", 0.01), ("alpha", 0.0), ("eta", 0.0)):
        inputs.tokens[name] = torch.full_like(inputs.tokens[name], value)
    inputs.tokens["q"] = inputs.tokens["k"]
    k, v = inputs.tokens["k"][:, 0], inputs.tokens["v"][:, 0]
    before = torch.stack(
        [memory_network(k[row], [w[row] for w in inputs.weights], **inputs.network()) for row in range(2)]
    )
    result = run_op(inputs, backend, output_surprise=True)
    assert_close("surprise", result.surprise[:, 0], -(before * v).sum(-1), TOLERANCE[F64])
    assert ((result.output[:, 0] * v).sum(-1) > (before * v).sum(-1)).all()


@matrix_rules
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 2}, "a state of depth 1, a matrix, got depth 2"),
        ({"residual": True}, "residual=False, got True"),
        ({"norm": True}, r"norm_weight=None, got a tensor \(2, 5\)"),
    ],
    ids=str,
)
def test_what_a_matrix_memory_needs_is_named(rule, change, message):
    with pytest.raises(ValueError, match=f"rule '{rule}' needs {message}"):
        run_op(make_inputs(**(RULES[rule] | change)))
    assert neural_memory.__doc__.count(f'"{rule}"')


FIELDS = {rule: {"memory_rule": rule} | ({} if rule == "dla" else MATRIX_MEMORY) for rule in RULES}
small_models = pytest.mark.parametrize("variant", ["lmm", "mac"])


@pytest.mark.parametrize(
    ("rule", "switches", "gates"),
    [
        ("dla", {}, "theta"),
        ("linear_attention", {}, ""),
        ("swla", {}, "theta alpha eta"),
        ("swla", {"memory_momentum": False}, "theta alpha"),
        ("swla", {"memory_forgetting": False}, "theta eta"),
    ],
    ids=str,
)
def test_a_layer_has_the_gates_of_its_rule(rule, switches, gates):
    layer = TitansNeuralMemory(tiny_config(**FIELDS[rule], **switches, memory_max_lr=0.25))
    names = {name.split("_proj")[0] for name, _ in layer.named_parameters() if name.split("_proj")[0] in ALL_GATES}
    assert names == set(gates.split())
    values = dict(zip(ALL_GATES, layer._gates(torch.randn(2, 5, 32)), strict=True))
    limits = {"theta": 0.25, "alpha": 0.5, "eta": 0.25}
    for name, gate in values.items():
        assert gate.shape == (2, 5, 2) and gate.dtype == torch.float32
        if name in gates.split():
            assert (gate > 0).all() and (gate < limits[name]).all(), name
        else:
            assert (gate == (1.0 if name == "theta" and not gates else 0.0)).all(), name


ALL_GATES = ("theta", "alpha", "eta")


@every_rule
def test_a_sum_of_pairs_starts_empty(rule):
    """Of a fresh model a matrix memory knows nothing; what it knows before a text can be learned all the same."""
    start = TitansForCausalLM(tiny_config(**FIELDS[rule])).model.layers[0].memory.start_weights()
    assert all(w.requires_grad for w in start)
    assert all(w.any() == (rule == "dla") for w in start)


@every_rule
@small_models
def test_a_step_of_training_lowers_the_loss(rule, variant):
    model = variant_model(variant, **FIELDS[rule]).train()
    ids = random_ids(2, 23)
    loss = model(ids, labels=ids).loss
    gradients = parameter_gradients(model, loss)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.isfinite(gradients[name]).all() and gradients[name].any(), name
            parameter -= 1e-3 * gradients[name] / gradients[name].norm()
    assert model(ids, labels=ids).loss < loss


@every_rule
@small_models
def test_generates_with_a_cache_as_without(rule, variant):
    model, ids = variant_model(variant, **FIELDS[rule]), random_ids(2, 6)
    options = {"max_new_tokens": 19, "do_sample": False, "eos_token_id": None}
    generated = model.generate(ids, **options)
    assert torch.equal(generated, model.generate(ids, use_cache=False, **options))


@every_rule
@small_models
def test_saves_and_loads_with_its_cache(rule, variant, tmp_path):
    model, ids = variant_model(variant, **FIELDS[rule]), random_ids(2, 11)
    model.save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.memory_rule == rule
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    cache = TitansCache(model.config)
    logits_of(model, ids, cache=cache)
    logits_of(model, random_ids(2, 2, seed=2), cache=cache)
    cache.save_pretrained(tmp_path / "cache")
    restored = TitansCache.from_pretrained(tmp_path / "cache", loaded.config)
    later = random_ids(2, 7, seed=1)
    assert torch.equal(logits_of(loaded, later, cache=restored), logits_of(model, later, cache=cache))
    with pytest.raises(ValueError, match="memory_"):
        TitansCache.from_pretrained(tmp_path / "cache", tiny_config(**VARIANTS[variant]))


@every_rule
@small_models
def test_a_padded_row_equals_the_row_alone(rule, variant):
    model, ids = variant_model(variant, dtype=F64, **FIELDS[rule]), random_ids(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[1, 15:] = mask[2, [2, 3, 9, 17]] = 0
    cache, pieces = TitansCache(model.config), []
    for at in (slice(0, 9), *(slice(t, t + 1) for t in range(9, 21))):
        pieces.append(logits_of(model, ids[:, at], attention_mask=mask[:, at], cache=cache))
    for logits in (logits_of(model, ids, attention_mask=mask), torch.cat(pieces, 1)):
        for row, real in enumerate(mask.bool()):
            alone = logits_of(model, ids[row : row + 1, real])
            assert_close(f"row {row}", logits[row : row + 1, real], alone, TOLERANCE[F64])


def test_linear_attention_has_no_use_for_gates():
    """Fields of gates that a rule has not change nothing."""
    ids = random_ids(2, 9)
    expected = logits_of(tiny_model(**FIELDS["linear_attention"]), ids)
    fields = {"memory_max_lr": 0.5, "memory_momentum": False, "memory_forgetting": False, "memory_forget_to": "start"}
    assert torch.equal(logits_of(tiny_model(**(FIELDS["linear_attention"] | fields)), ids), expected)
