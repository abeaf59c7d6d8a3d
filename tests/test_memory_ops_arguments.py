# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the op refuses: each bad argument by a ValueError that names it, its value and what is allowed."""

import pytest
import torch

from titans_testing import make_inputs, op_arguments, run_op
from transformers_titans.memory_ops import neural_memory
from transformers_titans.memory_state import MemoryState
from transformers_titans.token_layout import TokenLayout


def cut_row(t: torch.Tensor) -> torch.Tensor:
    return t[:1]


def without_heads(state: MemoryState) -> MemoryState:
    return state._replace(weights=tuple(w[:, :1] for w in state.weights))


def with_pending(state: MemoryState, **fields) -> MemoryState:
    return state._replace(pending=state.pending._replace(**fields))


# Name of the argument -> how to spoil it, and what the message must hold.
TOKENS = {
    "q_without_batch": ("q", lambda q: q[0], ["q must be (B, T, H, D)", "(13, 2, 5)"]),
    "q_without_tokens": ("q", lambda q: q[:, :0], ["q must be", "(2, 0, 2, 5)"]),
    "q_integer": ("q", lambda q: q.long(), ["q must be floating point", "torch.int64"]),
    "k_other_length": ("k", lambda k: k[:, 1:], ["k must", "(2, 13, 2, 5)", "(2, 12, 2, 5)"]),
    "k_other_head_dim": ("k", lambda k: k[..., 1:], ["k must", "(2, 13, 2, 5)", "(2, 13, 2, 4)"]),
    "k_other_dtype": ("k", lambda k: k.float(), ["k must", "torch.float64", "torch.float32"]),
    "v_other_heads": ("v", lambda v: v[:, :, :1], ["v must", "(2, 13, 2, 5)", "(2, 13, 1, 5)"]),
    "v_other_dtype": ("v", lambda v: v.bfloat16(), ["v must", "torch.float64", "torch.bfloat16"]),
    "v_integer": ("v", lambda v: v.int(), ["v must", "torch.float64", "torch.int32"]),
    "theta_without_heads": ("theta", lambda t: t[..., 0], ["theta must be (B, T, H) = (2, 13, 2)", "(2, 13)"]),
    "theta_integer": ("theta", lambda t: t.long(), ["theta must be floating point", "torch.int64"]),
    "alpha_other_length": ("alpha", lambda a: a[:, 1:], ["alpha must be (B, T, H) = (2, 13, 2)", "(2, 12, 2)"]),
    "alpha_bool": ("alpha", lambda a: a > 0, ["alpha must be floating point", "torch.bool"]),
    "eta_other_batch": ("eta", cut_row, ["eta must be (B, T, H) = (2, 13, 2)", "(1, 13, 2)"]),
    "eta_per_channel": ("eta", lambda e: e[..., None], ["eta must be (B, T, H) = (2, 13, 2)", "(2, 13, 2, 1)"]),
}

OPTIONS = {
    "chunk_size_zero": ("chunk_size", lambda c: 0, ["chunk_size must be an integer >= 1", "0"]),
    "chunk_size_negative": ("chunk_size", lambda c: -4, ["chunk_size must be an integer >= 1", "-4"]),
    "chunk_size_float": ("chunk_size", lambda c: 4.0, ["chunk_size must be an integer", "4.0"]),
    "chunk_size_bool": ("chunk_size", lambda c: True, ["chunk_size must be an integer", "True"]),
    "rule_unknown": ("rule", lambda r: "hebbian", ["rule must be one of", "titans", "hebbian"]),
    "rule_of_a_matrix": ("rule", lambda r: "swla", ["rule 'swla'", "depth 1", "got depth 2"]),
    "gate_granularity_unknown": (
        "gate_granularity",
        lambda g: "row",
        ["gate_granularity must be one of", "token", "chunk", "row"],
    ),
    "backend_unknown": ("backend", lambda b: "cuda", ["backend must be one of", "recurrent", "chunked", "cuda"]),
    "norm_weight_alone": ("norm_bias", lambda b: None, ["norm_weight", "norm_bias", "both"]),
    "norm_bias_alone": ("norm_weight", lambda w: None, ["norm_weight", "norm_bias", "both"]),
    "norm_weight_without_heads": ("norm_weight", lambda w: w[0], ["norm_weight must be (H, D) = (2, 5)", "(5,)"]),
    "norm_bias_other_heads": ("norm_bias", cut_row, ["norm_bias must be (H, D) = (2, 5)", "(1, 5)"]),
    "norm_weight_integer": ("norm_weight", lambda w: w.long(), ["norm_weight must be floating point", "torch.int64"]),
    "norm_eps_zero": ("norm_eps", lambda e: 0.0, ["norm_eps must be > 0", "0.0"]),
    "norm_eps_nan": ("norm_eps", lambda e: float("nan"), ["norm_eps must be > 0", "nan"]),
    "forget_to_other_depth": ("forget_to_weights", lambda w: w[:1], ["forget_to_weights must be", "(2, 20, 5)"]),
    "forget_to_other_width": (
        "forget_to_weights",
        lambda w: (w[0][..., 1:], w[1][:, 1:]),
        ["forget_to_weights must be", "(2, 5, 20)", "(2, 5, 19)"],
    ),
    "forget_to_integer": (
        "forget_to_weights",
        lambda w: tuple(x.long() for x in w),
        ["forget_to_weights", "floating point", "torch.int64"],
    ),
    "forget_to_with_batch": (
        "forget_to_weights",
        lambda w: tuple(x[None] for x in w),
        ["forget_to_weights must be", "(2, 5, 20)", "(1, 2, 5, 20)"],
    ),
}

STATES = {
    "other_batch": (
        lambda s: s._replace(weights=tuple(cut_row(w) for w in s.weights)),
        ["weights[0]", "(1, 2, 5, 20)"],
    ),
    "other_heads": (without_heads, ["weights[0]", "(2, 1, 5, 20)"]),
    "other_head_dim": (
        lambda s: s._replace(weights=(s.weights[0][:, :, 1:], s.weights[1])),
        ["weights[0]", "(2, 2, 4, 20)"],
    ),
    "unequal_widths": (
        lambda s: s._replace(weights=(s.weights[0], s.weights[1][:, :, 1:]), momentum=s.momentum),
        ["weights[1]", "(2, 2, 19, 5)"],
    ),
    "does_not_lead_back": (
        lambda s: s._replace(weights=s.weights[:1], momentum=s.momentum[:1]),
        ["weights", "head dimension 5", "20"],
    ),
    "no_layers": (lambda s: s._replace(weights=(), momentum=()), ["depth >= 1", "0"]),
    "momentum_of_other_depth": (lambda s: s._replace(momentum=s.momentum[:1]), ["momentum", "2, 1"]),
    "momentum_of_other_width": (
        lambda s: s._replace(momentum=(s.momentum[0][..., 1:], s.momentum[1])),
        ["momentum[0]", "(2, 2, 5, 20)", "(2, 2, 5, 19)"],
    ),
    "weights_in_bfloat16": (
        lambda s: s._replace(weights=tuple(w.bfloat16() for w in s.weights)),
        ["weights[0]", "float32 or float64", "torch.bfloat16"],
    ),
    "momentum_integer": (
        lambda s: s._replace(momentum=tuple(m.long() for m in s.momentum)),
        ["momentum[0]", "torch.int64"],
    ),
    "count_without_tokens": (lambda s: s._replace(count=3), ["count", "3", "2"]),
    "count_as_a_float": (lambda s: s._replace(count=2.0), ["count", "2.0"]),
    "count_of_other_batch": (lambda s: s._replace(count=torch.tensor([2, 1, 0])), ["count", "(2,)", "(3,)"]),
    "count_in_floats": (lambda s: s._replace(count=torch.tensor([2.0, 1.0])), ["count", "torch.float32"]),
    "pending_of_other_batch": (lambda s: with_pending(s, k=cut_row(s.pending.k)), ["pending.k", "(2, 2, 2, 5)"]),
    "pending_of_unequal_lengths": (lambda s: with_pending(s, v=s.pending.v[:, 1:]), ["pending.v", "(2, 1, 2, 5)"]),
    "pending_gate_without_heads": (lambda s: with_pending(s, eta=s.pending.eta[..., 0]), ["pending.eta", "(2, 2)"]),
    "pending_integer": (lambda s: with_pending(s, k=s.pending.k.long()), ["pending.k", "torch.int64"]),
    "not_a_state": (lambda s: s.weights, ["state must be a MemoryState", "tuple"]),
}


def assert_refused(arguments: dict, message: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        neural_memory(**arguments)
    missing = [part for part in message if part not in str(raised.value)]
    assert not missing, f"{raised.value} does not say {missing}"


@pytest.fixture
def arguments() -> dict:
    return op_arguments(make_inputs(count=2, forget_to="start")) | {
        "rule": "titans",
        "backend": "auto",
        "norm_eps": 1e-6,
    }


@pytest.mark.parametrize(("name", "spoil", "message"), [*TOKENS.values(), *OPTIONS.values()], ids=[*TOKENS, *OPTIONS])
def test_bad_arguments(arguments, name, spoil, message):
    assert_refused(arguments | {name: spoil(arguments[name])}, message)


@pytest.mark.parametrize(("spoil", "message"), STATES.values(), ids=STATES)
def test_bad_states(arguments, spoil, message):
    assert_refused(arguments | {"state": spoil(arguments["state"])}, message)


@pytest.mark.parametrize(("chunk_size", "count"), [(2, 2), (2, [0, 1, 1])], ids=["int", "ragged"])
def test_a_state_whose_open_chunk_is_longer_than_a_chunk(chunk_size, count):
    batch = 2 if isinstance(count, int) else 3
    arguments = op_arguments(make_inputs(batch=batch, chunk_size=4, count=count)) | {"chunk_size": chunk_size}
    assert_refused(arguments, ["pending", "chunk_size 2"])


LAYOUTS = {
    "other_chunk_size": ({"count": 2, "chunk_size": 8}, ["chunk_size 8", "4"]),
    "other_count": ({"count": 1, "chunk_size": 4}, ["count", "1", "2"]),
    "ragged_for_even_rows": ({"count": torch.tensor([2, 2]), "chunk_size": 4, "shape": (2, 13)}, ["count", "2"]),
    "other_length": (
        {"attention_mask": torch.ones(2, 12), "count": 2, "chunk_size": 4},
        ["(2, 12)", "(2, 13, 2, 5)"],
    ),
    "other_batch": ({"attention_mask": torch.ones(3, 13), "count": 2, "chunk_size": 4}, ["(3, 13)", "(2, 13, 2, 5)"]),
}


@pytest.mark.parametrize(("build", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_another_call(arguments, build, message):
    assert_refused(arguments | {"layout": TokenLayout.build(**build)}, message)


def test_a_layout_for_other_ragged_counts():
    arguments = op_arguments(make_inputs(count=[2, 1]))
    layout = TokenLayout.build(count=torch.tensor([1, 2]), chunk_size=4, shape=(2, 13))
    assert_refused(arguments | {"layout": layout}, ["count", "[1, 2]", "[2, 1]"])


def test_start_states():
    starts = torch.zeros(2, 13, dtype=torch.bool)
    starts[0, 5] = True
    arguments = op_arguments(make_inputs(count=2, document_starts=starts))
    start, state = arguments["start_state"], arguments["state"]
    assert_refused(arguments | {"start_state": None}, ["start_state", "document starts"])
    assert_refused(arguments | {"start_state": state}, ["start_state.weights[0]", "(2, 2, 5, 20)"])
    pending = state._replace(weights=start.weights, momentum=start.momentum, count=2)
    pending = pending._replace(pending=type(state.pending)(*(cut_row(t) for t in state.pending)))
    assert_refused(arguments | {"start_state": pending}, ["start_state", "pending", "2"])
    shallow = start._replace(weights=start.weights[:1], momentum=start.momentum[:1])
    assert_refused(arguments | {"start_state": shallow}, ["start_state.weights", "20"])


def test_a_start_state_of_another_depth():
    starts = torch.ones(2, 13, dtype=torch.bool)
    arguments = op_arguments(make_inputs(document_starts=starts))
    deep = op_arguments(make_inputs(document_starts=starts, depth=3))["start_state"]
    assert_refused(arguments | {"start_state": deep}, ["start_state", "3", "2"])


def test_a_start_state_of_another_width():
    starts = torch.ones(2, 13, dtype=torch.bool)
    arguments = op_arguments(make_inputs(document_starts=starts))
    narrow = op_arguments(make_inputs(document_starts=starts, hidden=7))["start_state"]
    assert_refused(arguments | {"start_state": narrow}, ["start_state", "(1, 2, 5, 7)"])


BUILDS = {
    "shapes_differ": (
        {"attention_mask": torch.ones(2, 5), "document_starts": torch.ones(2, 6).bool(), "chunk_size": 4},
        ["attention_mask", "document_starts", "5", "6"],
    ),
    "mask_of_one_dimension": ({"attention_mask": torch.ones(5), "chunk_size": 4}, ["attention_mask", "(B, T)"]),
    "ragged_without_shape": ({"count": torch.tensor([1, 2]), "chunk_size": 4}, ["shape"]),
    "chunk_size_zero": ({"attention_mask": torch.ones(2, 5), "chunk_size": 0}, ["chunk_size", "0"]),
    "count_of_other_batch": (
        {"attention_mask": torch.ones(2, 5), "count": torch.tensor([1, 2, 3]), "chunk_size": 4},
        ["count", "3"],
    ),
}


@pytest.mark.parametrize(("build", "message"), BUILDS.values(), ids=BUILDS)
def test_layouts_that_cannot_be_built(build, message):
    with pytest.raises(ValueError) as raised:
        TokenLayout.build(**build)
    assert not [part for part in message if part not in str(raised.value)], raised.value


@pytest.mark.parametrize("name", ["state", "start_state"])
def test_nothing_has_changed_when_a_call_is_refused(name):
    inputs = make_inputs(document_starts=torch.ones(2, 13, dtype=torch.bool))
    before = {key: t.clone() for key, t in inputs.leaves().items()}
    with pytest.raises(ValueError, match=name):
        run_op(inputs, **{name: without_heads(op_arguments(inputs)[name])})
    for key, tensor in inputs.leaves().items():
        assert torch.equal(tensor, before[key]), key
