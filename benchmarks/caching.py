# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What memory caching costs: ``python benchmarks/caching.py``.

Training: forward and backward of whole models on one row of 1k to 16k tokens: `lmm` of width 384 and 2 layers without
caching, with SSC (2 memories a token and head), with GRM and with GRM over logarithmic segments (Log-Linear++), in
segments of 256, and transformers' Llama of as many parameters. Measured are tokens per second, each model's speed over
that without caching, round by round, and the peak memory of a step; the models take turns. The paper's figure 4 plots
the same. From the first context to the last, the time that GRM takes beside no caching grows by one factor, and the
operations of its reads by another; the first should not be larger.

Decoding: the time of a token behind 1k to 16k others, greedy; what is kept grows with the context.

The layer against the package `memory-caching` (GRM, width 384, 6 heads): forward and backward of 2,048 tokens in
segments of 256; `caching_peer.py` says how the peer is set up.

Nothing is timed unless, for each way of caching, our layer's output and every gradient are those of the tests' oracle,
and the peer's output is finite, has the right shape and depends on its queries and on segments long past.

Writes results/caching.json, caching.md and the plots caching.png and caching_decoding.png, which plots.py draws again.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from caching_peer import caching_layer
from checks import refuse, refuse_unless_close
from context import Decoding, cache_bytes, contexts_of, short, text_of
from plots import draw
from timing import Spread, alternate, markdown_table, peak_memory, report, speedup
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_titans import TitansConfig, TitansForCausalLM, TitansNeuralMemory


WIDTH, HEADS, LAYERS, SEGMENT, TOP_K = 384, 6, 2, 256, 2
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
DECODED = (1024, 4096, 16384)
NEW_TOKENS = 32
PLAIN, SSC, GRM, LOGARITHMIC, LLAMA = "no caching", "SSC", "GRM", "Log-Linear++", "Llama"
CACHING = {
    SSC: {"memory_caching": "ssc", "cache_top_k": TOP_K},
    GRM: {"memory_caching": "grm"},
    LOGARITHMIC: {"memory_caching": "grm", "cache_segmentation": "logarithmic"},
}
OURS = (PLAIN, *CACHING)
# Widths of the MLP that make the models alike in size; with caching they have the connector's projection more.
MLP = dict.fromkeys(OURS, 1664) | {LLAMA: 1920}
PEER, PEER_STOPPED = "memory-caching", "memory-caching, stopgrad"
LAYER_LENGTH = 2048
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def config_of(name: str, **fields) -> TitansConfig:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": 256}
    sizes |= {"intermediate_size": MLP[name], "cache_segment_length": SEGMENT, "max_position_embeddings": 2**20}
    return TitansConfig(**(sizes | CACHING.get(name, {}) | fields))


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name != LLAMA:
        return TitansForCausalLM(config_of(name))
    config = config_of(PLAIN, intermediate_size=MLP[LLAMA])
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    fields = {field: getattr(config, field) for field in (*names, "intermediate_size")}
    return LlamaForCausalLM(LlamaConfig(**fields))


def layer_of(name: str, **fields) -> TitansNeuralMemory:
    torch.manual_seed(0)
    return TitansNeuralMemory(config_of(name, **fields))


def gradients(layer: torch.nn.Module, run: Callable, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the gradients that a loss of it has in the input and in each parameter."""
    named = {"the input": x.detach().clone().requires_grad_()} | dict(layer.named_parameters())
    y = run(named["the input"])
    found = torch.autograd.grad(y.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True)
    return {"output": y.detach()} | dict(zip(named, found, strict=True))


def check_ours(name: str) -> dict[str, float]:
    """The largest relative errors of a layer's output and gradients against the oracle, by precision."""
    folder = str(Path(__file__).parents[1] / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    oracle = importlib.import_module("caching_oracle").oracle_layer
    layer = layer_of(name, memory_chunk_size=8, cache_segment_length=32).double()
    # Five segments and a part: more memories than SSC reads, each by as many tokens as when timed; blocks of 4 + 1.
    x = torch.randn(1, 5 * 32 + 11, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, errors = gradients(layer, lambda row: oracle(layer, row[0]).unsqueeze(0), x), {}
    for dtype, tolerance in TOLERANCE.items():
        found, precision = gradients(layer.to(dtype), lambda row: layer(row)[0], x.to(dtype)), str(dtype)[6:]
        errors[precision] = max(
            refuse_unless_close(f"{key} of the layer, {name}, {precision}", found[key], expected[key], tolerance)
            for key in expected
        )
    return errors


def check_peer(name: str) -> None:
    layer = peer_layer(name, 16)
    x = torch.randn(1, 50, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    results = gradients(layer, layer, x)
    for key in ("output", "the input", "q_proj.weight", "u_proj.weight"):
        if not torch.isfinite(results[key]).all() or not results[key].any():
            refuse(f"the {key} of {name} or its gradient is absent, zero or not finite")
    changed = x.clone()
    changed[:, :16] += 1
    torch.manual_seed(2)
    other = layer(changed)
    if other.shape != x.shape or torch.equal(other[:, 48:], results["output"][:, 48:]):
        refuse(f"the output of {name} has the shape {tuple(other.shape)} or does not depend on earlier segments")


def peer_layer(name: str, segment: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return caching_layer(WIDTH, HEADS, segment, differentiable=name == PEER)


def training_step(name: str, length: int) -> Callable[[], None]:
    model, text = model_of(name).train(), text_of(length)

    def run() -> None:
        model.zero_grad()
        model(text, labels=text, use_cache=False).loss.backward()

    return run


def warm_and_step(name: str, length: int) -> tuple[Callable, Callable]:
    return training_step(name, 2 * SEGMENT), training_step(name, length)


def read_operations(length: int) -> int:
    """Floating-point operations of GRM's reads of kept memories in a step of the model.

    A read is two products per layer of a memory; its gradient computes them again, and takes two more for each.
    """
    reads = sum(t // SEGMENT for t in range(length))
    head_dim = WIDTH // HEADS
    return LAYERS * HEADS * reads * 2 * 4 * (2 * head_dim * 4 * head_dim)


def measure_training(contexts: list[int], rounds: int) -> dict:
    counts = {name: sum(p.numel() for p in model_of(name).parameters()) for name in MLP}
    if max(counts.values()) > 1.1 * min(counts.values()):
        refuse(f"the models' parameter counts differ by more than 10 %: {counts}")
    rates, ratios, peaks, extra = ({name: {} for name in MLP} for _ in range(4))
    for length in contexts:
        times = alternate({name: training_step(name, length) for name in MLP}, rounds, f"training, {short(length)}")
        for name in MLP:
            rates[name][length] = Spread.of([length / t for t in times[name]])
            ratios[name][length] = speedup(times, name, PLAIN)
            extra[name][length] = Spread.of([t - p for t, p in zip(times[name], times[PLAIN], strict=True)])
            peaks[name][length] = peak_memory(warm_and_step, name, length)
    first, last = contexts[0], contexts[-1]
    return {
        "parameters": counts,
        "tokens per second": rates,
        "over no caching": ratios,
        "peak bytes": peaks,
        "growth": {
            "contexts": (first, last),
            "time of GRM": extra[GRM][last].median / extra[GRM][first].median,
            "operations of its reads": read_operations(last) / read_operations(first),
            "operations per second of its time": read_operations(last) / extra[GRM][last].median,
        },
    }


def measure_decoding(contexts: list[int], rounds: int) -> dict:
    tasks: dict[str, Decoding] = {}
    sizes: dict[str, dict[int, int]] = {}
    for name in MLP:
        model = model_of(name).eval()
        caches = contexts_of(name, model, contexts)
        sizes[name] = {length: cache_bytes(cache) for length, cache in caches.items()}
        tasks |= {f"{name} {n}": Decoding(model, cache, NEW_TOKENS) for n, cache in caches.items()}
    calls = {key: task.run for key, task in tasks.items()}
    times = alternate(calls, rounds, "decoding", {key: task.rewind for key, task in tasks.items()})
    milliseconds = {
        name: {n: Spread.of([1e3 * t / NEW_TOKENS for t in times[f"{name} {n}"]]) for n in contexts} for name in MLP
    }
    return {"milliseconds per token": milliseconds, "cache bytes": sizes}


def measure_layer(length: int, rounds: int) -> dict:
    """Forward and backward of a layer, ours with chunks of 64, which is the default, and of 16, in both CPU forms."""
    for name in (PEER, PEER_STOPPED):
        check_peer(name)
    layers = {}
    for form, backend in (("ours", "auto"), ("ours, native", "native")):
        for chunk in (64, 16):
            layer = layer_of(GRM, memory_chunk_size=chunk, memory_backend=backend)
            layers[f"{form}, chunks of {chunk}"] = layer
    layers |= {name: peer_layer(name, SEGMENT) for name in (PEER, PEER_STOPPED)}
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step(layer: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            layer.zero_grad()
            y = layer(x)
            (y if torch.is_tensor(y) else y[0]).square().mean().backward()

        return run

    times = alternate({name: step(layer) for name, layer in layers.items()}, rounds, f"layer, {length} tokens")
    return {
        "length": length,
        "tokens per second": {name: Spread.of([length / t for t in times[name]]) for name in layers},
        "over memory-caching": {name: speedup(times, name, PEER) for name in layers},
        "over memory-caching, stopgrad": {name: speedup(times, name, PEER_STOPPED) for name in layers},
    }


def table(results: dict) -> list[str]:
    training, decoding, layer = results["training"], results["decoding"], results["layer"]
    counts = ", ".join(f"{name} {count / 1e6:.2f}M" for name, count in training["parameters"].items())
    lines = [f"## Training\n\nParameters: {counts}. Segments of {SEGMENT}.", ""]
    lines += ["Tokens per second, in brackets over no caching:", ""]
    rates, ratios = training["tokens per second"], training["over no caching"]
    contexts = list(rates[PLAIN])
    header = ("model", *map(short, contexts))
    rows = [
        (name, *(f"{r[n].median:,.0f} ({ratios[name][n].median:.2f})" for n in contexts)) for name, r in rates.items()
    ]
    lines += [*markdown_table(header, rows), "", "Peak memory of a step above the model's:", ""]
    peaks = training["peak bytes"]
    lines += markdown_table(
        header, [(name, *(f"{p[n] / 1e6:,.0f} MB" for n in contexts)) for name, p in peaks.items()]
    )
    growth, ssc = training["growth"], ratios[SSC][contexts[-1]]
    first, last = map(short, growth["contexts"])
    rate = growth["operations per second of its time"] / 1e9
    lines += [
        "",
        f"SSC over no caching at {last}: {ssc}. From {first} to {last} the time of GRM beside no caching grows "
        f"{growth['time of GRM']:,.0f}-fold, the operations of its reads grow {growth['operations of its reads']:,.0f}"
        f"-fold; at {last} it does {rate:,.0f} GFLOP/s of them.",
        "",
        "## Decoding\n\nMilliseconds per token, and the size of the cache.",
        "",
    ]
    times, contexts = decoding["milliseconds per token"], list(decoding["milliseconds per token"][PLAIN])
    rows = [
        (name, *(f"{t[n].median:.2f} ms, {decoding['cache bytes'][name][n] / 1e6:,.1f} MB" for n in contexts))
        for name, t in times.items()
    ]
    lines += markdown_table(("model", *(f"behind {short(n)}" for n in contexts)), rows)
    lines += [f"\n## The layer\n\nGRM, forward and backward, {layer['length']} tokens.", ""]
    ratios = [layer[key] for key in ("over memory-caching", "over memory-caching, stopgrad")]
    rows = [
        (name, f"{r.median:,.0f}", *(ratio[name] for ratio in ratios))
        for name, r in layer["tokens per second"].items()
    ]
    lines += markdown_table(("layer", "tokens/s", "over memory-caching", "over its stopgrad"), rows)
    errors = results["errors"]
    rows = [(name, *(f"{e:.1e}" for e in found.values())) for name, found in errors.items()]
    lines += ["", "Largest relative error of our layer's output and gradients against the tests' oracle:", ""]
    return lines + markdown_table(("layer", *next(iter(errors.values()))), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shorten", type=int, default=1, help="divides the longest contexts, for a trial, not kept")
    arguments = parser.parse_args()
    errors = {name: check_ours(name) for name in OURS}
    longest = CONTEXTS[-1] // arguments.shorten
    results = {
        "rounds": arguments.rounds,
        "errors": errors,
        "layer": measure_layer(max(LAYER_LENGTH // arguments.shorten, 2 * SEGMENT), arguments.rounds),
        "training": measure_training([n for n in CONTEXTS if n <= longest], arguments.rounds),
        "decoding": measure_decoding([n for n in DECODED if n <= longest], arguments.rounds),
    }
    keep = arguments.shorten == 1
    report("caching", "Memory caching", results, table(results), keep)
    if keep:
        draw()


if __name__ == "__main__":
    main()
