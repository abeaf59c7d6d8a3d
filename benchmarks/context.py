# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What a long context costs: ``python benchmarks/context.py``.

Decoding: the time of a token behind 1k, 4k, 16k and 64k others, for our `lmm` and `mac`, and for transformers' Llama
and Mamba2 of as many parameters (width 384, 4 layers; Mamba2, whose layers have no MLP, 11), one row, greedy, each
with its own default cache. Ours have read the context, in calls of 2,048; Llama's cache is filled with random keys and
values, which take as long to read as any, and Mamba2's state, whose size is the same behind any context, with 1k
tokens. The models and the contexts take turns, so that the ratio of a token behind 64k to one behind 1k is taken in
each round.

The report begins with the two statements that matter: whether our decoding takes as long behind 64k tokens as behind
1k, within 10 %, and whether our prefill takes as much memory, and leaves as large a cache, at its end as at 4k tokens.

Prefill: smaller models (width 128, 2 layers) read up to 512k tokens in calls of 2,048, each model in a process of its
own. For each doubling of the context: tokens per second, the high-water mark of resident memory in its last call above
what was there before the first one, which varies by a tenth with what the allocator finds, and the bytes of the cache.
Llama stops at 64k, where a call reads 32 times its own length.

Nothing is timed unless our logits, read in several calls and decoded one by one, are those that a single call finds
token by token in float64.

Writes results/context.json, context.md and the plots decoding.png and prefill.png, which plots.py draws again.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from checks import refuse, refuse_unless_close, token_by_token
from timing import Spread, alternate, in_child, markdown_table, report, reset_peak, resident_bytes
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from transformers_titans import TitansConfig, TitansForCausalLM


CALL = 2048
CONTEXTS = (1024, 4096, 16384, 65536)
LONGEST = {"lmm": 2**19, "mac": 2**19, "Llama": 2**16}
NEW_TOKENS = {"lmm": 128, "mac": 128, "Mamba2": 64, "Llama": 16}
# Widths of the MLP and number of layers that make the decoding models alike in size.
SIZES = {"lmm": (1664, 4), "mac": (1152, 4), "Llama": (1920, 4), "Mamba2": (0, 11)}


def model_of(name: str, width: int, intermediate: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    shared = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": layers}
    heads = width // 64
    if name == "Mamba2":
        config = Mamba2Config(**shared, expand=2, head_dim=64, num_heads=2 * heads, n_groups=1, state_size=128)
        return Mamba2ForCausalLM(config).eval()
    shared |= {"intermediate_size": intermediate, "num_attention_heads": heads, "max_position_embeddings": 2**20}
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**shared, num_key_value_heads=heads)).eval()
    return TitansForCausalLM(TitansConfig(variant=name, **shared)).eval()


def large_model(name: str) -> torch.nn.Module:
    return model_of(name, 384, *SIZES[name])


def small_model(name: str) -> torch.nn.Module:
    return model_of(name, 128, 512, 2)


def text_of(length: int) -> torch.Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))


def cache_bytes(cache) -> int:
    """The bytes of a cache's tensors; transformers' caches keep them in their layers, some in lists or dicts."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    found, held = 0, [vars(layer) for layer in cache.layers]
    while held:
        value = held.pop()
        if torch.is_tensor(value):
            found += value.numel() * value.element_size()
        elif isinstance(value, (dict, list, tuple)):
            held += value.values() if isinstance(value, dict) else value
    return found


@torch.no_grad()
def check(name: str) -> float:
    """The relative error of logits of ours that were read in two calls and then one by one."""
    model, text = small_model(name), text_of(600)
    with token_by_token():
        reference = model.double()(text, use_cache=False).logits
    model.float()
    logits, cache = [], None
    for part in text.split([400, 190, *(1 for _ in range(10))], 1):
        output = model(part, cache=cache, use_cache=True)
        logits, cache = [*logits, output.logits], output.cache
    return refuse_unless_close(f"logits of {name}, read in calls", torch.cat(logits, 1), reference, 1e-3)


class Decoding:
    """Greedy decoding of some tokens behind a cached context."""

    def __init__(self, model: torch.nn.Module, cache, new_tokens: int):
        self.model, self.start, self.new_tokens = model, cache, new_tokens
        self.copies = not isinstance(model, LlamaForCausalLM)

    def rewind(self) -> None:
        """A copy of the context's state; of keys and values, which are not changed in place, the columns behind it."""
        if self.copies:
            self.cache = copy.deepcopy(self.start)
        else:
            self.cache = DynamicCache()
            for index, layer in enumerate(self.start.layers):
                self.cache.update(layer.keys, layer.values, index)

    @torch.no_grad()
    def run(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(self.new_tokens):
            token = self.model(token, cache=self.cache, use_cache=True).logits.argmax(-1)


@torch.no_grad()
def contexts_of(name: str, model: torch.nn.Module, contexts: list[int]) -> dict[int, object]:
    """The model's cache behind each context."""
    if name == "Mamba2":
        cache = model(text_of(contexts[0]), use_cache=True).cache
        return dict.fromkeys(contexts, cache)
    if name == "Llama":
        return {length: random_keys_and_values(model.config, length) for length in contexts}
    caches, cache, text = {}, None, text_of(contexts[-1])
    ends = sorted({*contexts, *range(0, contexts[-1], CALL)} - {0})
    for begin, end in zip([0, *ends[:-1]], tqdm(ends, desc=f"{name} reads {contexts[-1]:,} tokens"), strict=True):
        cache = model(text[:, begin:end], cache=cache, use_cache=True, logits_to_keep=1).cache
        if end in contexts:
            caches[end] = copy.deepcopy(cache)
    return caches


def random_keys_and_values(config: LlamaConfig, length: int) -> DynamicCache:
    cache = DynamicCache()
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for index in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), index)
    return cache


def measure_decoding(contexts: list[int], rounds: int) -> dict:
    models = {name: large_model(name) for name in NEW_TOKENS}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    if max(counts.values()) > 1.1 * min(counts.values()):
        refuse(f"the models' parameter counts differ by more than 10 %: {counts}")
    tasks: dict[str, Decoding] = {}
    sizes: dict[str, dict[int, int]] = {}
    for name, model in models.items():
        caches = contexts_of(name, model, contexts)
        sizes[name] = {length: cache_bytes(cache) for length, cache in caches.items()}
        tasks |= {f"{name} {length}": Decoding(model, cache, NEW_TOKENS[name]) for length, cache in caches.items()}
    calls: dict[str, Callable[[], None]] = {key: task.run for key, task in tasks.items()}
    times = alternate(calls, rounds, "decoding", {key: task.rewind for key, task in tasks.items()})
    first, last = contexts[0], contexts[-1]
    return {
        "parameters": counts,
        "milliseconds per token": {
            name: {n: Spread.of([1e3 * t / NEW_TOKENS[name] for t in times[f"{name} {n}"]]) for n in contexts}
            for name in models
        },
        "longest over shortest": {
            name: Spread.of([b / a for a, b in zip(times[f"{name} {first}"], times[f"{name} {last}"], strict=True)])
            for name in models
        },
        "cache bytes": sizes,
    }


@torch.no_grad()
def prefill(name: str, longest: int) -> dict[int, dict]:
    """By context length, figures of the calls that led there from half of it. Runs in a process of its own."""
    model = small_model(name)
    model(text_of(CALL), use_cache=True, logits_to_keep=1)
    base = reset_peak()
    cache, seconds, figures, tokens = None, 0.0, {}, 0
    generator = torch.Generator().manual_seed(1)
    for end in tqdm(range(CALL, longest + 1, CALL), desc=f"{name} reads {longest:,} tokens"):
        part = torch.randint(256, (1, CALL), generator=generator)
        is_measured = end & (end - 1) == 0
        if is_measured:
            # One call each, from an allocator that has given back what it could: more calls leave a higher mark.
            reset_peak()
        start = time.perf_counter()
        cache = model(part, cache=cache, use_cache=True, logits_to_keep=1).cache
        seconds, tokens = seconds + time.perf_counter() - start, tokens + CALL
        if is_measured:
            peak = resident_bytes("VmHWM") - base
            figures[end] = {
                "tokens per second": tokens / seconds,
                "peak bytes": peak,
                "cache bytes": cache_bytes(cache),
            }
            seconds, tokens = 0.0, 0
    return figures


def table(results: dict) -> list[str]:
    decoding, reading = results["decoding"], results["prefill"]
    counts = ", ".join(f"{name} {count / 1e6:.2f}M" for name, count in decoding["parameters"].items())
    lines = [
        *statements(results),
        "",
        f"## Decoding\n\nParameters: {counts}. Milliseconds per token, and the size of the cache.",
        "",
    ]
    rows, contexts = [], list(next(iter(decoding["cache bytes"].values())))
    for name, spreads in decoding["milliseconds per token"].items():
        sizes = decoding["cache bytes"][name]
        cells = [f"{spreads[n].median:.1f} ms, {sizes[n] / 1e6:,.1f} MB" for n in contexts]
        rows.append((name, *cells, decoding["longest over shortest"][name]))
    ratio = f"{short(contexts[-1])} over {short(contexts[0])}"
    lines += markdown_table(("model", *(f"behind {short(n)}" for n in contexts), ratio), rows)
    lines += ["", f"## Prefill\n\nIn calls of {CALL:,}: tokens per second, peak memory above the model's, cache.", ""]
    names, lengths = list(reading), sorted({n for figures in reading.values() for n in figures})
    rows = [(short(n), *(_cell(reading[name].get(n)) for name in names)) for n in lengths]
    return lines + markdown_table(("context", *names), rows)


def statements(results: dict) -> list[str]:
    """What the benchmark is for, of our models: whether a token, and the memory to read, cost the same throughout."""
    lines = []
    for name in ("lmm", "mac"):
        ratio, lengths = (
            results["decoding"]["longest over shortest"][name],
            list(results["decoding"]["cache bytes"][name]),
        )
        verdict = "within" if abs(ratio.median - 1) <= 0.1 else "NOT within"
        lines.append(
            f"- {name}, decoding: a token behind {short(lengths[-1])} takes {ratio} of the time of one behind "
            f"{short(lengths[0])}: {verdict} 10 %."
        )
        figures = results["prefill"][name]
        longest, early = max(figures), min(n for n in figures if n > CALL)
        peaks, caches = ([figures[n][key] / 1e6 for n in (longest, early)] for key in ("peak bytes", "cache bytes"))
        verdict = "constant" if peaks[0] <= 1.25 * peaks[1] and caches[0] == caches[1] else "NOT constant"
        lines.append(
            f"- {name}, prefill: the call that ends at {short(longest)} takes {peaks[0]:,.0f} MB, the one at "
            f"{short(early)} {peaks[1]:,.0f} MB, with caches of {caches[0]:,.1f} MB and {caches[1]:,.1f} MB: {verdict}"
        )
    return lines


def _cell(figures: dict | None) -> str:
    if figures is None:
        return ""
    peak, cache = figures["peak bytes"] / 1e6, figures["cache bytes"] / 1e6
    return f"{figures['tokens per second']:,.0f} tok/s, {peak:,.0f} MB, {cache:,.1f} MB"


def short(length: int) -> str:
    return f"{length // 1024}k"


def main() -> None:
    # Needs a package of its own, and must say so before anything is measured.
    from plots import draw

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shorten", type=int, default=1, help="divides the longest contexts, for a trial, not kept")
    arguments = parser.parse_args()
    errors = {name: check(name) for name in ("lmm", "mac")}
    longest = {name: length // arguments.shorten for name, length in LONGEST.items()}
    contexts = [n for n in CONTEXTS if n * arguments.shorten <= CONTEXTS[-1]]
    results = {
        "rounds": arguments.rounds,
        "errors": errors,
        "decoding": measure_decoding(contexts, arguments.rounds),
        "prefill": {name: in_child(prefill, name, length) for name, length in longest.items()},
    }
    keep = arguments.shorten == 1
    report("context", "Long contexts", results, table(results), keep)
    if keep:
        draw()


if __name__ == "__main__":
    main()
