# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The op's numbers: both forms against the per-token oracle, in values, final state and every gradient."""

import itertools

import pytest
import torch

from titans_testing import (
    GATES,
    LONG,
    RULES,
    TOLERANCE,
    assert_close,
    continue_from,
    input_gradients,
    make_inputs,
    relative_error,
    result_tensors,
    run_op,
    run_oracle,
)


BACKENDS = ("recurrent", "chunked", "native")

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def bits(*rows: str) -> torch.Tensor:
    """(B, T) bool from one string of 0 and 1 per row."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


def assert_same(actual: dict, reference: dict, ratio: float, who: str = "") -> None:
    assert actual.keys() == reference.keys()
    for name, tensor in reference.items():
        assert_close(f"{who}{name}", actual[name], tensor, ratio)


def assert_equals_oracle(inputs, ratio: float = TOLERANCE[torch.float64]) -> None:
    """Every form's output, surprise, final state and gradients of every input, through output and final state."""
    inputs = inputs.require_grad()
    reference = run_oracle(inputs)
    gradients = input_gradients(reference, inputs)
    for backend in BACKENDS:
        actual = result_tensors(run_op(inputs, backend, output_surprise=True), inputs.chunk_size)
        assert_same(actual, reference, ratio, f"{backend}: ")
        assert_same(input_gradients(actual, inputs), gradients, ratio, f"{backend}: gradient of ")


# One row per option of M and of the recurrence; everything else as in `make_inputs`.
NETWORKS = {
    "depth1": {"depth": 1},
    "depth2": {"depth": 2},
    "depth3": {"depth": 3},
    "expansion1": {"hidden": 5},
    "narrow_hidden": {"hidden": 3},
    "odd_hidden": {"hidden": 7, "depth": 3},
    "one_head": {"heads": 1},
    "three_heads": {"heads": 3, "batch": 1},
    "no_norm": {"norm": False},
    "no_residual": {"residual": False},
    "bare": {"norm": False, "residual": False},
    "bare_matrix": {"norm": False, "residual": False, "depth": 1},
    "bare_depth3": {"norm": False, "residual": False, "depth": 3},
    "forget_to_start": {"forget_to": "start"},
    "forget_to_start_depth1": {"forget_to": "start", "depth": 1},
    "forget_to_start_depth3_no_norm": {"forget_to": "start", "depth": 3, "norm": False},
    **RULES,
    "dla_bare": {"rule": "dla", "norm": False, "residual": False},
    "dla_depth1": {"rule": "dla", "depth": 1},
    "dla_depth3_no_norm_forget_to_start": {"rule": "dla", "depth": 3, "norm": False, "forget_to": "start"},
    "dla_no_residual": {"rule": "dla", "residual": False},
    "swla_forget_to_start": RULES["swla"] | {"forget_to": "start", "heads": 3},
}


@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_equals_oracle_for_every_network(options):
    assert_equals_oracle(make_inputs(length=14, count=2, **options))


LENGTHS = [(c, t) for c in (1, 4, 8) for t in sorted({1, max(c - 1, 1), c, c + 1, 3 * c + 5, 11, 31})]


@pytest.mark.parametrize(("chunk_size", "length"), LENGTHS, ids=[f"C{c}-T{t}" for c, t in LENGTHS])
def test_equals_oracle_for_every_length(chunk_size, length):
    assert_equals_oracle(make_inputs(chunk_size=chunk_size, length=length))


COUNTS = {
    "one_pending": (4, 1),
    "three_pending": (4, 3),
    "seven_pending": (8, 7),
    "ragged": (4, [0, 3, 1]),
    "ragged_long": (8, [7, 2, 5]),
    "ragged_zero": (4, [0, 0]),
    "ragged_chunk1": (1, [0, 0]),
}


@pytest.mark.parametrize("length", [1, 2, 5, 17], ids="T{}".format)
@pytest.mark.parametrize(("chunk_size", "count"), COUNTS.values(), ids=COUNTS)
def test_continues_in_mid_chunk(chunk_size, count, length):
    batch = 2 if isinstance(count, int) else len(count)
    assert_equals_oracle(make_inputs(chunk_size=chunk_size, count=count, length=length, batch=batch))


MASKS = {
    "left": bits("0001111111111", "0000000001111"),
    "right": bits("1111111100000", "1000000000000"),
    "interior": bits("1011001110101", "1111010000011"),
    "mixed": bits("0110111011100", "1111111111111"),
    "one_row_empty": bits("0000000000000", "0101111101111"),
    "one_token_each": bits("0000010000000", "0000000000001"),
}


@pytest.mark.parametrize("count", [0, 3, [1, 2]], ids=["fresh", "count3", "ragged"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masked_tokens_change_nothing(mask, count):
    assert_equals_oracle(make_inputs(mask=mask, count=count))


DOCUMENTS = {
    "first_token": (None, bits("1000000000000", "1000001000000")),
    "mid_chunk": (None, bits("0001000000000", "0000000001000")),
    "chunk_border": (None, bits("0000100010000", "0000000010000")),
    "last_token": (None, bits("0000000000001", "0000000000001")),
    "one_row_only": (None, bits("0000000000000", "0010000000100")),
    "every_token": (None, bits("1111111111111", "0111111111111")),
    "short_documents": (None, bits("1010010001010", "1100100110001")),
    "after_padding": (bits("0001111111111", "1111100000111"), bits("0001000010000", "0000000000100")),
    "starts_at_masked_tokens_do_not_count": (
        bits("1101101111011", "1110000000000"),
        bits("0010010100100", "0001111111111"),
    ),
    "around_gaps": (bits("1110011100110", "0110110110110"), bits("1000010000010", "0100100100100")),
}


@pytest.mark.parametrize("count", [0, 3, [2, 1]], ids=["fresh", "count3", "ragged"])
@pytest.mark.parametrize(("mask", "starts"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_start_from_the_start_state(mask, starts, count):
    assert_equals_oracle(make_inputs(mask=mask, document_starts=starts, count=count))


@pytest.mark.parametrize(
    "options",
    [{"depth": 1}, {"depth": 3, "hidden": 7}, {"norm": False, "forget_to": "start"}, *RULES.values()],
    ids=["depth1", "depth3", "no_norm_forget_to_start", *RULES],
)
def test_masks_and_documents_with_other_networks(options):
    mask, starts = DOCUMENTS["around_gaps"]
    assert_equals_oracle(make_inputs(mask=mask, document_starts=starts, count=[3, 0], **options))


@pytest.mark.parametrize("rows", ["alike", "ragged", "packed", "every_token_a_document"])
def test_equals_oracle_over_many_chunks(rows):
    """More chunks than the chunked form holds at once; documents begin on either side of every such border."""
    length, options = 71, {}
    generator = torch.Generator().manual_seed(2)
    if rows != "alike":
        options = {"count": [1, 0], "mask": torch.rand(2, length, generator=generator) < 0.9}
    if rows == "packed":
        options["document_starts"] = torch.rand(2, length, generator=generator) < 0.2
    if rows == "every_token_a_document":
        options["document_starts"] = torch.ones(2, length, dtype=torch.bool)
    assert_equals_oracle(make_inputs(length=length, chunk_size=2, max_step=0.05, max_forget=0.05, **options))


def test_a_document_equals_the_document_alone():
    """Nothing of a document reaches the next one: not even its last bit."""
    inputs = make_inputs(batch=1, length=15, document_starts=bits("000001000000000"))
    packed = run_op(inputs)
    moved = make_inputs(batch=1, length=15, document_starts=bits("000001000000000"), seed=1)
    second = {name: torch.cat([moved.tokens[name][:, :5], t[:, 5:]], 1) for name, t in inputs.tokens.items()}
    assert torch.equal(run_op(inputs, **second).output[:, 5:], packed.output[:, 5:])

    alone = make_inputs(batch=1, length=10)
    alone.tokens = {name: t[:, 5:] for name, t in inputs.tokens.items()}
    alone.weights, alone.momentum = inputs.start_weights, inputs.start_momentum
    alone.norm_weight, alone.norm_bias = inputs.norm_weight, inputs.norm_bias
    expected = result_tensors(run_op(alone), 4)
    actual = result_tensors(packed, 4)
    assert_close("output", actual.pop("output")[:, 5:], expected.pop("output"), 1e-13)
    assert_same(actual, expected, 1e-13)


GATE_VALUES = {
    "no_step": {"theta": 0.0},
    "full_forgetting": {"alpha": 1.0},
    "no_forgetting": {"alpha": 0.0},
    "no_momentum": {"eta": 0.0},
    "full_momentum": {"eta": 1.0},
    "plain_descent": {"alpha": 0.0, "eta": 0.0},
    "only_surprise": {"alpha": 1.0, "eta": 1.0},
    "last_step_only": {"alpha": 1.0, "eta": 0.0},
    "frozen": {"theta": 0.0, "alpha": 0.0, "eta": 0.0},
}


@pytest.mark.parametrize("forget_to", ["zero", "start"])
@pytest.mark.parametrize("where", ["everywhere", "some_tokens"])
@pytest.mark.parametrize("gates", GATE_VALUES.values(), ids=GATE_VALUES)
def test_gates_at_their_limits(gates, where, forget_to):
    """Values and gradients are right at exactly 0 and 1, where logarithms of the gates are infinite."""
    inputs = make_inputs(length=10, forget_to=forget_to, count=1)
    chosen = torch.ones(2, 10, 2, dtype=torch.bool)
    if where == "some_tokens":
        chosen = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    for name, value in gates.items():
        inputs.tokens[name] = inputs.tokens[name].masked_fill(chosen, value)
    assert_equals_oracle(inputs)


@pytest.mark.parametrize("options", [{}, *RULES.values()], ids=["titans", *RULES])
def test_each_gate_at_random_limits(options):
    inputs = make_inputs(length=31, chunk_size=8, **options)
    generator = torch.Generator().manual_seed(4)
    for name in GATES:
        limits = torch.randint(0, 2, inputs.tokens[name].shape, generator=generator).double()
        inputs.tokens[name] = limits * (0.05 if name == "theta" else 1)
    assert_equals_oracle(inputs)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zero_vectors(name):
    inputs = make_inputs(length=11)
    inputs.tokens[name] = torch.zeros_like(inputs.tokens[name])
    assert_equals_oracle(inputs)


def test_products_of_tiny_gates_do_not_overflow():
    """A whole chunk of gates near 1e-30 multiplies to far below the smallest float64; float32 is finite too."""
    inputs = make_inputs(length=35, chunk_size=32)
    inputs.tokens["eta"] = torch.full_like(inputs.tokens["eta"], 1e-30)
    inputs.tokens["alpha"] = torch.full_like(inputs.tokens["alpha"], 1 - 1e-15)
    assert_equals_oracle(inputs)
    narrow = inputs.to(torch.float32).require_grad()
    for backend in BACKENDS:
        result = result_tensors(run_op(narrow, backend), 32)
        for name, tensor in {**result, **input_gradients(result, narrow)}.items():
            assert torch.isfinite(tensor).all(), (backend, name)


def random_cuts(length: int, seed: int, pieces: int) -> list[int]:
    """Borders of ``pieces`` calls that share ``length`` tokens: 0, ..., length."""
    inner = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: pieces - 1] + 1
    return [0, *sorted(inner.tolist()), length]


def run_in_pieces(inputs, cuts: list[int], backend: str = "auto", **overrides):
    """The same tokens in several calls; the results joined as if they came from one call."""
    outputs = []
    for begin, end in itertools.pairwise(cuts):
        result = run_op(inputs.columns(begin, end), backend, **overrides)
        inputs = continue_from(inputs, result.state)
        outputs.append(result.output)
    return result._replace(output=torch.cat(outputs, 1))


@both_backends
@pytest.mark.parametrize(
    "cuts",
    [list(range(22)), [0, 1, 8, 11, 15, 20, 21], [0, 20, 21], [0, 1, 21]],
    ids=["single_tokens", "odd_pieces", "last_token", "first_token"],
)
@pytest.mark.parametrize("granularity", ["token", "chunk"])
@pytest.mark.parametrize("rows", ["alike", "masked", "packed"])
def test_calls_with_the_state_handed_on_equal_one_call(backend, rows, granularity, cuts):
    mask = bits("001110111111011101110", "111111111110000000000") if rows != "alike" else None
    starts = bits("001000000100000000010", "000010000000000000000") if rows == "packed" else None
    inputs = make_inputs(length=21, count=1, mask=mask, document_starts=starts, gate_granularity=granularity)
    inputs = inputs.require_grad()
    expected = result_tensors(run_op(inputs, backend), 4)
    actual = result_tensors(run_in_pieces(inputs, cuts, backend), 4)
    assert_same(actual, expected, 1e-10)
    assert_same(input_gradients(actual, inputs), input_gradients(expected, inputs), 1e-10)


@pytest.mark.parametrize("seed", range(4), ids="split{}".format)
@pytest.mark.parametrize("chunk_size", [1, 16, 64], ids="C{}".format)
def test_random_splits_of_a_long_sequence(chunk_size, seed):
    length = 2048 if chunk_size > 1 else 512
    inputs = make_inputs(length=length, chunk_size=chunk_size, seed=seed, batch=1, **LONG)
    cuts = random_cuts(length, seed, pieces=3 + 9 * seed)
    with torch.no_grad():
        expected = result_tensors(run_op(inputs, "chunked"), chunk_size)
        actual = result_tensors(run_in_pieces(inputs, cuts, "chunked"), chunk_size)
    assert_same(actual, expected, 1e-9)


@both_backends
def test_splits_lose_no_precision_in_float32(backend):
    inputs = make_inputs(length=512, chunk_size=16, batch=1, **LONG).to(torch.float32)
    with torch.no_grad():
        exact = result_tensors(run_op(inputs.to(torch.float64), backend), 16)
        whole = result_tensors(run_op(inputs, backend), 16)
        split = result_tensors(run_in_pieces(inputs, random_cuts(512, 0, pieces=20), backend), 16)
    for name in ("output", "weights.0", "weights.1", "momentum.0", "momentum.1"):
        assert_close(f"{name} in one call", whole[name], exact[name], TOLERANCE[torch.float32])
        assert relative_error(split[name], exact[name]) <= 4 * relative_error(whole[name], exact[name]), name


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_inputs_are_computed_in_float32(backend, dtype):
    inputs = make_inputs(length=11, count=[2, 0], max_step=0.05, max_forget=0.1).to(torch.float32)
    inputs.tokens = {name: t.to(dtype) for name, t in inputs.tokens.items()}
    inputs = inputs.require_grad()
    actual = result_tensors(run_op(inputs, backend, output_surprise=True), 4)
    assert actual["output"].dtype == dtype
    assert {t.dtype for name, t in actual.items() if name not in ("output", "count")} == {torch.float32}
    reference = run_oracle(inputs)
    for name, tensor in reference.items():
        # Only what leaves the op in the narrow type is rounded to it.
        assert_close(name, actual[name], tensor, TOLERANCE[dtype if name == "output" else torch.float32])
    expected = input_gradients(reference, inputs)
    for name, gradient in input_gradients(actual, inputs).items():
        assert gradient.dtype == inputs.leaves()[name].dtype, name
        assert_close(f"gradient of {name}", gradient, expected[name], TOLERANCE[gradient.dtype])


def test_products_in_bfloat16_where_the_user_allows_them():
    """torch's own switch decides; sums and state stay float32."""
    inputs = make_inputs(length=29, max_step=0.002, max_forget=0.1).require_grad()
    exact = result_tensors(run_op(inputs, "recurrent"), inputs.chunk_size)
    narrow = inputs.to(torch.float32).require_grad()
    full = run_op(narrow, "chunked").output
    torch.set_float32_matmul_precision("medium")
    actual = result_tensors(run_op(narrow, "chunked"), inputs.chunk_size)
    assert relative_error(full, exact["output"]) < 1e-6 < 1e-4 < relative_error(actual["output"], exact["output"])
    # A result takes a few rounded products one after another, a gradient twice as many.
    allowed = 4 * TOLERANCE[torch.bfloat16]
    for name, tensor in exact.items():
        assert_close(name, actual[name], tensor, allowed)
    expected = input_gradients(exact, inputs)
    for name, gradient in input_gradients(actual, narrow).items():
        assert gradient.dtype == torch.float32
        assert_close(f"gradient of {name}", gradient, expected[name], 2 * allowed)


@both_backends
def test_the_widest_dtype_decides_the_state(backend):
    inputs = make_inputs()
    narrow = inputs.to(torch.float32)
    assert run_op(inputs, backend).state.weights[0].dtype == torch.float64
    inputs.tokens = narrow.tokens
    result = run_op(inputs, backend)
    assert (result.output.dtype, result.state.weights[0].dtype) == (torch.float32, torch.float64)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_number(backend, dtype):
    inputs = make_inputs().to(torch.float32)
    inputs.tokens = {name: t.to(dtype) for name, t in inputs.tokens.items()}
    inputs = inputs.require_grad()
    expected = result_tensors(run_op(inputs, backend), 4)
    expected |= {f"gradient of {name}": g for name, g in input_gradients(expected, inputs).items()}
    with torch.autocast("cpu", torch.bfloat16):
        actual = result_tensors(run_op(inputs, backend), 4)
        # torch advises against a backward inside autocast, where plain autograd's products are rounded; the chunked
        # form has a backward of its own and must not care.
        inside = input_gradients(actual, inputs) if backend == "chunked" else {}
    gradients = inside or input_gradients(actual, inputs)
    actual |= {f"gradient of {name}": g for name, g in gradients.items()}
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@both_backends
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_modes_without_gradients_give_the_same_numbers(backend, mode):
    inputs = make_inputs(length=9, count=[1, 2]).require_grad()
    expected = result_tensors(run_op(inputs, backend, output_surprise=True), 4)
    with mode():
        actual = result_tensors(run_in_pieces(inputs, [0, 5, 9], backend), 4)
        assert_close(
            "surprise", run_op(inputs, backend, output_surprise=True).surprise, expected.pop("surprise"), 1e-12
        )
    assert not any(t.requires_grad for t in actual.values())
    assert_same(actual, expected, 1e-12)


@both_backends
def test_surprise_is_optional_and_not_differentiable(backend):
    inputs = make_inputs().require_grad()
    assert run_op(inputs, backend).surprise is None
    assert not run_op(inputs, backend, output_surprise=True).surprise.requires_grad


WRITTEN_ONLY = {
    "alike": {"length": 14, "count": 2},
    "stays_open": {"length": 1, "count": 2},
    "ragged": {"length": 13, "count": [0, 3]},
    "ragged_stays_open": {"length": 1, "count": [0, 2]},
    "packed": {"document_starts": bits("1010010001010", "1100100110001"), "forget_to": "start"},
}


@both_backends
@pytest.mark.parametrize("options", WRITTEN_ONLY.values(), ids=WRITTEN_ONLY)
def test_what_is_written_does_not_depend_on_reading(backend, options):
    inputs = make_inputs(**options).require_grad()
    named = [result_tensors(run_op(inputs, backend, read=read), inputs.chunk_size) for read in (True, False)]
    for tensors in named:
        del tensors["output"]
    assert_same(*named, 0)
    assert_same(*(input_gradients(tensors, inputs) for tensors in named), TOLERANCE[torch.float64])


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at strides that are neither contiguous nor ordered."""
    wide = tensor.detach().transpose(0, -1).repeat_interleave(2, 0)
    return wide[::2].transpose(0, -1)


@both_backends
def test_strides_do_not_matter(backend):
    inputs = make_inputs(length=9, count=[1, 3], forget_to="start").require_grad()
    expected = result_tensors(run_op(inputs, backend), 4)
    strided = inputs.map(lambda t: scattered(t).requires_grad_())
    assert not any(t.is_contiguous() for t in strided.tokens.values())
    actual = result_tensors(run_op(strided, backend), 4)
    assert_same(actual, expected, 1e-13)
    assert_same(input_gradients(actual, strided), input_gradients(expected, inputs), 1e-12)


@both_backends
def test_incoming_gradients_may_be_expanded_or_missing(backend):
    """A mean sends one expanded number back; a loss on one tensor of the state nothing to the rest."""
    inputs = make_inputs(length=9).require_grad()
    reference, actual = run_oracle(inputs), result_tensors(run_op(inputs, backend), 4)
    for name in ("output", "weights.0", "momentum.0", "pending.k"):
        gradients = [
            torch.autograd.grad(
                named[name].mean(),
                inputs.leaves().values(),
                retain_graph=True,
                materialize_grads=True,
                allow_unused=True,
            )
            for named in (actual, reference)
        ]
        for leaf, got, expected in zip(inputs.leaves(), *gradients, strict=True):
            assert_close(f"gradient of {leaf} from {name}", got, expected, 1e-10)


@both_backends
@pytest.mark.parametrize(
    "wanted", ["q", "k", "theta", "eta", "weights.1", "momentum.0", "norm_bias", "forget_to_weights.0"]
)
def test_one_input_alone_may_require_a_gradient(backend, wanted):
    inputs = make_inputs(length=9, forget_to="start")
    leaf = inputs.leaves()[wanted].requires_grad_()
    gradients = []
    for named in (result_tensors(run_op(inputs, backend), 4), run_oracle(inputs)):
        loss = named["output"].square().sum() + named["weights.0"].square().sum()
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert_close(f"gradient of {wanted}", *gradients, 1e-10)


@both_backends
@pytest.mark.parametrize("options", [{}, *RULES.values()], ids=["titans", *RULES])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_gradcheck(backend, layout, options):
    # The end of an open chunk, a whole one and a token of the next; or documents with a pad between them.
    starts = bits("0010") if layout == "packed" else None
    mask = bits("1011") if layout == "packed" else None
    sizes = {"batch": 1, "length": 4, "heads": 1, "head_dim": 2, "hidden": 3, "chunk_size": 2, "count": 1}
    inputs = make_inputs(mask=mask, document_starts=starts, **sizes, **options).require_grad()
    names = list(inputs.leaves())

    def call(*leaves):
        by_id = {id(old): new for old, new in zip(inputs.leaves().values(), leaves, strict=True)}
        named = result_tensors(run_op(inputs.map(lambda t: by_id[id(t)]), backend), 2)
        return tuple(named[name] for name in sorted(named) if name != "count" and named[name].requires_grad)

    assert torch.autograd.gradcheck(call, [inputs.leaves()[name] for name in names])


@both_backends
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300], ids=str)
def test_values_at_masked_tokens_do_not_leak(backend, garbage):
    mask = bits("0011010111110", "1110001111100")
    inputs = make_inputs(mask=mask, document_starts=bits("0001000010000", "1000000000000"), count=[2, 1])
    dirty = inputs.map(torch.clone)
    for tensor in dirty.tokens.values():
        tensor[~mask] = garbage
    clean_leaves, dirty_leaves = inputs.require_grad(), dirty.require_grad()
    clean = result_tensors(run_op(clean_leaves, backend, output_surprise=True), 4)
    result = result_tensors(run_op(dirty_leaves, backend, output_surprise=True), 4)
    for name, tensor in clean.items():
        assert torch.equal(result[name], tensor), name
    assert not result["output"][~mask].any() and not result["surprise"][~mask].any()
    expected = input_gradients(clean, clean_leaves)
    for name, gradient in input_gradients(result, dirty_leaves).items():
        assert torch.equal(gradient, expected[name]), f"gradient of {name}"
        if name in dirty.tokens:
            assert not gradient[~mask].any(), f"gradient of {name} at masked tokens"


@both_backends
def test_a_call_without_real_tokens_changes_nothing(backend):
    inputs = make_inputs(length=5, count=[2, 0], mask=torch.zeros(2, 5, dtype=torch.bool))
    actual = result_tensors(run_op(inputs, backend), 4)
    assert not actual["output"].any()
    unchanged = {"weights.0": inputs.weights[0], "momentum.1": inputs.momentum[1], "pending.k": inputs.pending[0]}
    for name, tensor in unchanged.items():
        assert torch.equal(actual[name], tensor), name
    assert actual["count"].tolist() == [2, 0]


@both_backends
def test_a_row_in_a_batch_equals_the_row_alone(backend):
    mask = bits("0001111111111", "1111111110110", "1111111111111")
    starts = bits("0000001000000", "0000000000000", "1000100000000")
    inputs = make_inputs(batch=3, mask=mask, document_starts=starts, count=[0, 2, 3])
    batched = result_tensors(run_op(inputs, backend), 4)
    for row in range(3):
        alone = result_tensors(run_op(inputs.rows([row]), backend), 4)
        assert_same(alone, {name: t[row : row + 1] for name, t in batched.items()}, 1e-13)


@both_backends
def test_a_layout_that_masks_nothing_equals_no_layout(backend):
    inputs = make_inputs(length=11, count=2)
    expected = result_tensors(run_op(inputs, backend), 4)
    inputs.mask = torch.ones(2, 11, dtype=torch.bool)
    assert_same(result_tensors(run_op(inputs, backend), 4), expected, 1e-13)


@both_backends
def test_inputs_are_left_as_they_were(backend):
    inputs = make_inputs(length=9, count=[1, 3], document_starts=bits("001000000", "000000000"), forget_to="start")
    inputs = inputs.require_grad()
    before = {name: t.detach().clone() for name, t in inputs.leaves().items()}
    input_gradients(result_tensors(run_op(inputs, backend), 4), inputs)
    for name, tensor in inputs.leaves().items():
        assert torch.equal(tensor, before[name]), name


@both_backends
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_finds_nothing(backend):
    inputs = make_inputs(mask=MASKS["interior"], document_starts=DOCUMENTS["around_gaps"][1], count=[1, 3])
    for name in GATES:
        inputs.tokens[name][:, ::3] = 0
    inputs.tokens["alpha"][:, 1::3] = 1
    inputs = inputs.require_grad()
    with torch.autograd.detect_anomaly(check_nan=True):
        gradients = input_gradients(result_tensors(run_op(inputs, backend), 4), inputs)
    assert all(torch.isfinite(g).all() for g in gradients.values())


def test_the_chunked_form_refuses_second_derivatives():
    """Its backward is written out by hand; a silent second derivative through it would be wrong."""
    inputs = make_inputs(length=6).require_grad()
    loss = run_op(inputs, "chunked").output.square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs.tokens["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@both_backends
@pytest.mark.parametrize("dtype", [torch.long, torch.float32], ids=str)
def test_a_mask_may_have_any_dtype(backend, dtype):
    """Tokenizers give integer masks."""
    inputs = make_inputs(mask=MASKS["interior"])
    expected = result_tensors(run_op(inputs, backend), 4)
    inputs.mask = inputs.mask.to(dtype)
    actual = result_tensors(run_op(inputs, backend), 4)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def floats_kept_for_backward(length: int, heads: int) -> int:
    """Floats of the distinct storages that autograd holds after a call of the chunked form."""
    options = {"heads": heads, "head_dim": 64, "chunk_size": 64, "batch": 1}
    inputs = make_inputs(length=length, **options).to(torch.float32).require_grad()
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run_op(inputs, "chunked")
    assert result.output.grad_fn is not None
    return sum(kept.values())


@pytest.mark.parametrize("heads", [1, 3], ids="H{}".format)
def test_memory_kept_for_backward_is_linear_in_the_tokens(heads):
    """At head dimension 64 and expansion 4: the states at chunk borders (1024 floats a token) and the inputs."""
    short, middle, long = (floats_kept_for_backward(t, heads) for t in (256, 512, 1024))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.01)
    assert (long - middle) / (512 * heads) <= 1500
    assert long / (1024 * heads) <= 1500
