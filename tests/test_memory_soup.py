# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory soup (Memory Caching, eq. 14-15): reads of mixed weights against mixtures that are built for every token.

The reference takes each token's running weights from the oracle, mixes them with the kept ones as the equation stands
and reads the result; gradients are autograd's.
"""

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from titans_testing import (
    TOLERANCE,
    OpInputs,
    assert_close,
    continue_from,
    make_inputs,
    memory_network,
    op_arguments,
    oracle_row,
    projection,
    relative_error,
    result_tensors,
    run_op,
    run_oracle,
)
from transformers_titans import chunk_forward
from transformers_titans.kept_plan import SegmentEnds
from transformers_titans.memory_ops import neural_memory
from transformers_titans.memory_ops_triton import reason_against, triton_scan
from transformers_titans.memory_read import read_memory
from transformers_titans.memory_soup import KeptRoom, Soup
from transformers_titans.state_pair import Products
from transformers_titans.triton_decode import decode
from triton_testing import scan_inputs, scan_options


F64 = torch.float64

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
BACKENDS = ("recurrent", "chunked")
both_backends = pytest.mark.parametrize("backend", BACKENDS)


@dataclass
class Mixture:
    """Kept weights (B, K, H, D_in, D_out) by layer, and shares (B, T, H, 1 + K)."""

    kept: tuple[torch.Tensor, ...]
    mix: torch.Tensor

    def arguments(self) -> dict:
        return {"kept_weights": self.kept, "mix": self.mix}

    def columns(self, begin: int, end: int) -> "Mixture":
        return replace(self, mix=self.mix[:, begin:end])

    def map(self, fn) -> "Mixture":
        return Mixture(tuple(fn(w) for w in self.kept), fn(self.mix))

    def leaves(self) -> dict[str, torch.Tensor]:
        return {f"kept.{layer}": w for layer, w in enumerate(self.kept)} | {"mix": self.mix}


def make_mixture(inputs: OpInputs, num_kept: int, seed: int = 5) -> Mixture:
    """Kept weights of the running ones' size, and shares that sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=F64)

    kept = tuple(normal(w.shape[0], num_kept, *w.shape[1:]) / math.sqrt(w.shape[2]) for w in inputs.weights)
    return Mixture(kept, normal(*inputs.tokens["theta"].shape, 1 + num_kept).softmax(-1))


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_()


def mixed_output(inputs: OpInputs, mixture: Mixture, row: int) -> torch.Tensor:
    """(T, H, D): M of each real token's query, with weights that are mixed for it alone; zero at masked tokens."""
    running, outputs = oracle_row(inputs, row).weights, []
    for t, weights in enumerate(running):
        own, *shares = mixture.mix[row, t, :, :, None, None].unbind(1)
        mixed = [own * w for w in weights]
        for i, share in enumerate(shares):
            mixed = [total + share * kept[row, i] for total, kept in zip(mixed, mixture.kept, strict=True)]
        output = memory_network(inputs.tokens["q"][row, t], mixed, **inputs.network())
        masked = inputs.mask is not None and not inputs.mask[row, t]
        outputs.append(torch.zeros_like(output) if masked else output)
    return torch.stack(outputs)


def run_reference(inputs: OpInputs, mixture: Mixture) -> dict[str, torch.Tensor]:
    rows = range(inputs.tokens["q"].shape[0])
    return run_oracle(inputs) | {"output": torch.stack([mixed_output(inputs, mixture, row) for row in rows])}


def gradients(named: dict, inputs: OpInputs, mixture: Mixture) -> dict[str, torch.Tensor]:
    """Of a loss that sees all of output and final state, in every tensor given."""
    leaves = inputs.leaves() | mixture.leaves()
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return dict(zip(leaves, torch.autograd.grad(projection(named), list(leaves.values()), **options), strict=True))


def assert_same(actual: dict, reference: dict, ratio: float = TOLERANCE[F64], who: str = "") -> None:
    assert actual.keys() == reference.keys()
    for name, tensor in reference.items():
        assert_close(f"{who}{name}", actual[name], tensor, ratio)


def assert_equals_reference(inputs: OpInputs, mixture: Mixture) -> None:
    """Every form's output, surprise, final state and every gradient."""
    inputs, mixture = inputs.require_grad(), mixture.map(leaf)
    reference = run_reference(inputs, mixture)
    expected = gradients(reference, inputs, mixture)
    for backend in BACKENDS:
        result = run_op(inputs, backend, output_surprise=True, **mixture.arguments())
        actual = result_tensors(result, inputs.chunk_size)
        assert_same(actual, reference, who=f"{backend}: ")
        assert_same(gradients(actual, inputs, mixture), expected, who=f"{backend}: gradient of ")


NETWORKS = {
    "depth1": {"depth": 1},
    "depth2": {"depth": 2},
    "depth3": {"depth": 3, "hidden": 7},
    "narrow_hidden": {"hidden": 3},
    "no_norm": {"norm": False},
    "no_residual": {"residual": False},
    "bare_matrix": {"norm": False, "residual": False, "depth": 1},
    "bare_depth3": {"norm": False, "residual": False, "depth": 3},
    "forget_to_start": {"forget_to": "start"},
    "forget_to_start_depth1": {"forget_to": "start", "depth": 1},
    "forget_to_start_depth3_no_norm": {"forget_to": "start", "depth": 3, "norm": False},
    "chunk_gates": {"gate_granularity": "chunk"},
}


@pytest.mark.parametrize("num_kept", range(4), ids="K{}".format)
@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_equals_a_mixture_built_for_every_token(options, num_kept):
    inputs = make_inputs(length=14, count=2, **options)
    assert_equals_reference(inputs, make_mixture(inputs, num_kept))


LENGTHS = [(1, 1), (1, 5), (4, 1), (4, 3), (4, 4), (4, 5), (4, 8), (4, 17), (8, 3), (8, 31)]


@pytest.mark.parametrize(("chunk_size", "length"), LENGTHS, ids=[f"C{c}-T{t}" for c, t in LENGTHS])
def test_every_length(chunk_size, length):
    inputs = make_inputs(chunk_size=chunk_size, length=length, count=chunk_size // 4)
    assert_equals_reference(inputs, make_mixture(inputs, 2))


def bits(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


ROWS = {
    "padded": {"mask": bits("0001111111111", "1111111010000")},
    "padded_in_mid_chunk": {"mask": bits("0001111111111", "1111111010000"), "count": 3},
    "ragged": {"count": [0, 3]},
    "ragged_and_padded": {"count": [1, 2], "mask": bits("1011001110101", "0000000000000")},
    "packed": {"document_starts": bits("1010010001010", "1100100110001")},
    "packed_and_padded": {
        "mask": bits("1110011100110", "0110110110110"),
        "document_starts": bits("1000010000010", "0100100100100"),
        "count": [2, 1],
        "forget_to": "start",
    },
}


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_rows_that_differ(options):
    inputs = make_inputs(**options)
    assert_equals_reference(inputs, make_mixture(inputs, 2))


@pytest.mark.parametrize("forget_to", ["zero", "start"])
def test_spans_of_many_chunks(forget_to):
    """More chunks than the chunked form holds at once."""
    inputs = make_inputs(length=71, chunk_size=2, max_step=0.05, max_forget=0.05, forget_to=forget_to)
    assert_equals_reference(inputs, make_mixture(inputs, 2))


def run_in_pieces(inputs: OpInputs, mixture: Mixture, cuts: list[int], backend: str = "chunked"):
    """The same tokens in several calls; the outputs joined, the last state."""
    outputs = []
    for begin, end in itertools.pairwise(cuts):
        result = run_op(inputs.columns(begin, end), backend, **mixture.columns(begin, end).arguments())
        inputs = continue_from(inputs, result.state)
        outputs.append(result.output)
    return result._replace(output=torch.cat(outputs, 1))


@both_backends
@pytest.mark.parametrize("cuts", [list(range(14)), [0, 1, 8, 13], [0, 12, 13]], ids=["tokens", "odd", "last_token"])
@pytest.mark.parametrize("rows", ["alike", "padded_in_mid_chunk", "packed_and_padded"])
def test_calls_with_the_state_handed_on_equal_one_call(backend, rows, cuts):
    inputs = make_inputs(**ROWS.get(rows, {"count": 1})).require_grad()
    mixture = make_mixture(inputs, 2).map(leaf)
    expected = result_tensors(run_op(inputs, backend, **mixture.arguments()), 4)
    actual = result_tensors(run_in_pieces(inputs, mixture, cuts, backend), 4)
    assert_same(actual, expected)
    assert_same(gradients(actual, inputs, mixture), gradients(expected, inputs, mixture))


@pytest.mark.parametrize("rows", ["alike", "ragged"])
def test_decoding_with_and_without_a_mixture(rows):
    """What decoding keeps of an open chunk knows of no mixture: a call with one does without it, and both go on."""
    inputs = make_inputs(length=11, **ROWS.get(rows, {}))
    mixture, alone = make_mixture(inputs, 2), {"kept_weights": None, "mix": None}
    plain, mixed = run_op(inputs), run_op(inputs, **mixture.arguments())
    with torch.no_grad():
        state = inputs
        for t in range(11):
            given = mixture.columns(t, t + 1).arguments() if t % 3 == 1 else alone
            result = run_op(state.columns(t, t + 1), **given)
            state = continue_from(state, result.state)
            expected = (mixed if t % 3 == 1 else plain).output[:, t : t + 1]
            assert_close(f"output {t}", result.output, expected, TOLERANCE[F64])


def test_shares_may_be_zero():
    """A kept memory that a row does not see, a running one that a token does not, and tokens that see nothing."""
    inputs = make_inputs(length=14, count=1, forget_to="start")
    mixture = make_mixture(inputs, 3)
    mixture.mix[0, ..., 1] = 0
    mixture.mix[:, 3:7, :, 0] = 0
    mixture.mix[1, ::3] = 0
    assert_equals_reference(inputs, mixture)


@both_backends
def test_kept_weights_that_nobody_sees_change_nothing(backend):
    """Room for memories that are not there yet is filled with zeros: no NaN, and no gradient."""
    inputs = make_inputs(length=14, count=[1, 0]).require_grad()
    seen = make_mixture(inputs, 1).map(leaf)
    room = tuple(torch.cat([w, torch.zeros_like(w), w], 1) for w in seen.kept)
    shares = torch.cat([seen.mix, torch.zeros_like(seen.mix)], -1)
    wide = Mixture(room, shares).map(leaf)
    expected = result_tensors(run_op(inputs, backend, **seen.arguments()), 4)
    actual = result_tensors(run_op(inputs, backend, **wide.arguments()), 4)
    assert_same(actual, expected)
    want, got = gradients(expected, inputs, seen), gradients(actual, inputs, wide)
    for name in inputs.leaves():
        assert_close(f"gradient of {name}", got[name], want[name], TOLERANCE[F64])
    for layer in range(2):
        of_seen, *of_others = got[f"kept.{layer}"].unbind(1)
        assert_close(f"gradient of kept.{layer}", of_seen, want[f"kept.{layer}"][:, 0], TOLERANCE[F64])
        assert not any(g.any() for g in of_others)
    assert torch.isfinite(got["mix"]).all() and not got["mix"][..., 2].any()


@both_backends
def test_shares_at_masked_tokens_do_not_leak(backend):
    inputs = make_inputs(mask=bits("0011010111110", "1110001111100"), count=[2, 1]).require_grad()
    clean = make_mixture(inputs, 2)
    dirty = clean.map(torch.clone)
    dirty.mix[~inputs.mask] = float("nan")
    tensors, of_inputs = [], []
    for mixture in (clean.map(leaf), dirty.map(leaf)):
        tensors.append(result_tensors(run_op(inputs, backend, **mixture.arguments()), 4))
        of_inputs.append(gradients(tensors[-1], inputs, mixture))
    for expected, actual in (tensors, of_inputs):
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name
    assert not of_inputs[1]["mix"][~inputs.mask].any()


@both_backends
def test_a_mixture_changes_nothing_that_is_written(backend):
    inputs = make_inputs(length=14, count=[1, 0])
    options = {"backend": backend, "output_surprise": True}
    alone = result_tensors(run_op(inputs, **options), 4)
    mixed = result_tensors(run_op(inputs, **options, **make_mixture(inputs, 2).arguments()), 4)
    assert relative_error(mixed.pop("output"), alone.pop("output")) > 0.1
    for name, tensor in alone.items():
        assert torch.equal(mixed[name], tensor), name


@both_backends
@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 3}, {"norm": False}], ids=str)
def test_a_mixture_of_equal_weights_is_no_mixture(backend, options):
    """Where nothing is written, kept weights equal to the running ones and shares that sum to 1 are the memory."""
    inputs = make_inputs(length=11, count=1, **options)
    for name in ("theta", "alpha", "eta"):
        inputs.tokens[name] = torch.zeros_like(inputs.tokens[name])
    inputs.pending = (*inputs.pending[:2], *(torch.zeros_like(t) for t in inputs.pending[2:]))
    kept = tuple(w[:, None].repeat(1, 2, 1, 1, 1) for w in inputs.weights)
    mixture = replace(make_mixture(inputs, 2), kept=kept)
    assert_close("output", run_op(inputs, backend, **mixture.arguments()).output, run_op(inputs).output, 1e-13)


@both_backends
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no_residual"])
def test_of_linear_memories_it_is_the_mixture_of_their_outputs(backend, residual):
    """As gated residual memory (Memory Caching, eq. 9) has it; of deep ones it is not."""
    for depth in (1, 2):
        inputs = make_inputs(length=14, depth=depth, norm=False, residual=residual)
        mixture = make_mixture(inputs, 3)
        own, *shares = mixture.mix.unsqueeze(-1).unbind(3)
        expected = own * run_op(inputs, backend).output
        for i, share in enumerate(shares):
            kept = [w[:, i] for w in mixture.kept]
            expected = expected + share * read_memory(inputs.tokens["q"], kept, residual=residual)
        actual = run_op(inputs, backend, **mixture.arguments()).output
        if depth == 1:
            assert_close("output", actual, expected, 1e-13)
        else:
            assert relative_error(actual, expected) > 0.05


@both_backends
@pytest.mark.parametrize("wanted", ["kept.0", "kept.1", "mix", "weights.0"])
def test_one_input_alone_may_require_a_gradient(backend, wanted):
    inputs = make_inputs(length=9)
    mixture = make_mixture(inputs, 2)
    tensor = (inputs.leaves() | mixture.leaves())[wanted].requires_grad_()
    tensors = run_op(inputs, backend, **mixture.arguments()).output, run_reference(inputs, mixture)["output"]
    assert_close(wanted, *(torch.autograd.grad(t.square().sum(), tensor)[0] for t in tensors), TOLERANCE[F64])


@both_backends
def test_strides_do_not_matter_and_inputs_are_left_as_they_were(backend):
    inputs = make_inputs(length=9, count=[1, 3]).require_grad()
    mixture = make_mixture(inputs, 2).map(leaf)
    strided = mixture.map(lambda t: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
    assert not any(t.is_contiguous() for t in strided.leaves().values())
    before = {name: t.detach().clone() for name, t in strided.leaves().items()}
    results = []
    for given in (mixture, strided):
        tensors = result_tensors(run_op(inputs, backend, **given.arguments()), 4)
        results.append(tensors | {f"gradient of {k}": g for k, g in gradients(tensors, inputs, given).items()})
    assert_same(results[1], results[0], 1e-13)
    for name, tensor in strided.leaves().items():
        assert torch.equal(tensor, before[name]), name


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_are_computed_in_float32(backend, dtype):
    # Without LN, which can make float32 itself, token by token, wrong by more than is allowed here.
    inputs = make_inputs(length=11, count=[2, 0], max_step=0.05, max_forget=0.1, norm=False).to(torch.float32)
    mixture = make_mixture(inputs, 2).map(lambda t: t.to(dtype))
    inputs.tokens = {name: t.to(dtype) for name, t in inputs.tokens.items()}
    inputs, mixture = inputs.require_grad(), mixture.map(leaf)
    reference = run_reference(inputs.map(torch.Tensor.double), mixture.map(torch.Tensor.double))
    actual = result_tensors(run_op(inputs, backend, **mixture.arguments()), 4)
    assert actual["output"].dtype == dtype
    for name, tensor in actual.items():
        assert_close(name, tensor, reference[name], TOLERANCE[dtype if name == "output" else torch.float32])
    expected = gradients(reference, inputs, mixture)
    for name, gradient in gradients(actual, inputs, mixture).items():
        assert gradient.dtype == (inputs.leaves() | mixture.leaves())[name].dtype, name
        assert_close(f"gradient of {name}", gradient, expected[name], TOLERANCE[gradient.dtype])


@pytest.mark.parametrize("field", ["kept", "mix"])
def test_kept_weights_and_shares_may_be_of_another_dtype(field):
    """Also where all else is alike, and nothing is cast for its sake."""
    inputs = make_inputs().to(torch.float32)
    mixture = make_mixture(inputs, 2)
    narrow = mixture.map(torch.Tensor.float)
    mixed = replace(narrow, **{field: getattr(mixture, field)})
    actual, expected = (run_op(inputs, **m.arguments()).output for m in (mixed, narrow))
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


def test_products_in_bfloat16_where_the_user_allows_them():
    inputs = make_inputs(length=29, max_step=0.002, max_forget=0.1).require_grad()
    mixture = make_mixture(inputs, 2).map(leaf)
    exact = result_tensors(run_op(inputs, "recurrent", **mixture.arguments()), 4)
    torch.set_float32_matmul_precision("medium")
    narrow, shared = inputs.to(torch.float32).require_grad(), mixture.map(lambda t: leaf(t.float()))
    actual = result_tensors(run_op(narrow, "chunked", **shared.arguments()), 4)
    assert relative_error(actual["output"], exact["output"]) > 1e-4
    allowed = 4 * TOLERANCE[torch.bfloat16]
    assert_same(actual, exact, allowed)
    assert_same(gradients(actual, narrow, shared), gradients(exact, inputs, mixture), 2 * allowed)


@pytest.mark.parametrize(("forget_to", "backend"), [("zero", "eager"), ("start", "aot_eager")])
def test_compiled_spans_equal_plain_ones(forget_to, backend, monkeypatch):
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend(backend)
    monkeypatch.setattr(chunk_forward, "_compiled", lambda function: torch.compile(function, backend=compiler))
    inputs = make_inputs(length=31, count=1, forget_to=forget_to).require_grad()
    mixture = make_mixture(inputs, 2).map(leaf)
    tensors = [result_tensors(run_op(inputs, name, **mixture.arguments()), 4) for name in ("chunked", "compiled")]
    assert_same(tensors[1], tensors[0])
    assert_same(*(gradients(named, inputs, mixture) for named in reversed(tensors)))
    assert compiler.frame_count == 2
    torch._dynamo.reset()


def test_the_op_compiles_without_a_graph_break():
    """Over a segment's end, too."""
    torch._dynamo.reset()
    inputs = make_inputs(length=7, count=2, depth=1).require_grad()
    mixture = make_mixture(inputs, 2).map(leaf)
    mix = torch.cat([mixture.mix, (torch.arange(7) >= 2).to(F64).view(1, 7, 1, 1).expand(2, -1, 2, -1)], -1)
    arguments = op_arguments(inputs) | {"kept_weights": mixture.kept, "mix": mix}
    arguments["segments"] = SegmentEnds((0,), None, False)
    expected = result_tensors(neural_memory(**arguments), 4)
    actual = result_tensors(torch.compile(neural_memory, fullgraph=True, backend="eager")(**arguments), 4)
    assert_same(actual, expected)
    assert_same(gradients(actual, inputs, mixture), gradients(expected, inputs, mixture))
    torch._dynamo.reset()


def test_the_chunks_of_a_span_share_one_copy_of_the_kept_weights():
    """None, where they lie as the scan takes them: not one for each chunk."""
    inputs = scan_inputs(N=5, G=3, b=4, D=16, h=24)
    kept = tuple(torch.randn(3, 2, *w.shape[1:], dtype=F64) for w in inputs.weights)
    inputs = inputs._replace(kept=kept, mix=torch.rand(5, 3, 4, 3, dtype=F64))
    soup = Soup.of(inputs, Products(None, F64))
    assert [w.data_ptr() for w in soup.weights] == [w.data_ptr() for w in kept]
    assert [tuple(w.shape) for w in soup.weights] == [(3, 32, 24), (3, 48, 16)]


def test_the_segments_of_a_scan_share_one_copy_of_the_kept_weights():
    kept = torch.randn(3, 2, 5, 7, dtype=F64, requires_grad=True)
    new = [torch.randn(3, 5, 7, dtype=F64, requires_grad=True) for _ in range(3)]
    room, fronts = KeptRoom((kept,), len(new)), []
    for w in new:
        room.put((w,))
        fronts.append(room.filled[0])
    copies = [torch.cat([kept, torch.stack(new[:n], 1)], 1) for n in (1, 2, 3)]
    assert len({front.untyped_storage().data_ptr() for front in fronts}) == 1
    assert all(map(torch.equal, fronts, copies))
    # Squares keep their operands for the backward, although the room was filled on meanwhile.
    of_fronts, of_copies = (
        torch.autograd.grad(sum(((n + 1) * t.square()).sum() for n, t in enumerate(tensors)), [kept, *new])
        for tensors in (fronts, copies)
    )
    for actual, expected in zip(of_fronts, of_copies, strict=True):
        assert_close("gradient", actual, expected, TOLERANCE[F64])


BAD = {
    "kept_alone": ({"mix": None}, ["kept_weights and mix must both"]),
    "mix_alone": ({"kept_weights": None}, ["kept_weights and mix must both"]),
    "mix_without_heads": ({"mix": torch.ones(2, 13, 3)}, ["mix must be (B, T, H, 1 + K)", "(2, 13, 3)"]),
    "mix_of_nothing": ({"mix": torch.ones(2, 13, 2, 0)}, ["mix must be (B, T, H, 1 + K)", "(2, 13, 2, 0)"]),
    "mix_of_other_length": (
        {"mix": torch.ones(2, 12, 2, 3)},
        ["mix must be (B, T, H, 1 + K) = (2, 13, 2, 3)", "(2, 12, 2, 3)"],
    ),
    "mix_integer": ({"mix": torch.ones(2, 13, 2, 3).long()}, ["mix must be floating point", "torch.int64"]),
    "mix_of_other_number": (
        {"mix": torch.ones(2, 13, 2, 4)},
        ["kept_weights[0] must be (B, K, H, D_in, D_out) = (2, 3, 2, 5, 20)", "(2, 2, 2, 5, 20)"],
    ),
    "kept_of_other_depth": ({"kept_weights": (torch.ones(2, 2, 2, 5, 20),)}, ["kept_weights", "2 layers", "got 1"]),
    "kept_of_other_width": (
        {"kept_weights": (torch.ones(2, 2, 2, 5, 20), torch.ones(2, 2, 2, 19, 5))},
        ["kept_weights[1] must be (B, K, H, D_in, D_out) = (2, 2, 2, 20, 5)", "(2, 2, 2, 19, 5)"],
    ),
    "kept_integer": (
        {"kept_weights": (torch.ones(2, 2, 2, 5, 20).int(), torch.ones(2, 2, 2, 20, 5))},
        ["kept_weights[0] must be floating point", "torch.int32"],
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_mixtures(spoil, message):
    inputs = make_inputs()
    with pytest.raises(ValueError) as raised:
        run_op(inputs, **(make_mixture(inputs, 2).arguments() | spoil))
    assert not [part for part in message if part not in str(raised.value)], raised.value


def test_the_kernels_refuse_a_mixture():
    """By name with an error; "auto" asks `reason_against` and then takes the chunked form."""
    inputs = make_inputs(head_dim=16).to(torch.float32)
    mixture = make_mixture(inputs, 2).map(torch.Tensor.float)
    with pytest.raises(ValueError, match=r'mix is given, \(2, 13, 2, 3\).*backend="chunked" takes it'):
        run_op(inputs, "triton", **mixture.arguments())
    sizes = (2, 16, 64, 4, torch.float32, inputs.tokens["q"])
    assert reason_against(*sizes) is None and "mix" in reason_against(*sizes, mixture.mix)
    single = scan_inputs(N=1, b=4, b_q=1)
    single = single._replace(mix=torch.ones(1, 2, 1, 1), kept=tuple(w.unsqueeze(1)[:, :0] for w in single.weights))
    reads = scan_options(single, write=False, surprise=False)
    with pytest.raises(ValueError, match="mix is given"):
        triton_scan(single, reads)
    with pytest.raises(ValueError, match="mix is given"):
        decode(single, reads, torch.zeros(2, dtype=torch.int32))


def test_auto_takes_the_chunked_form_for_a_mixture_on_a_gpu(monkeypatch):
    from transformers_titans import memory_ops

    monkeypatch.setattr(memory_ops, "_has_triton", lambda: True)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    sizes = (2, 64, 256, 64, torch.float32)
    assert memory_ops._pick_scan("auto", sizes, on_gpu, torch.ones(1, 1, 1, 2)) is memory_ops.chunk_scan
    assert memory_ops._pick_scan("auto", sizes, on_gpu, None) is not memory_ops.chunk_scan
