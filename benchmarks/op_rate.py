# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""How near the op comes to the machine's matrix rate, and where the rest goes: ``python benchmarks/op_rate.py``.

The op alone, with queries, keys, values and gates given: one row, 6 heads of 64, depth 2, expansion 4, chunks of 64 at
4,096 tokens and of 16 at 2,048; forward, and forward with backward; in float32, and with bfloat16 queries, keys,
values and products; as a CPU computes it by default, and as backend="native" does. Counted are the floating-point
operations of the products that the formulas in MEMORY.md need, `products`; what the backward computes a second time
to save memory is no use and is named apart. The yardsticks are, in the same rounds, one large product, and for each
shape of the op's own a batched product as large as a chunk of all heads, and as 16 chunks. Nothing is timed unless
output, state and every gradient agree with the token-by-token form in float64.

Writes results/op_rate.json and op_rate.md.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from checks import products_in, refuse_unless_close
from timing import Spread, alternate, markdown_table, report, without_emulated
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from transformers_titans.memory_ops import neural_memory
from transformers_titans.memory_state import MemoryState


HEADS, WIDTHS = 6, (64, 256, 64)
SETTINGS = ((64, 4096), (16, 2048))
LARGE, SPAN = 2048, 16
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
PRECISIONS = {name: getattr(torch, name) for name in without_emulated(("float32", "bfloat16"), ("bfloat16",))}
# What a row's name begins with, and the backend that it is of.
BACKENDS = {"": "auto", "native: ": "native"}

# What torch's operators are for; the first name that an operator's name contains decides.
KINDS = {
    "matrix products": ("mm", "matmul", "linear", "dot"),
    "copies": ("copy", "cat", "stack", "clone", "contiguous", "pad", "gather", "index", "fill", "zero"),
    "sums": ("sum", "mean", "cumprod", "norm"),
    "views and the like": (
        "empty", "view", "reshape", "slice", "select", "transpose", "expand", "squeeze", "split", "unbind", "detach",
        "as_strided", "permute", "alias", "resize", "to", "item", "flatten", "narrow", "result_type", "set_",
    ),
}  # fmt: skip


class Product(NamedTuple):
    """(m, k) x (k, n), and how often a chunk of one head needs it: forward, backward, and in the backward again."""

    m: int
    k: int
    n: int
    forward: int
    backward: int
    again: int

    def flops(self, kinds: tuple[str, ...]) -> int:
        return 2 * self.m * self.k * self.n * sum(getattr(self, kind) for kind in kinds)


def products(b: int) -> list[Product]:
    """The coefficients', and by layer those with a state, those that sum over tokens, and those between tokens."""
    result = [Product(b, b, b, 1, 4, 1)]
    for layer, (d, h) in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True)):
        upper = int(layer > 0)
        result += [
            # The inner forward and the read through W and S; back: the update's, and the inner gradient's own.
            Product(b, d, h, 3, 2 + upper, 3),
            # The inner error; back through the read, the update and the inner forward.
            Product(b, h, d, upper, 5, upper),
            # The update of W and S; back: gradients of W and S from the read, and of W from the inner gradient.
            Product(d, b, h, 2, 3 + upper, 0),
            Product(b, d, b, 1, 0, 1),
            Product(b, h, b, 0, 1, 0),
            Product(b, b, d, 0, 2, 0),
            Product(b, b, h, 1, 1, 1),
        ]
    return result


def flops_per_token(b: int, *kinds: str) -> float:
    return HEADS * sum(product.flops(kinds) for product in products(b)) / b


class OpCall(NamedTuple):
    """The op's tensors: tokens (1, T, H, D) and (1, T, H), start weights (H, D_in, D_out), LN's (H, D)."""

    tokens: list[torch.Tensor]
    weights: list[torch.Tensor]
    norm: list[torch.Tensor]

    @classmethod
    def make(cls, length: int, precision: torch.dtype) -> "OpCall":
        """In float64 all is float64; in bfloat16 queries, keys and values alone are."""
        generator = torch.Generator().manual_seed(0)
        wide = torch.float64 if precision == torch.float64 else torch.float32

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        d = WIDTHS[0]
        q, k, v = (torch.nn.functional.normalize(normal(1, length, HEADS, d), dim=-1).to(precision) for _ in range(3))
        gates = [torch.sigmoid(start + normal(1, length, HEADS)).to(wide) for start in (-2.0, -7.0, 0.0)]
        weights = [normal(HEADS, *shape).to(wide) for shape in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)]
        weights[1] *= 1.5 * WIDTHS[1] ** -0.5
        norm = [torch.full((HEADS, d), d**-0.5, dtype=wide), torch.zeros(HEADS, d, dtype=wide)]
        for tensor in (q, k, v, *gates, *weights, *norm):
            tensor.requires_grad_()
        return cls([q, k, v, *gates], weights, norm)

    def inputs(self) -> dict[str, torch.Tensor]:
        names = ("q", "k", "v", "theta", "alpha", "eta", "W_1", "W_2", "norm_weight", "norm_bias")
        return dict(zip(names, (*self.tokens, *self.weights, *self.norm), strict=True))

    def forward(self, chunk_size: int, backend: str = "auto"):
        return neural_memory(
            *self.tokens,
            MemoryState.initial(self.weights, 1),
            chunk_size=chunk_size,
            norm_weight=self.norm[0],
            norm_bias=self.norm[1],
            backend=backend,
        )

    def forward_and_backward(self, chunk_size: int, backend: str = "auto") -> dict[str, torch.Tensor]:
        """Output, state, and the gradient of everything given."""
        result = self.forward(chunk_size, backend)
        outputs = {"output": result.output, "weights": result.state.weights[0], "momentum": result.state.momentum[0]}
        bars = [torch.ones_like(result.output), *(0.01 * torch.ones_like(outputs[key]) for key in list(outputs)[1:])]
        gradients = torch.autograd.grad(list(outputs.values()), list(self.inputs().values()), bars)
        names = (f"gradient of {name}" for name in self.inputs())
        return outputs | dict(zip(names, gradients, strict=True))


def check(chunk_size: int) -> dict[str, float]:
    """Largest relative error by precision, against the token-by-token form; refuses if one is too large."""
    length = 2 * chunk_size + chunk_size // 2
    reference = OpCall.make(length, torch.float64).forward_and_backward(chunk_size, "recurrent")
    errors = {}
    for label, backend in BACKENDS.items():
        for precision, tolerance in TOLERANCE.items():
            with products_in(precision):
                results = OpCall.make(length, precision).forward_and_backward(chunk_size, backend)
            name = label + str(precision).removeprefix("torch.")
            what = f"of the op (chunk {chunk_size}), {name}"
            errors[name] = max(
                refuse_unless_close(f"{key} {what}", results[key], reference[key], tolerance) for key in reference
            )
    return errors


def large_product(dtype: torch.dtype) -> Callable[[], None]:
    a, b = (torch.randn(LARGE, LARGE).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def in_precision(precision: torch.dtype, function: Callable, *arguments) -> Callable[[], None]:
    def run() -> None:
        with products_in(precision):
            function(*arguments)

    return run


def contenders(chunk_size: int, length: int) -> dict[str, Callable[[], None]]:
    calls: dict[str, Callable[[], None]] = {}
    for name, precision in PRECISIONS.items():
        call = OpCall.make(length, precision)
        for label, backend in BACKENDS.items():
            arguments = (chunk_size, backend)
            calls[f"{label}forward, {name}"] = in_precision(precision, torch.no_grad()(call.forward), *arguments)
            calls[f"{label}forward and backward, {name}"] = in_precision(
                precision, call.forward_and_backward, *arguments
            )
        calls[f"large product, {name}"] = large_product(precision)
    return calls


def product_rate(product: Product, batch: int, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of a batched product, repeated for so long."""
    a = torch.randn(batch, product.m, product.k).to(dtype)
    b = torch.randn(batch, product.k, product.n).to(dtype)
    torch.bmm(a, b)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        torch.bmm(a, b)
        calls += 1
    return 2 * batch * product.m * product.k * product.n * calls / elapsed


def shape_rates(chunk_size: int, seconds: float) -> list[dict]:
    """By shape: its share of the useful FLOP of forward and backward, and the rates of batched products."""
    shares: dict[Product, float] = {}
    for product in products(chunk_size):
        shape = product._replace(forward=1, backward=0, again=0)
        flops = product.flops(("forward", "backward")) * HEADS / chunk_size
        shares[shape] = shares.get(shape, 0.0) + flops / flops_per_token(chunk_size, "forward", "backward")
    rows = []
    for shape, share in tqdm(sorted(shares.items(), key=lambda item: -item[1]), desc="shapes"):
        rates = {
            f"{name}, {batch} at once": product_rate(shape, batch, dtype, seconds)
            for name, dtype in PRECISIONS.items()
            for batch in (HEADS, SPAN * HEADS)
        }
        rows.append({"shape": f"({shape.m}, {shape.k}) x ({shape.k}, {shape.n})", "share": share, "rates": rates})
    return rows


def kind_of(operator: str) -> str:
    if not operator.startswith("aten::"):
        return "autograd, Python, compiled code"
    name = operator.removeprefix("aten::")
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "elementwise"


def where_time_goes(chunk_size: int, length: int, precision: torch.dtype) -> dict[str, float]:
    """Shares of the wall time of forward and backward by kind of operator, and calls of operators per chunk.

    The profiler slows each operator down a little, so the shares of small ones are upper bounds.
    """
    call = OpCall.make(length, precision)
    call.forward_and_backward(chunk_size)
    with products_in(precision), profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        call.forward_and_backward(chunk_size)
        wall = time.perf_counter() - start
    shares: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = kind_of(event.key)
        shares[kind] = shares.get(kind, 0.0) + event.self_cpu_time_total / 1e6 / wall
    shares["between operators"] = max(1 - sum(shares.values()), 0.0)
    leaves = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
    return {**shares, "operators per chunk": leaves / (length / chunk_size)}


def measure(chunk_size: int, length: int, rounds: int) -> dict:
    errors = check(chunk_size)
    times = alternate(contenders(chunk_size, length), rounds, f"chunk {chunk_size}, {length} tokens")
    counts = {
        kind: flops_per_token(chunk_size, *kinds)
        for kind, kinds in (
            ("forward", ("forward",)),
            ("forward and backward", ("forward", "backward")),
            ("computed again", ("again",)),
        )
    }
    rates, shares = {}, {}
    for name in times:
        what, precision = name.rsplit(", ", 1)
        flops = 2 * LARGE**3 if what == "large product" else counts[what.removeprefix("native: ")] * length
        rates[name] = Spread.of([flops / t for t in times[name]])
        large = [2 * LARGE**3 / t for t in times[f"large product, {precision}"]]
        shares[name] = Spread.of([flops / t / rate for t, rate in zip(times[name], large, strict=True)])
    return {
        "chunk": chunk_size,
        "length": length,
        "rounds": rounds,
        "errors": errors,
        "FLOP per token": counts,
        "FLOP per second": rates,
        "share of the large product": shares,
        "seconds": {name: Spread.of(values) for name, values in times.items()},
        "shapes": shape_rates(chunk_size, 0.2),
        "time": {name: where_time_goes(chunk_size, length, dtype) for name, dtype in PRECISIONS.items()},
    }


def table(results: list[dict]) -> list[str]:
    lines = []
    for r in results:
        counts = ", ".join(f"{kind} {count / 1e6:.2f}" for kind, count in r["FLOP per token"].items())
        errors = ", ".join(f"{error:.1e} in {precision}" for precision, error in r["errors"].items())
        lines += [
            f"## Chunks of {r['chunk']}, {r['length']:,} tokens",
            "",
            f"MFLOP per token: {counts}. Largest relative error against the token-by-token form in float64: {errors}.",
            "",
        ]
        rows = []
        for name, rate in r["FLOP per second"].items():
            speed = "" if name.startswith("large") else f"{r['length'] / r['seconds'][name].median:,.0f}"
            rows.append((name, speed, f"{rate.median / 1e9:.0f}", r["share of the large product"][name]))
        lines += markdown_table(("", "tokens/s", "useful GFLOP/s", "of the large product's"), rows)
        lines += ["", "The op's own products alone, batched, GFLOP/s:", ""]
        columns, shapes = list(r["shapes"][0]["rates"]), r["shapes"]
        rows = [(s["shape"], f"{s['share']:.0%}", *(f"{s['rates'][c] / 1e9:.0f}" for c in columns)) for s in shapes]
        # What the op's useful products would come to if nothing else took time.
        together = [1 / sum(s["share"] / s["rates"][c] for s in shapes) for c in columns]
        rows.append(("all together", "100%", *(f"{rate / 1e9:.0f}" for rate in together)))
        lines += markdown_table(("shape", "of useful FLOP", *columns), rows)
        lines += ["", "Where the time of forward and backward goes by default:", ""]
        kinds = [kind for kind in r["time"]["float32"] if kind != "operators per chunk"]
        rows = [(kind, *(f"{shares.get(kind, 0):.0%}" for shares in r["time"].values())) for kind in kinds]
        rows.append(("operators per chunk", *(f"{s['operators per chunk']:.0f}" for s in r["time"].values())))
        lines += [*markdown_table(("", *r["time"]), rows), ""]
    return lines[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shorten", type=int, default=1, help="divides the number of tokens, for a trial, not kept")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = [measure(chunk, length // arguments.shorten, arguments.rounds) for chunk, length in SETTINGS]
    title, keep = "The op's share of the machine's matrix rate", arguments.shorten == 1
    report("op_rate", title, {"results": results}, table(results), keep)


if __name__ == "__main__":
    main()
