# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Is the inner loop stable? Trains small models for 300 steps at 4096 tokens and measures how a tiny change grows.

For memory depths 1, 2 and 4, in float32 and bfloat16 autocast, with the default configuration otherwise: 2 layers of
width 128 learn the shipped novel, byte by byte, through the stock Trainer. Before and after training, every start
weight W_0 is changed by 1e-6 times a standard normal number, and 4096 tokens that were not trained on are read in
float64 with and without the change: the *growth* is the largest change of the last hidden state at any token (root
mean square over its width), and the final change of the memories' weights, in units of 1e-6. A chaotic memory shows
growths of 1e4 and more.

    python benchmarks/stability.py [--depths 1 2 4] [--precisions float32 bfloat16] [--steps 300]

Writes benchmarks/results/stability.json and stability.md.
"""

import argparse
import copy
import json
import tempfile
import time
from importlib import resources
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from transformers_titans import TitansConfig, TitansForCausalLM


LENGTH = 4096
CHANGE = 1e-6
RESULTS = Path(__file__).parent / "results"


def novel() -> torch.Tensor:
    """The shipped novel as bytes."""
    folder = resources.files("transformers_titans.training").joinpath("novel")
    (path,) = (entry for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return torch.tensor(list(path.read_bytes()))


class Windows(Dataset):
    """Windows of 4096 bytes at pseudo-random places of a text."""

    def __init__(self, text: torch.Tensor, size: int):
        self.text, self.size = text, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = int(torch.randint(len(self.text) - LENGTH, (1,), generator=generator))
        window = self.text[start : start + LENGTH]
        return {"input_ids": window, "labels": window}


@torch.no_grad()
def growth(model: TitansForCausalLM, tokens: torch.Tensor) -> dict[str, float]:
    """How much a change of 1e-6 in W_0 changes what the model makes of the tokens (1, T), in float64."""
    model = copy.deepcopy(model).double().eval()
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for layer in changed.model.layers:
        for w in layer.memory.start_weights():
            w += CHANGE * torch.randn(w.shape, generator=generator, dtype=w.dtype)
    one, other = (m.model(tokens, use_cache=True) for m in (model, changed))
    hidden = (one.last_hidden_state - other.last_hidden_state).square().mean(-1).sqrt()
    weights, norms = [], []
    for a, b in zip(one.cache.layers, other.cache.layers, strict=True):
        for w, v in zip(a.state.memory.memory.weights, b.state.memory.memory.weights, strict=True):
            weights.append((w - v).square().mean().sqrt().item() / CHANGE)
            norms.append(w.square().mean().sqrt().item())
    return {
        "hidden": hidden.max().item() / CHANGE,
        "weights": max(weights),
        "largest weight rms": max(norms),
        "inner loss": torch.stack(model.model(tokens, output_surprise=True).surprise).mean().item(),
    }


def train(depth: int, precision: str, steps: int) -> dict:
    set_seed(0)
    text = novel()
    held_out = text[-LENGTH:].unsqueeze(0)
    config = TitansConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        memory_depth=depth,
    )
    model = TitansForCausalLM(config)
    before = growth(model, held_out)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            logging_steps=10,
            bf16=precision == "bfloat16",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = Trainer(model, arguments, train_dataset=Windows(text[:-LENGTH], steps))
        started = time.perf_counter()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    finite = all(torch.isfinite(p).all().item() for p in model.parameters())
    return {
        "depth": depth,
        "precision": precision,
        "steps": steps,
        "losses": losses,
        "finite": finite and all(loss == loss for loss in losses),
        "before": before,
        "after": growth(model, held_out),
        "seconds": round(time.perf_counter() - started),
    }


def table(results: list[dict]) -> str:
    lines = [
        "# Stability of the inner loop",
        "",
        f"`python benchmarks/stability.py`, torch {torch.__version__}, CPU; what is measured is said in the script.",
        "",
        "| depth | precision | steps | loss, first 10 | loss, last 10 | finite | growth of hidden state, before->after"
        " | growth of weights, before->after | inner loss, before->after | largest weight rms after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        before, after = r["before"], r["after"]
        pairs = [f"{before[key]:.3g} -> {after[key]:.3g}" for key in ("hidden", "weights", "inner loss")]
        lines.append(
            f"| {r['depth']} | {r['precision']} | {r['steps']} | {r['losses'][0]:.3f} | {r['losses'][-1]:.3f} | "
            f"{'yes' if r['finite'] else 'NO'} | {' | '.join(pairs)} | {after['largest weight rms']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    results = []
    for precision in arguments.precisions:
        for depth in arguments.depths:
            results.append(train(depth, precision, arguments.steps))
            (RESULTS / "stability.json").write_text(json.dumps(results, indent=1) + "\n")
            (RESULTS / "stability.md").write_text(table(results))
            print(table(results))


if __name__ == "__main__":
    main()
