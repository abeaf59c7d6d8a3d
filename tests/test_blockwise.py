# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Convolution and activation in blocks of tokens against torch's own, and how they depend on their inputs."""

import pytest
import torch
import torch.nn.functional as F

from titans_testing import TOLERANCE, assert_close
from transformers_titans import blockwise
from transformers_titans.attention_titans import rotate
from transformers_titans.blockwise import BLOCK, depthwise_convolution, rms_norm, silu_and_unit, takes_blocks


F64 = torch.float64
LENGTHS = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]


def results(function, *tensors):
    """The output, and the gradients of the tensors through an output weighted at random, itself not contiguous."""
    tensors = [t.clone().requires_grad_() for t in tensors]
    y = function(*tensors)
    weight = torch.randn(y.shape[::-1], dtype=y.dtype, generator=torch.Generator().manual_seed(1)).permute(
        *reversed(range(y.dim()))
    )
    return [y, *torch.autograd.grad((y * weight).sum(), tensors)]


def assert_alike(actual, expected):
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        assert_close(f"result {index}", *pair, TOLERANCE[F64])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_equals_torchs(length, taps):
    x, weight = torch.randn(2, length + taps - 1, 6, dtype=F64), torch.randn(6, 1, taps, dtype=F64)
    expected = results(lambda x, w: F.conv1d(x.mT, w, groups=6).mT, x, weight)
    assert_alike(results(depthwise_convolution, x, weight), expected)


@pytest.mark.parametrize("shape", [(5, 6), (2, 37, 6), (2, 7, 3, 6)])
@pytest.mark.parametrize("elements", [1, 48, 1 << 18])
def test_rms_norm_equals_torchs(shape, elements, monkeypatch):
    """In blocks of one vector, of some and of all, of tensors that do not lie as their shapes say."""
    monkeypatch.setattr(blockwise, "ELEMENTS", elements)
    x, weight = torch.randn(shape, dtype=F64).transpose(0, -2), torch.randn(6, dtype=F64)
    x[0] = 0
    expected = results(lambda x, w: F.rms_norm(x, (6,), w, 1e-6), x, weight)
    assert_alike(results(lambda x, w: rms_norm(x, w, 1e-6), x, weight), expected)


def cos_and_sin(dtype):
    angles = torch.randn(1, 5, 3, dtype=dtype).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def test_rotation_equals_torchs():
    cos, sin = cos_and_sin(F64)
    parts = [torch.randn(2, heads, 5, 6, dtype=F64) for heads in (3, 1)]

    def plain(*parts):
        x = torch.cat(parts, 1)
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

    expected = results(plain, *parts)
    assert_alike(results(lambda *parts: torch.cat(rotate(parts, cos, sin), 1), *parts), expected)
    with torch.no_grad():
        assert_alike([torch.cat(rotate(parts, cos, sin), 1)], expected[:1])


def test_rotation_under_autocast_rounds_once():
    cos, sin = cos_and_sin(torch.float32)
    x, bar = torch.randn(2, 2, 3, 5, 6).bfloat16()

    def run(x):
        x = x.clone().requires_grad_()
        (y,) = rotate([x], cos, sin)
        return y, torch.autograd.grad(y, x, bar.to(y.dtype))[0]

    expected = run(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(x)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())


def plain_silu_and_unit(x):
    x = F.silu(x)
    return torch.cat([F.normalize(x[:, :, :2], dim=-1, eps=1e-6), x[:, :, 2:]], 2)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("parts", [1, 3])
def test_silu_and_unit_equal_torchs(length, parts):
    x = torch.randn(2, length, parts, 2, 5, dtype=F64)
    assert_alike(results(silu_and_unit, x), results(plain_silu_and_unit, x))


def test_vectors_of_no_length():
    """Zeros, as at padding, and vectors shorter than what they are divided by."""
    x = torch.randn(1, 3, 3, 2, 5, dtype=F64)
    x[:, 0] = 0
    x[:, 1] *= 1e-7
    assert_alike(results(silu_and_unit, x), results(plain_silu_and_unit, x))


def test_queries_and_keys_have_length_one_and_values_do_not():
    y = silu_and_unit(torch.randn(2, BLOCK + 7, 3, 2, 5, dtype=F64))
    length = y.norm(dim=-1)
    assert_close("queries and keys", length[:, :, :2], torch.ones_like(length[:, :, :2]), TOLERANCE[F64])
    assert (length[:, :, 2] - 1).abs().min() > 1e-4


def test_a_token_reaches_the_next_taps_only():
    x, weight = torch.randn(1, 20, 3, dtype=F64), torch.randn(3, 1, 4, dtype=F64)
    changed = x.clone()
    changed[:, 9] += 1
    moved = (depthwise_convolution(changed, weight) != depthwise_convolution(x, weight)).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == [6, 7, 8, 9]


def test_only_where_nothing_is_lost():
    x = torch.zeros(2, 3)
    assert takes_blocks(x) and takes_blocks(x.double(), x.double())
    assert not takes_blocks(x.bfloat16()) and not takes_blocks(x, x.double()) and not takes_blocks(x.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_blocks(x) and takes_blocks(x.bfloat16(), x)
        assert not takes_blocks(x.bfloat16(), x.bfloat16())


@pytest.mark.parametrize("length", [9, 2 * BLOCK + 3])
def test_under_autocast_only_what_leaves_a_form_is_rounded(length):
    """To the bit what float32 gives for the same numbers, rounded once; so are the gradients."""
    x = torch.randn(2, length, 3 * 2 * 5).bfloat16()
    weight, bar = torch.randn(30, 1, 4, requires_grad=True), torch.randn(2, length - 3, 30).bfloat16()

    def run(x):
        x = x.clone().requires_grad_()
        y = depthwise_convolution(x, weight)
        z = silu_and_unit(x.unflatten(-1, (3, 2, 5)))
        bars = [bar.to(y.dtype), x.detach().view_as(z)]
        return y, z, *torch.autograd.grad(y, (x, weight), bars[0]), torch.autograd.grad(z, x, bars[1])[0]

    expected = run(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(x)
    assert [t.dtype for t in actual] == [*[torch.bfloat16] * 3, torch.float32, torch.bfloat16]
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want.to(got.dtype))
