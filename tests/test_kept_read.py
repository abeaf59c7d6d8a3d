# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of kept memories, however they are arranged, are sums of the memories' answers, one by one."""

import pytest
import torch

from titans_testing import assert_close, memory_network
from transformers_titans import kept_read, selected_read
from transformers_titans.inner_network import InnerNetwork
from transformers_titans.state_pair import Products


B, T, H, D, K, TOP = 2, 11, 3, 4, 5, 2
F64 = torch.float64


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Leaves of every gradient, for memories of two layers, the last of which nobody reads."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (B, T, H, D),
        "shares": (B, T, H, K),
        "w0": (B, K, H, D, 8),
        "w1": (B, K, H, 8, D),
        "scale": (H, 1, D),
        "shift": (H, 1, D),
    }
    named = {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}
    named["shares"][..., -1] = 0
    return {name: tensor.requires_grad_() for name, tensor in named.items()}


def network_of(tensors, rows: int = 1) -> InnerNetwork:
    norm = [tensors[name].repeat(rows, 1, 1) for name in ("scale", "shift")]
    return InnerNetwork(True, *norm, 1e-6, Products(None, F64))


def one_by_one(tensors, shares: torch.Tensor, residual: bool = True, has_norm: bool = True) -> torch.Tensor:
    """sum_i shares_i M^(i)(q) for shares (B, T, H, K)."""
    rows = []
    for b in range(B):
        for t in range(T):
            total = 0
            for i in range(K):
                norm = [tensors[name][:, 0] for name in ("scale", "shift")] if has_norm else [None, None]
                layers = [tensors[name][b, i] for name in ("w0", "w1")]
                answer = memory_network(tensors["q"][b, t], layers, *norm, residual=residual)
                total = total + shares[b, t, :, i, None] * answer
            rows.append(total)
    return torch.stack(rows).view(B, T, H, D)


def gradients(output: torch.Tensor, tensors) -> dict[str, torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=F64).view(output.shape)
    found = torch.autograd.grad((weight * output).sum(), list(tensors.values()), retain_graph=True)
    return dict(zip(tensors, found, strict=True))


def assert_reads(actual: torch.Tensor, expected: torch.Tensor, tensors) -> None:
    assert_close("answers", actual, expected, 1e-10)
    reference = gradients(expected, tensors)
    for name, gradient in gradients(actual, tensors).items():
        assert_close(f"gradient of {name}", gradient, reference[name], 1e-10)


def select() -> torch.Tensor:
    """(B, T, H, TOP) different memories of the first four, of unlike numbers; some tokens have only one, or none."""
    generator = torch.Generator().manual_seed(1)
    liking = torch.rand(B, T, H, K - 1, generator=generator) + torch.tensor([0.6, 0.2, 0.0, 0.0])
    wanted = liking.topk(TOP).indices
    wanted[:, :3, :, 1] = K
    wanted[0, :2] = K
    return wanted


def selected(tensors, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares (B, T, H, TOP) of what is wanted, and the same among all memories."""
    shares = torch.where(wanted < K, tensors["shares"].gather(3, wanted.clamp(max=K - 1)), 0)
    everywhere = shares.new_zeros(B, T, H, K + 1).scatter(3, wanted, shares)[..., :-1]
    return shares, everywhere


@pytest.mark.parametrize("elements", [24, 2**17], ids=["in_many_parts", "at_once"])
@pytest.mark.parametrize("alone", [1, 10**6], ids=["by_memory", "in_blocks"])
def test_selected_memories_are_read(tensors, monkeypatch, alone, elements):
    monkeypatch.setattr(selected_read, "ALONE", alone)
    monkeypatch.setattr(selected_read, "CPU_ELEMENTS", elements)
    wanted = select()
    shares, everywhere = selected(tensors, wanted)
    weights = [tensors["w0"], tensors["w1"]]
    actual = selected_read.read_selected(tensors["q"], shares, wanted, weights, network_of(tensors))
    assert_reads(actual, one_by_one(tensors, everywhere), tensors)


@pytest.mark.parametrize("residual", [False, True], ids=["bare", "residual"])
@pytest.mark.parametrize("has_norm", [False, True], ids=["without_norm", "norm"])
@pytest.mark.parametrize("alone", [1, 10**6], ids=["by_memory", "in_blocks"])
def test_selected_memories_of_other_networks_are_read(tensors, monkeypatch, alone, has_norm, residual):
    monkeypatch.setattr(selected_read, "ALONE", alone)
    wanted = select()
    shares, everywhere = selected(tensors, wanted)
    network = network_of(tensors)._replace(residual=residual)
    if not has_norm:
        network = network._replace(norm_weight=None, norm_bias=None)
        tensors = {name: t for name, t in tensors.items() if name not in ("scale", "shift")}
    weights = [tensors["w0"], tensors["w1"]]
    actual = selected_read.read_selected(tensors["q"], shares, wanted, weights, network)
    assert_reads(actual, one_by_one(tensors, everywhere, residual, has_norm), tensors)


@pytest.mark.parametrize("elements", [1, 2**17], ids=["in_many_parts", "at_once"])
def test_all_memories_are_read(tensors, monkeypatch, elements):
    monkeypatch.setattr(kept_read, "CPU_ELEMENTS", elements)
    first = torch.tensor([0, 2, 5, 9, T])
    shares = torch.where(torch.arange(T)[:, None, None] >= first, tensors["shares"], 0)
    spans = [(begin, T) for begin in first.tolist()]
    q, parts = (t.transpose(1, 2).flatten(0, 1) for t in (tensors["q"], shares))
    weights = [tensors["w0"], tensors["w1"]]
    actual = kept_read.read_kept(q, parts, weights, network_of(tensors, B), spans)
    actual = actual.unflatten(0, (B, H)).transpose(1, 2)
    assert_reads(actual, one_by_one(tensors, shares), tensors)


@pytest.mark.parametrize("few", [1, 3])
def test_few_tokens_read_alike(tensors, few):
    """What decodes has arrangements of its own."""
    wanted = select()
    shares, everywhere = selected(tensors, wanted)
    weights, at = [tensors["w0"], tensors["w1"]], slice(2, 2 + few)
    with torch.no_grad():
        expected = one_by_one(tensors, everywhere)[:, at]
        network = network_of(tensors)
        actual = selected_read.read_selected(tensors["q"][:, at], shares[:, at], wanted[:, at], weights, network)
        assert_close("of the selected ones", actual, expected, 1e-10)
        q, parts = (t[:, at].transpose(1, 2).flatten(0, 1) for t in (tensors["q"], everywhere))
        actual = kept_read.read_kept(q, parts, weights, network_of(tensors, B), [(0, few)] * K)
        assert_close("of all", actual.unflatten(0, (B, H)).transpose(1, 2), expected, 1e-10)


@pytest.mark.parametrize("which", ["all", "selected"])
def test_gradients_taken_under_autocast_are_not_rounded(tensors, which):
    """As those of the op: a state in float32 is differentiated in float32."""
    leaves = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    wanted = select()
    shares, everywhere = selected(leaves, wanted)
    network = network_of(leaves)._replace(products=Products(None, torch.float32))
    weights = [leaves["w0"], leaves["w1"]]
    if which == "all":
        network = network.map_norm(lambda t: t.repeat(B, 1, 1))
        q, parts = (t.transpose(1, 2).flatten(0, 1) for t in (leaves["q"], everywhere))
        output = kept_read.read_kept(q, parts, weights, network, [(0, T)] * K)
    else:
        output = selected_read.read_selected(leaves["q"], shares, wanted, weights, network)
    names = ["q", "shares", "w0", "w1"]

    def differentiate():
        return torch.autograd.grad(output.sum(), [leaves[name] for name in names], retain_graph=True)

    expected = differentiate()
    with torch.autocast("cpu", torch.bfloat16):
        actual = differentiate()
    for name, one, other in zip(names, actual, expected, strict=True):
        assert torch.equal(one, other), name
