# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory layer against titans-pytorch's: ``python benchmarks/memory_layer.py``.

Forward and backward of a whole layer, projections, convolution and gates included, of width 384 with 6 heads of 64 and
a memory network of depth 2 and expansion 4, on one row: chunks of 64 at 4,096 tokens, and of 16 at 2,048. Measured are
tokens per second, ratios round by round, and the peak memory of a call; `timing.py` says how, `peers.py` how the peer
is set up. Nothing is timed unless

- our layer's output and every gradient agree with the token-by-token form in float64, and so do those of float32 and
  of bfloat16 products, within their precision;
- the peer's loss and gradients are finite, its output depends on earlier chunks, and its gates for step, momentum and
  decay have gradients.

Writes results/memory_layer.json and memory_layer.md.
"""

import argparse
from collections.abc import Callable

import torch
from checks import products_in, refuse, refuse_unless_alike, refuse_unless_close
from peers import memory_layer as peer_layer
from timing import Spread, alternate, markdown_table, peak_memory, report, speedup, without_emulated

from transformers_titans import TitansConfig, TitansNeuralMemory


WIDTH, HEADS = 384, 6
SETTINGS = ((64, 4096), (16, 2048))
OURS, OURS_BF16 = "ours", "ours, bfloat16 products"
NATIVE, NATIVE_BF16 = "ours, native", "ours, native, bfloat16 products"
BACKENDS = {NATIVE: "native", NATIVE_BF16: "native"}
PEER, PEER_EXACT, PEER_BF16 = "titans-pytorch", "titans-pytorch, eq. 16", "titans-pytorch, bfloat16 products"
OURS_ALL = (OURS, NATIVE, OURS_BF16, NATIVE_BF16)
IN_BF16 = (OURS_BF16, NATIVE_BF16, PEER_BF16)
CONTENDERS = without_emulated((*OURS_ALL, PEER, PEER_EXACT, PEER_BF16), IN_BF16)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def our_layer(chunk_size: int, backend: str = "auto") -> TitansNeuralMemory:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "memory_chunk_size": chunk_size}
    return TitansNeuralMemory(TitansConfig(**sizes, memory_backend=backend))


def layer_of(name: str, chunk_size: int) -> torch.nn.Module:
    if name in OURS_ALL:
        return our_layer(chunk_size, BACKENDS.get(name, "auto"))
    torch.manual_seed(0)
    return peer_layer(WIDTH, HEADS, chunk_size, exact=name == PEER_EXACT)


def precision_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name in IN_BF16 else torch.float32


def forward_and_backward(layer: torch.nn.Module, x: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """The output; gradients are left in the layer's parameters and in x."""
    layer.zero_grad()
    x.grad = None
    with products_in(precision):
        y = layer(x)[0]
        y.to(x.dtype).square().mean().backward()
    return y


def step(name: str, chunk_size: int, length: int) -> Callable[[], None]:
    layer = layer_of(name, chunk_size)
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def run() -> None:
        forward_and_backward(layer, x, precision_of(name))

    return run


def warm_and_step(name: str, chunk_size: int, length: int) -> tuple[Callable, Callable]:
    return step(name, chunk_size, 2 * chunk_size), step(name, chunk_size, length)


def check_ours(chunk_size: int) -> dict[str, float]:
    """Largest relative error by precision, against the token-by-token form; refuses if one is too large."""
    x = torch.randn(1, 2 * chunk_size + chunk_size // 2, WIDTH, dtype=torch.float64)

    def run(layer: torch.nn.Module, precision: torch.dtype) -> dict[str, torch.Tensor]:
        inputs = x.to(next(layer.parameters()).dtype, copy=True).requires_grad_()
        y = forward_and_backward(layer, inputs, precision)
        gradients = {f"gradient of {key}": p.grad.clone() for key, p in layer.named_parameters()}
        return {"output": y.detach(), "gradient of the input": inputs.grad} | gradients

    return refuse_unless_alike(f"our layer (chunk {chunk_size})", run, our_layer(chunk_size), TOLERANCE)


def check_backends(chunk_size: int, length: int) -> None:
    """The native form against the plain one, both in float32 and at full length."""
    x = torch.randn(1, length, WIDTH)
    results = []
    for name in (OURS, NATIVE):
        layer, inputs = layer_of(name, chunk_size), x.clone().requires_grad_()
        y = forward_and_backward(layer, inputs, torch.float32).detach()
        results.append({"output": y, "input": inputs.grad} | {key: p.grad for key, p in layer.named_parameters()})
    for key, tensor in results[0].items():
        refuse_unless_close(f"{key} of the layer {NATIVE!r}", results[1][key], tensor, TOLERANCE[torch.float32])


def check_peer(chunk_size: int, name: str) -> None:
    layer = layer_of(name, chunk_size)
    x = torch.randn(1, 4 * chunk_size, WIDTH).requires_grad_()
    y = forward_and_backward(layer, x, precision_of(name))
    gates = ("to_adaptive_step.0.weight", "to_momentum.0.weight", "to_decay_factor.0.weight")
    parameters = dict(layer.named_parameters())
    gradients = {"input": x.grad} | {gate: parameters[gate].grad for gate in gates}
    for key, gradient in gradients.items():
        if gradient is None or not torch.isfinite(gradient).all() or not gradient.any():
            refuse(f"the gradient of {key} of {name} is absent, zero or not finite")
    with torch.no_grad(), products_in(precision_of(name)):
        changed = x.detach().clone()
        changed[:, 0] += 1
        last = slice(3 * chunk_size, None)
        if not torch.isfinite(y).all() or torch.equal(layer(changed)[0][:, last], y[:, last]):
            refuse(f"the output of {name} is not finite or does not depend on earlier chunks")


def measure(chunk_size: int, length: int, rounds: int) -> dict:
    errors = check_ours(chunk_size)
    check_backends(chunk_size, length)
    for name in CONTENDERS:
        if name not in OURS_ALL:
            check_peer(chunk_size, name)
    steps = {name: step(name, chunk_size, length) for name in CONTENDERS}
    times = alternate(steps, rounds, f"chunk {chunk_size}, {length} tokens")
    del steps
    return {
        "chunk": chunk_size,
        "length": length,
        "rounds": rounds,
        "errors": errors,
        "tokens per second": {name: Spread.of([length / t for t in times[name]]) for name in CONTENDERS},
        "over titans-pytorch": {name: speedup(times, name, PEER) for name in CONTENDERS},
        "peak bytes": {name: peak_memory(warm_and_step, name, chunk_size, length) for name in CONTENDERS},
    }


def table(results: list[dict]) -> list[str]:
    header = ("chunk", "tokens", "layer", "tokens/s", "over titans-pytorch", "peak memory", "of titans-pytorch's")
    rows = []
    for r in results:
        for name in CONTENDERS:
            peak = r["peak bytes"][name]
            rate, ratio = r["tokens per second"][name], r["over titans-pytorch"][name]
            share = peak / r["peak bytes"][PEER]
            cells = (f"{rate.median:,.0f}", ratio, f"{peak / 1e6:,.0f} MB", f"{share:.2f}")
            rows.append((r["chunk"], r["length"], name, *cells))
    lines = markdown_table(header, rows)
    lines += [
        "",
        "Ratios are medians over rounds with the lowest and the highest. `titans-pytorch` takes all inner gradients "
        "of a call at the start weights, as by default; with `eq. 16` at those of each chunk's start, as ours do.",
        "",
        "Largest relative error of our output and gradients against the token-by-token form in float64:",
        "",
    ]
    precisions = list(results[0]["errors"])
    return lines + markdown_table(
        ("chunk", *precisions), [(r["chunk"], *(f"{r['errors'][p]:.1e}" for p in precisions)) for r in results]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shorten", type=int, default=1, help="divides the number of tokens, for a trial, not kept")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = [measure(chunk, length // arguments.shorten, arguments.rounds) for chunk, length in SETTINGS]
    title, keep = "The memory layer, forward and backward", arguments.shorten == 1
    report("memory_layer", title, {"results": results}, table(results), keep)


if __name__ == "__main__":
    main()
