# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Does `average` help a model past its training length? ``python benchmarks/extrapolation.py``.

A small `lmm` without memory caching learns the shipped novel, byte by byte, in texts of 256 bytes. Saved and loaded
back, it reads chapters that it was not trained on, in texts of 16 times that length:

- plain: as it was trained;
- average, checkpoint and average, independent: with ``memory_caching="average"``, switched on by the config alone, in
  segments of the training length, which begin where the one before ended, or at the start weights;
- reset: as it was trained, with a fresh memory every 256 bytes.

Reported is the loss (nats per byte) by position in the text, averaged over the texts, with the standard error of each
difference to plain, taken text by text.

Writes results/extrapolation.json, extrapolation.md and extrapolation.png, which plots.py draws again.
"""

import argparse
import statistics
import tempfile

import torch
import torch.nn.functional as F
from plots import draw
from timing import markdown_table, report
from tqdm import tqdm, trange

from transformers_titans import TitansConfig, TitansForCausalLM
from transformers_titans.training.demo import read_chapters


LENGTH, LONGEST = 256, 16 * 256
STEPS, BATCH, LEARNING_RATE, WARM_UP = 600, 16, 3e-3, 20
HELD_OUT_CHAPTERS = 8
# Positions whose losses are averaged for the plot.
BIN = 128
PLAIN, RESET = "plain", "reset"
READERS = {
    PLAIN: {},
    "average, checkpoint": {"memory_caching": "average", "cache_initialization": "checkpoint"},
    "average, independent": {"memory_caching": "average", "cache_initialization": "independent"},
}
# Borders of the table's columns: within the training length, then doubling.
BORDERS = (0, *(LENGTH << n for n in range(LONGEST.bit_length() - LENGTH.bit_length() + 1)))


def bytes_of(chapters: list[str]) -> torch.Tensor:
    return torch.tensor(list("".join(chapters).encode()))


def train(text: torch.Tensor, steps: int) -> TitansForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = TitansForCausalLM(TitansConfig(vocab_size=256, memory_chunk_size=16, memory_expansion=2, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=min(WARM_UP / steps, 0.5), cycle_momentum=False
    )
    generator, column = torch.Generator().manual_seed(1), torch.arange(LENGTH)
    for _ in (bar := trange(steps, desc="training")):
        begin = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        batch = text[begin + column]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


@torch.no_grad()
def losses(model: TitansForCausalLM, texts: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """(N, T) texts -> (N, T - 1) losses of their bytes from the second on, with a fresh memory every ``length``."""
    rows = []
    for text in tqdm(texts, desc=f"reading, {name}"):
        logits = model(text.view(-1, length), use_cache=False).logits.flatten(0, 1)
        rows.append(F.cross_entropy(logits[:-1], text[1:], reduction="none"))
    return torch.stack(rows)


def read(folder: str, texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Losses by reader, each of which is the saved model under its own configuration."""
    found = {}
    for name, fields in READERS.items():
        model = TitansForCausalLM.from_pretrained(folder, cache_segment_length=LENGTH, **fields).eval()
        found[name] = losses(model, texts, texts.shape[1], name)
        if name == PLAIN:
            found[RESET] = losses(model, texts, LENGTH, RESET)
    return found


def summary(found: dict[str, torch.Tensor]) -> dict:
    """By reader: its curve, and by columns of the table means, and differences to plain with their standard error.

    Position t is that of the byte that is predicted; position 0 has no loss.
    """
    results = {}
    for name, loss in found.items():
        padded = F.pad(loss, (1, 0), value=float("nan"))
        curve = padded.unflatten(1, (-1, BIN)).nanmean((0, 2)).tolist()
        columns = {}
        for begin, end in [*zip(BORDERS, BORDERS[1:], strict=False), (0, 4 * LENGTH), (0, LONGEST)]:
            part, plain = (x[:, max(begin - 1, 0) : end - 1].mean(1) for x in (loss, found[PLAIN]))
            difference = (part - plain).tolist()
            error = statistics.stdev(difference) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
            columns[f"{begin}-{end}"] = (part.mean().item(), statistics.mean(difference), error)
        results[name] = {"curve": curve, "columns": columns}
    return results


def table(results: dict) -> list[str]:
    readers = results["readers"]
    lines = [
        f"`lmm`, {results['parameters']:,} parameters, trained for {results['steps']} steps of {BATCH} texts of "
        f"{LENGTH} bytes; loss in nats per byte over {results['texts']} unseen texts of {LONGEST:,} bytes, by "
        "position; in brackets the difference to plain and its standard error.",
        "",
    ]
    rows = []
    for name, reader in readers.items():
        cells = []
        for mean, difference, error in reader["columns"].values():
            cells.append(f"{mean:.3f}" if name == PLAIN else f"{mean:.3f} ({difference:+.3f} +- {error:.3f})")
        rows.append((name, *cells))
    return lines + markdown_table(("reader", *readers[PLAIN]["columns"]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shorten", type=int, default=1, help="divides the steps and the texts, for a trial, not kept"
    )
    arguments = parser.parse_args()
    chapters, steps = read_chapters(), max(STEPS // arguments.shorten, 1)
    unseen = bytes_of(chapters[-HELD_OUT_CHAPTERS:])
    texts = unseen[: len(unseen) // LONGEST * LONGEST].view(-1, LONGEST)
    texts = texts[: max(len(texts) // arguments.shorten, 1)]
    model = train(bytes_of(chapters[:-HELD_OUT_CHAPTERS]), steps)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = read(folder, texts)
    results = {
        "parameters": model.num_parameters(),
        "steps": steps,
        "training length": LENGTH,
        "bin": BIN,
        "texts": len(texts),
        "readers": summary(found),
    }
    keep = arguments.shorten == 1
    report("extrapolation", "Past the training length", results, table(results), keep)
    if keep:
        draw()


if __name__ == "__main__":
    main()
