# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Merged flash attention: equal to one softmax over all parts' keys, outputs and gradients.

Without a GPU, the stand-in of `flash_stand_in` takes the library's place.
"""

import importlib
import sys

import pytest
import torch

from flash_stand_in import IMPLEMENTATIONS, as_custom_ops, stand_in
from titans_testing import TOLERANCE, assert_close, logits_of, parameter_gradients, random_ids, relative_error
from transformers_titans import TitansCache
from transformers_titans import merged_flash_attention as merged
from transformers_titans.merged_flash_attention import AttentionPart, merged_flash_attention
from variant_oracle import variant_model


def visible(part: AttentionPart) -> torch.Tensor:
    """(total_q, total_k) bool: which keys each query sees, by the definition of `AttentionPart`."""
    seen = torch.zeros(part.query.shape[0], part.key.shape[0], dtype=torch.bool)
    bounds_q, bounds_k = part.cu_seqlens_q.tolist(), part.cu_seqlens_k.tolist()
    for begin_q, end_q, begin_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        for i in range(begin_q, end_q):
            own = end_k - (end_q - i)
            last = own if part.causal else end_k - 1
            first = begin_k if part.window is None else max(begin_k, own - part.window + 1)
            seen[i, first : max(first, last + 1)] = True
    return seen


def union_attention(parts: list[AttentionPart], scaling: float, keep=None, dropout: float = 0.0) -> torch.Tensor:
    """One softmax over the keys of all parts, in plain PyTorch; ``keep``: per part (H, total_q, total_k) bool."""
    scores, values = [], []
    for part in parts:
        key, value = (t.repeat_interleave(part.query.shape[1] // t.shape[1], 1) for t in (part.key, part.value))
        score = torch.einsum("qhd,khd->hqk", part.query, key) * scaling
        scores.append(score.masked_fill(~visible(part).to(score.device), -torch.inf))
        values.append(value)
    scores = torch.cat(scores, -1)
    lonely = (scores == -torch.inf).all(-1, keepdim=True)
    probabilities = scores.masked_fill(lonely, 0).softmax(-1).masked_fill(lonely, 0)
    if keep is not None:
        probabilities = probabilities * torch.cat(keep, -1).to(probabilities) / (1 - dropout)
    return torch.einsum("hqk,khd->qhd", probabilities, torch.cat(values))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    with stand_in(request.param, monkeypatch):
        yield request.param


# Per part: lengths of the query sequences, of the key sequences, causal, window. Queries 13 in all, if not said.
CASES = {
    "window_and_prefix": [([7, 0, 5, 1], [7, 0, 5, 1], True, 4), ([13], [3], False, None)],
    "window_of_one": [([7, 6], [7, 6], True, 1), ([13], [2], False, None)],
    "wide_window": [([7, 6], [7, 6], True, 50), ([13], [1], False, None)],
    "window_with_past": [([2, 1, 3, 7], [6, 4, 3, 12], True, 5), ([13], [2], False, None)],
    "causal_and_prefix": [([4, 4, 4, 1], [4, 4, 4, 1], True, None), ([13], [2], False, None)],
    "decode_with_a_masked_row": [([1, 0, 1], [5, 2, 1], True, None), ([2], [3], False, None)],
    "other_sequences_per_part": [([6, 7], [6, 7], True, 3), ([3, 9, 1], [2, 4, 1], False, None)],
    "three_parts": [([6, 7], [6, 7], True, 3), ([13], [2], False, None), ([5, 8], [5, 8], True, None)],
    "empty_key_sequences": [([3, 4, 6], [3, 0, 6], True, 2), ([7, 6], [0, 3], False, None)],
    "part_without_keys": [([7, 6], [7, 6], True, 3), ([13], [0], False, None)],
    "more_queries_than_keys": [([7, 6], [3, 6], True, None), ([7, 6], [0, 1], False, None)],
    "one_part": [([7, 6], [9, 7], True, 3)],
    "one_part_with_lonely_queries": [([7, 6], [3, 0], True, 3)],
    "no_keys_at_all": [([7, 6], [0, 0], True, 3), ([13], [0], False, None)],
    "no_queries": [([0, 0], [0, 0], True, 3), ([0], [2], False, None)],
}


def make_parts(case, *, heads=4, groups=2, head_dim=8, dtype=torch.float64, device="cpu", seed=0):
    """Random parts of ``CASES[case]``, every tensor a leaf of its own."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    def bounds(lengths):
        return torch.tensor([0, *lengths], device=device).cumsum(0).int()

    return [
        AttentionPart(
            leaf(sum(lengths_q), heads, head_dim),
            leaf(sum(lengths_k), groups, head_dim),
            leaf(sum(lengths_k), groups, head_dim),
            bounds(lengths_q),
            bounds(lengths_k),
            max(lengths_q),
            max(lengths_k),
            causal,
            window,
        )
        for lengths_q, lengths_k, causal, window in (CASES[case] if isinstance(case, str) else case)
    ]


def leaves(parts: list[AttentionPart]) -> list[torch.Tensor]:
    return [t for part in parts for t in part[:3]]


def with_tensors(parts: list[AttentionPart], tensors) -> list[AttentionPart]:
    """``parts`` with other ``leaves``, in the same order."""
    return [AttentionPart(*tensors[3 * i : 3 * i + 3], *part[3:]) for i, part in enumerate(parts)]


def cotangent(out: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return noise.to(out.device, out.dtype)


def gradients(out: torch.Tensor, parts: list[AttentionPart]) -> list[torch.Tensor]:
    return torch.autograd.grad(out, leaves(parts), cotangent(out), allow_unused=True, materialize_grads=True)


def assert_same(out, parts, expected, expected_gradients, ratio):
    assert_close("output", out, expected, ratio)
    names = [f"part {i}, {name}" for i in range(len(parts)) for name in ("query", "key", "value")]
    for name, gradient, reference in zip(names, gradients(out, parts), expected_gradients, strict=True):
        assert_close(f"gradient of {name}", gradient, reference, ratio)


@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": 3, "groups": 3, "head_dim": 16}, {"heads": 3, "groups": 1, "head_dim": 5}],
    ids=["grouped", "one_to_one", "one_key_head_of_5"],
)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_softmax_over_all_keys(case, shape, implementation, nan_filled_empty):
    parts = make_parts(case, **shape)
    expected = union_attention(parts, 0.3)
    out = merged_flash_attention(parts, 0.3, implementation)
    # Each number is one short sum in float64; the project's tolerance is for sums of thousands.
    assert_same(out, parts, expected, gradients(expected, parts), 1e-12)


def test_gradients_equal_numerical_ones(implementation):
    parts = make_parts([([1, 3], [3, 3], True, 2), ([3, 1], [0, 2], False, None)], heads=2, groups=1)

    def call(*tensors):
        return merged_flash_attention(with_tensors(parts, tensors), 0.3, implementation)

    assert torch.autograd.gradcheck(call, leaves(parts))


def test_a_query_shared_by_parts_gets_the_sum_of_its_gradients(implementation):
    window, prefix = make_parts("window_and_prefix")
    parts = [window, prefix._replace(query=window.query)]
    expected = union_attention(parts, 0.3)
    out = merged_flash_attention(parts, 0.3, implementation)
    assert_same(out, parts, expected, gradients(expected, parts), 1e-12)


def test_large_scores_neither_overflow_nor_hide_a_part(implementation):
    parts = make_parts("window_and_prefix")
    parts = [part._replace(query=(part.query * 300).detach().requires_grad_()) for part in parts]
    expected = union_attention(parts, 1.0)
    out = merged_flash_attention(parts, 1.0, implementation)
    assert_same(out, parts, expected, gradients(expected, parts), TOLERANCE[torch.float64])


@pytest.mark.parametrize("window", [1, 3, 4])
def test_the_window_ends_where_it_says(window, implementation):
    parts = make_parts([([11], [11], True, window), ([11], [2], False, None)])
    changed = parts[0].value.detach().clone()
    changed[2] += 1
    with torch.no_grad():
        before = merged_flash_attention(parts, 0.3, implementation)
        after = merged_flash_attention([parts[0]._replace(value=changed), parts[1]], 0.3, implementation)
    moved = (after != before).flatten(1).any(1).tolist()
    # Token 2 is seen at distances 0 to window - 1, and neither at window nor beyond.
    assert [i for i, m in enumerate(moved) if m] == list(range(2, 2 + window))


@pytest.mark.parametrize("implementation_2", ["flash_attention_2"])
@pytest.mark.parametrize("case", ["window_and_prefix", "three_parts", "one_part"])
def test_dropout_is_one_mask_over_all_keys(case, implementation_2, monkeypatch):
    parts = make_parts(case)
    with stand_in(implementation_2, monkeypatch) as library:
        out = merged_flash_attention(parts, 0.3, implementation_2, dropout=0.4)
        shapes = [(4, len(part.query), len(part.key)) for part in parts]
        keep = [library.keep_mask(*given, 0.4) for given in zip(library.states, shapes, strict=True)]
        expected = union_attention(parts, 0.3, keep, 0.4)
        assert relative_error(expected, union_attention(parts, 0.3)) > 0.1
        assert_same(out, parts, expected, gradients(expected, parts), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parts_are_merged_in_float32(dtype, implementation):
    parts = make_parts("window_and_prefix", dtype=dtype)
    exact = with_tensors(parts, [t.detach().double() for t in leaves(parts)])
    out = merged_flash_attention(parts, 0.3, implementation)
    assert out.dtype == dtype
    # One rounding per part and one of the sum.
    assert relative_error(out, union_attention(exact, 0.3)) <= 2 * TOLERANCE[dtype]
    assert [g.dtype for g in gradients(out, parts)] == [dtype] * 6


@pytest.mark.parametrize("by", ["nothing", "environment", "torch"])
def test_deterministic_backward_on_request(by, monkeypatch):
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    if by == "environment":
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    parts = make_parts("window_and_prefix")
    was_on = torch.are_deterministic_algorithms_enabled()
    with stand_in("flash_attention_2", monkeypatch) as library:
        torch.use_deterministic_algorithms(by == "torch")
        try:
            gradients(merged_flash_attention(parts, 0.3, "flash_attention_2"), parts)
        finally:
            torch.use_deterministic_algorithms(was_on)
    assert library.deterministic == [by != "nothing"] * 2


def test_second_derivatives_are_refused(implementation):
    parts = make_parts("window_and_prefix")
    out = merged_flash_attention(parts, 0.3, implementation)
    (gradient,) = torch.autograd.grad(out.square().sum(), parts[0].query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "implementation, module, package",
    [
        ("flash_attention_2", "flash_attn.flash_attn_interface", "flash-attn>=2.7.0"),
        ("flash_attention_3", "flash_attn_interface", "flash-attn-3"),
    ],
)
def test_a_missing_package_is_named(implementation, module, package, monkeypatch):
    # None in sys.modules makes an import fail, installed or not.
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{implementation}.*{package}"):
        merged_flash_attention(make_parts("one_part", dtype=torch.bfloat16), 0.3, implementation)


@pytest.mark.parametrize(
    "implementation, module, name",
    [
        ("flash_attention_2", "flash_attn.flash_attn_interface", "_flash_attn_varlen_forward"),
        ("flash_attention_3", "flash_attn_interface", "_flash_attn_forward"),
    ],
)
def test_an_old_release_is_refused(implementation, module, name, monkeypatch):
    with stand_in(implementation, monkeypatch):
        monkeypatch.setattr(sys.modules[module], name, lambda q, k, v, window_size=(-1, -1): None)
        with pytest.raises(ImportError, match=f"{implementation}.*or later.*older"):
            merged_flash_attention(make_parts("one_part"), 0.3, implementation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_refused(dtype, implementation, monkeypatch):
    monkeypatch.setattr(merged, "DTYPES", (torch.float16, torch.bfloat16))
    with pytest.raises(ValueError, match=f"query is {dtype}.*float16 and torch.bfloat16.*sdpa"):
        merged_flash_attention(make_parts("one_part", dtype=dtype), 0.3, implementation)


def test_bad_arguments_are_named(implementation):
    parts = make_parts("window_and_prefix")
    with pytest.raises(ValueError, match="parts is empty"):
        merged_flash_attention([], 0.3, implementation)
    with pytest.raises(ValueError, match=r"parts\[1\].query has shape \(12, 4, 8\)"):
        merged_flash_attention([parts[0], parts[1]._replace(query=parts[1].query[1:])], 0.3, implementation)
    for change in ({"window": 0}, {"causal": False}):
        with pytest.raises(ValueError, match=r"parts\[0\].window=.*Allowed"):
            merged_flash_attention([parts[0]._replace(**change), parts[1]], 0.3, implementation)
    with pytest.raises(ValueError, match="implementation='sdpa'.*flash_attention_2, flash_attention_3"):
        merged_flash_attention(parts, 0.3, "sdpa")


def test_dropout_is_refused_where_the_library_has_none(monkeypatch):
    with stand_in("flash_attention_3", monkeypatch), pytest.raises(ValueError, match="dropout=0.1"):
        merged_flash_attention(make_parts("one_part"), 0.3, "flash_attention_3", dropout=0.1)


def test_compiles_without_a_graph_break(monkeypatch):
    parts = make_parts("window_and_prefix", head_dim=5)
    expected = union_attention(parts, 0.3)

    def call(*tensors):
        return merged_flash_attention(with_tensors(parts, tensors), 0.3, "flash_attention_2")

    with stand_in("flash_attention_2", monkeypatch):
        as_custom_ops(sys.modules["flash_attn.flash_attn_interface"])
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves(parts))
        assert_same(out, parts, expected, gradients(expected, parts), 1e-12)


MASK = torch.ones(2, 23, dtype=torch.long)
MASK[0, :4] = MASK[1, [2, 9, 10, 22]] = 0
PACKED = torch.tensor([*range(6), 0, *range(16)])[None]
MODEL_CALLS = {
    "shorter_than_the_window": (2, 4, {}),
    "plain": (2, 23, {}),
    "padded": (2, 23, {"attention_mask": MASK}),
    "packed": (1, 23, {"position_ids": PACKED}),
    "packed_and_padded": (2, 23, {"position_ids": PACKED.expand(2, -1), "attention_mask": MASK}),
}


def with_implementation(implementation: str, variant: str, **overrides):
    model = variant_model(variant, dtype=torch.float64, num_key_value_heads=1, **overrides)
    # transformers' own setter asks for the package's metadata, which a stand-in has not.
    model.config._attn_implementation = implementation
    return model


@pytest.mark.parametrize("call, persistent", [*((call, 2) for call in MODEL_CALLS), ("packed_and_padded", 0)])
@pytest.mark.parametrize("variant", ["mal", "mag", "mac"])
def test_models_equal_eager_ones(variant, call, persistent, implementation):
    rows, columns, arguments = MODEL_CALLS[call]
    ids = random_ids(rows, columns)
    real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
    signs = torch.randint(0, 2, (int(real.sum()), 64)) * 2.0 - 1
    results = []
    for name in ("eager", implementation):
        model = with_implementation(name, variant, num_persistent_tokens=persistent).train()
        logits = model(ids, **arguments).logits[real]
        results.append({"logits": logits, **parameter_gradients(model, (logits * signs).sum())})
    expected, actual = results
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        assert_close(name, actual[name], reference, TOLERANCE[torch.float64])


@pytest.mark.parametrize("size", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("variant", ["mal", "mag", "mac"])
def test_models_equal_eager_ones_with_a_cache(variant, size, implementation):
    ids = random_ids(2, 23)
    expected = logits_of(with_implementation("eager", variant), ids, attention_mask=MASK)
    model = with_implementation(implementation, variant)
    cache = TitansCache(model.config)
    calls = zip(ids.split(size, 1), MASK.split(size, 1), strict=True)
    logits = torch.cat([logits_of(model, part, cache=cache, attention_mask=mask) for part, mask in calls], 1)
    assert_close("logits", logits[MASK.bool()], expected[MASK.bool()], TOLERANCE[torch.float64])


LONG_CASES = {
    "window": [([300, 1, 129], [300, 1, 129], True, 100), ([430], [5], False, None)],
    "decode": [([1, 1, 1], [300, 64, 7], True, None), ([3], [5], False, None)],
    "lonely": [([64, 200], [0, 150], True, None), ([64, 200], [3, 0], False, None)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LONG_CASES])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_real_library_is_as_exact_as_plain_attention(implementation, case):
    """At most twice the error of PyTorch's attention in bfloat16, against float64, in each output and gradient."""
    name = {"flash_attention_2": "flash_attn.flash_attn_interface", "flash_attention_3": "flash_attn_interface"}
    try:
        importlib.import_module(name[implementation])
    except ImportError as error:
        pytest.skip(f"{implementation} is not installed: {error}")
    parts = make_parts(LONG_CASES.get(case, case), head_dim=64, dtype=torch.bfloat16, device="cuda")
    exact = with_tensors(parts, [t.detach().double().requires_grad_() for t in leaves(parts)])
    results = []
    for out, given in (
        (union_attention(exact, 0.125), exact),
        (union_attention(parts, 0.125), parts),
        (merged_flash_attention(parts, 0.125, implementation), parts),
    ):
        results.append([out, *gradients(out, given)])
    for reference, plain, ours in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert relative_error(ours, reference) <= 2 * relative_error(plain, reference)
