# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole model with memory as a context against titans-pytorch's: ``python benchmarks/mac_model.py``.

Both have 4 layers of width 384 with 6 heads of 64, a neural memory of depth 2 and expansion 4 with chunks of 64 in
every layer, segments of 512, 4 persistent tokens and a byte vocabulary; our MLP is wider, so that the numbers of
parameters are alike, and they may differ by 10 % at most. Measured are a training step (forward and backward of the
loss at 2,048 tokens) with its peak memory, and cached decoding of 128 tokens behind a prompt of 512, one row each;
`timing.py` says how, `peers.py` how the peer is set up. Nothing is timed unless

- our loss and every gradient agree with the token-by-token form in float64, and so do those of float32 and of bfloat16
  products, within their precision, and our cached logits are the uncached ones, also in the compiled and native form;
- the peer's loss and gradients are finite, its last logits depend on the first segment, and its cached logits are the
  uncached ones.

Writes results/mac_model.json and mac_model.md.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from checks import products_in, refuse, refuse_unless_alike, refuse_unless_close
from peers import mac_model as peer_model
from timing import Spread, alternate, markdown_table, peak_memory, report, speedup, without_emulated
from transformers import CompileConfig

from transformers_titans import TitansConfig, TitansForCausalLM


WIDTH, HEADS, LAYERS, CHUNK, SEGMENT = 384, 6, 4, 64, 512
LENGTH, PROMPT, NEW_TOKENS = 2048, 512, 128
OURS, COMPILED = "ours", "ours, compiled"
NATIVE, NATIVE_BF16 = "ours, native", "ours, native, bfloat16 products"
PEER, PEER_EXACT, PEER_BF16 = "titans-pytorch", "titans-pytorch, eq. 16", "titans-pytorch, bfloat16 products"
OURS_ALL, IN_BF16 = (OURS, COMPILED, NATIVE, NATIVE_BF16), (NATIVE_BF16, PEER_BF16)
TRAINED = without_emulated((OURS, NATIVE, NATIVE_BF16, PEER, PEER_EXACT, PEER_BF16), IN_BF16)
DECODED = (OURS, COMPILED, NATIVE, PEER, PEER_EXACT)
# The loss is a mean over the tokens, the gradients have passed four memories: rounding errors grow on the way.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-1}


def our_model(segment: int = SEGMENT, backend: str = "auto") -> TitansForCausalLM:
    config = TitansConfig(
        variant="mac",
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=1280,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        segment_length=segment,
        num_persistent_tokens=4,
        memory_chunk_size=CHUNK,
        memory_backend=backend,
    )
    return TitansForCausalLM(config)


def model_of(name: str, segment: int = SEGMENT) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in OURS_ALL:
        return our_model(segment, "native" if name in (NATIVE, NATIVE_BF16) else "auto")
    return peer_model(WIDTH, HEADS, LAYERS, segment, CHUNK, exact=name == PEER_EXACT)


def text_of(length: int) -> torch.Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))


def loss_of(name: str, model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    with products_in(torch.bfloat16 if name in IN_BF16 else torch.float32):
        return model(text, labels=text).loss if name in OURS_ALL else model(text, return_loss=True)


def training_step(name: str, length: int) -> Callable[[], None]:
    model, text = model_of(name), text_of(length)

    def run() -> None:
        model.zero_grad()
        loss_of(name, model, text).backward()

    return run


def warm_and_step(name: str, length: int) -> tuple[Callable, Callable]:
    return training_step(name, 2 * CHUNK), training_step(name, length)


class OurDecoding:
    """Greedy decoding behind a prompt."""

    def __init__(self, model: TitansForCausalLM, prompt: torch.Tensor, new_tokens: int, is_compiled: bool):
        self.model, self.new_tokens = model, new_tokens
        # As generate(compile_config=CompileConfig(fullgraph=True)) decodes.
        self.step = model.get_compiled_call(CompileConfig(fullgraph=True)) if is_compiled else model
        with torch.no_grad():
            output = model(prompt, use_cache=True)
        self.logits, self.start = output.logits[:, -1:], output.cache
        self.rewind()

    def rewind(self) -> None:
        self.cache = copy.deepcopy(self.start)

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """The logits of the new tokens (1, new_tokens, 256)."""
        logits = [self.logits]
        for _ in range(self.new_tokens):
            logits.append(self.step(logits[-1].argmax(-1), cache=self.cache).logits)
        return torch.cat(logits[1:], 1)


class PeerDecoding:
    """The same as the peer's `sample` does it, without its sampling: steps for its memory tokens give no logits."""

    def __init__(self, model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int):
        self.model, self.prompt, self.new_tokens = model, prompt, new_tokens
        length = model.seq_len_with_longterm_mem(prompt.shape[1] + new_tokens + 1)
        sizes = model.axial_pos_emb.maybe_derive_outer_dim(length, (model.neural_memory_segment_len,))
        with torch.no_grad():
            self.positions = model.axial_pos_emb(sizes, return_factorized=True)
            logits, self.start = model(prompt, return_cache=True, factorized_pos_emb=self.positions)
        self.logits = logits[:, -1:]

    def rewind(self) -> None:
        """Its cache is replaced by each step, not changed."""

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        logits, cache, text = [self.logits], self.start, self.prompt
        while len(logits) <= self.new_tokens:
            if text.shape[1] < self.prompt.shape[1] + len(logits):
                text = torch.cat([text, logits[-1].argmax(-1)], 1)
            found, cache = self.model(text, cache=cache, return_cache=True, factorized_pos_emb=self.positions)
            if found is not None:
                logits.append(found)
        return torch.cat(logits[1:], 1)


def decoding(name: str, prompt: int = PROMPT, new_tokens: int = NEW_TOKENS, segment: int = SEGMENT):
    model, text = model_of(OURS if name == COMPILED else name, segment).eval(), text_of(prompt)
    if name in OURS_ALL:
        return OurDecoding(model, text, new_tokens, name == COMPILED)
    return PeerDecoding(model, text, new_tokens)


def check_decoding(name: str) -> None:
    """Behind a prompt that ends shortly before a segment's end, cached logits must be those of one uncached call."""
    prompt, new_tokens = 2 * CHUNK - 3, 7
    task = decoding(name, prompt, new_tokens, segment=2 * CHUNK)
    logits = task.run()
    tokens = torch.cat([task.logits, logits], 1).argmax(-1)
    with torch.no_grad():
        whole = task.model(torch.cat([text_of(prompt), tokens[:, :-1]], 1))
    whole = whole.logits if name in OURS_ALL else whole
    refuse_unless_close(f"cached logits of {name}", logits, whole[:, -new_tokens:], 1e-4)


def check_ours() -> dict[str, float]:
    text = text_of(3 * CHUNK + 5)

    def run(model: torch.nn.Module, precision: torch.dtype) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = loss_of(NATIVE_BF16 if precision == torch.bfloat16 else OURS, model, text)
        loss.backward()
        gradients = {f"gradient of {key}": p.grad.clone() for key, p in model.named_parameters()}
        return {"loss": loss.detach()} | gradients

    for name in (OURS, NATIVE):
        check_decoding(name)
    refuse_unless_alike("our model", run, model_of(OURS, segment=2 * CHUNK), TOLERANCE)
    return refuse_unless_alike("our native model", run, model_of(NATIVE, segment=2 * CHUNK), TOLERANCE)


def check_peer(name: str) -> None:
    model, text = model_of(name, segment=2 * CHUNK), text_of(4 * CHUNK + 1)
    loss_of(name, model, text).backward()
    for key, parameter in model.named_parameters():
        # The network that memories are made after, and fixed frequencies, have no gradient.
        if "memory_model." in key or "rotary_emb" in key:
            continue
        if parameter.grad is None or not torch.isfinite(parameter.grad).all():
            refuse(f"the gradient of {key} of {name} is absent or not finite")
    with torch.no_grad():
        changed = text.clone()
        changed[0, 0] = (changed[0, 0] + 1) % 256
        if torch.equal(model(text)[:, -1], model(changed)[:, -1]):
            refuse(f"the last logits of {name} do not depend on the first segment")
    check_decoding(name)


def parameter_counts() -> dict[str, int]:
    counts = {name: sum(p.numel() for p in model_of(name).parameters()) for name in (OURS, PEER)}
    if abs(counts[OURS] / counts[PEER] - 1) > 0.1:
        refuse(f"the models' parameter counts differ by more than 10 %: {counts}")
    return counts


def rates(times: dict[str, list[float]], tokens: int) -> dict[str, dict[str, Spread]]:
    return {
        "tokens per second": {name: Spread.of([tokens / t for t in times[name]]) for name in times},
        "over titans-pytorch": {name: speedup(times, name, PEER) for name in times},
    }


def measure_training(length: int, rounds: int) -> dict:
    steps = {name: training_step(name, length) for name in TRAINED}
    times = alternate(steps, rounds, f"training, {length} tokens")
    del steps
    peaks = {name: peak_memory(warm_and_step, name, length) for name in TRAINED}
    return {"length": length, **rates(times, length), "peak bytes": peaks}


def measure_decoding(new_tokens: int, rounds: int) -> dict:
    tasks = {name: decoding(name, new_tokens=new_tokens) for name in DECODED}
    expected = tasks[OURS].run()
    for name in (COMPILED, NATIVE):
        refuse_unless_close(f"cached logits of {name}", tasks[name].run(), expected, 1e-4)
    calls, rewinds = ({name: getattr(task, kind) for name, task in tasks.items()} for kind in ("run", "rewind"))
    times = alternate(calls, rounds, f"decoding, {new_tokens} tokens", rewinds)
    return {"prompt": PROMPT, "new tokens": new_tokens, **rates(times, new_tokens)}


def table(results: dict) -> list[str]:
    training, decoded = results["training"], results["decoding"]
    counts = ", ".join(f"{name} {count / 1e6:.2f}M" for name, count in results["parameters"].items())
    rows = []
    for name in dict.fromkeys((OURS, COMPILED, *TRAINED)):
        row = ["", "", "", ""]
        if name in TRAINED:
            peak = training["peak bytes"][name]
            share = peak / training["peak bytes"][PEER]
            row = [f"{training['tokens per second'][name].median:,.0f}", training["over titans-pytorch"][name]]
            row += [f"{peak / 1e6:,.0f} MB", f"{share:.2f}"]
        if name in DECODED:
            row += [f"{decoded['tokens per second'][name].median:,.1f}", decoded["over titans-pytorch"][name]]
        else:
            row += ["", ""]
        rows.append((name, *row))
    over = "over titans-pytorch"
    header = ("model", "training, tokens/s", over, "peak memory", "of titans-pytorch's", "decoding, tokens/s", over)
    errors = ", ".join(f"{error:.1e} in {precision}" for precision, error in results["errors"].items())
    return [
        f"Parameters: {counts}. Training at {training['length']} tokens, forward and backward; decoding of "
        f"{decoded['new tokens']} tokens behind {decoded['prompt']}, with each side's cache. Ratios are medians over "
        "rounds with the lowest and the highest.",
        "",
        *markdown_table(header, rows),
        "",
        f"`{COMPILED}`: decoding of `generate()` with a `compile_config`; compiling, minutes of it, is not counted. "
        f"`{NATIVE}`: `memory_backend` is `native`.",
        "",
        "`titans-pytorch` takes all inner gradients of a call at the start weights, as by default; with `eq. 16` at "
        "the weights of each chunk's start, as ours do. Largest relative error of our loss and gradients against the "
        f"token-by-token form in float64: {errors}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shorten", type=int, default=1, help="divides the number of tokens, for a trial, not kept")
    arguments = parser.parse_args()
    results = {"rounds": arguments.rounds, "parameters": parameter_counts(), "errors": check_ours()}
    for name in TRAINED:
        if name not in OURS_ALL:
            check_peer(name)
    results["training"] = measure_training(LENGTH // arguments.shorten, arguments.rounds)
    results["decoding"] = measure_decoding(NEW_TOKENS // arguments.shorten, arguments.rounds)
    title, keep = "A model with memory as a context", arguments.shorten == 1
    report("mac_model", title, results, table(results), keep)


if __name__ == "__main__":
    main()
