# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What a block of each architecture costs: ``python benchmarks/variants.py``.

Counts, for one block at the configuration's default sizes, its parameters, the floating-point operations that a token
of a 2,048-token text takes in the forward, and the bytes of a row's state behind 1,023 and behind 2,047 tokens, where
chunks, window and segment are as full as they get; and measures the time of forward and backward against `lmm`, the
architectures taking turns. Writes results/variants.md.
"""

import statistics
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from tqdm import tqdm

from transformers_titans import TitansConfig, TitansModel


VARIANTS = ("lmm", "mal", "mag", "mac")
LENGTH, ROUNDS = 2048, 3
# torch counts the operations of its other attention kernels, not yet those of the CPU's.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
RESULTS = Path(__file__).parent / "results" / "variants.md"


def block(variant: str) -> TitansModel:
    """A model of one block, with hardly any vocabulary."""
    torch.manual_seed(0)
    return TitansModel(TitansConfig(variant=variant, num_hidden_layers=1, vocab_size=256))


def attention_flops(query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_flop(query.shape, key.shape, value.shape)


attention_flops._get_raw = True


def costs(variant: str) -> dict[str, float]:
    """Parameters, operations per token, and bytes of the state."""
    model = block(variant).eval()
    text = torch.randint(256, (1, LENGTH))
    with FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: attention_flops}) as counter:
        model(text, use_cache=False)
    cache, sizes, middle = None, [], LENGTH // 2 - 1
    with torch.no_grad():
        for part in (text[:, :middle], text[:, middle:-1]):
            cache = model(part, cache=cache, use_cache=True).cache
            sizes.append(cache.nbytes)
    if sizes[0] != sizes[1]:
        raise RuntimeError(f"the state of {variant} grows with the text: {sizes}")
    parameters = sum(p.numel() for p in model.layers.parameters())
    return {"parameters": parameters, "flops": counter.get_total_flops() / LENGTH, "state": sizes[0]}


def seconds(model: TitansModel, text: torch.Tensor) -> float:
    start = time.perf_counter()
    model(text, use_cache=False).last_hidden_state.square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    table = {variant: costs(variant) for variant in tqdm(VARIANTS, desc="counting")}
    models, text = {variant: block(variant).train() for variant in VARIANTS}, torch.randint(256, (1, LENGTH))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in tqdm(range(ROUNDS + 1), desc="timing"):
        for variant, model in models.items():
            elapsed = seconds(model, text)
            if number:
                times[variant].append(elapsed)
    base = statistics.median(times["lmm"])
    lines = [
        "One block at the default sizes: width 768, 12 heads of 64, window and segment 512, chunk 64, expansion 4.",
        f"Text of {LENGTH} tokens, float32, {torch.get_num_threads()} CPU threads, torch {torch.__version__}.",
        "",
        "| variant | parameters | MFLOP per token, forward | state per row | forward + backward, against lmm |",
        "|---|---|---|---|---|",
    ]
    for variant, row in table.items():
        ratio = statistics.median(times[variant]) / base
        lines.append(
            f"| {variant} | {row['parameters'] / 1e6:.1f}M | {row['flops'] / 1e6:.1f} | {row['state'] / 1e6:.1f} MB "
            f"| {ratio:.2f} |"
        )
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
