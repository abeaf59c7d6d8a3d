# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole way on a CPU in a few minutes: ``python -m transformers_titans.training.demo``.

Trains a small Titans model (memory as a context, MAC) on the chapters of a novel, bytes as tokens, with the memory
carried from window to window.
Saves it, loads it back, and reads the end of the novel, which it has not seen: once with the memory carried on, once
with a fresh memory in every window. Keeps what the memory has learned on disk, loads that back too, and goes on
writing from there. Exits with 1 if the memory has not helped.
"""

import argparse
import importlib.resources
import re
import sys
import tempfile
import time
from pathlib import Path

import datasets
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
    TrainingArguments,
    set_seed,
)

from transformers_titans import TitansCache, TitansConfig, TitansForCausalLM
from transformers_titans.tokenization import byte_tokenizer
from transformers_titans.training.arguments import DataArguments
from transformers_titans.training.data import tokenize_documents
from transformers_titans.training.evaluation import compare_memory
from transformers_titans.training.train import build_trainer, prepare_training_arguments


CONTEXT_LENGTH = 256
HELD_OUT_CHAPTERS = 3
NUM_NEW_TOKENS = 300
MODEL = {
    "variant": "mac",
    "segment_length": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "memory_chunk_size": 16,
    "memory_expansion": 2,
}
TRAINING = {
    "max_steps": 300,
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "warmup_steps": 20,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    "weight_decay": 0.01,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "tensorboard",
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}


def main(argv: list[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code: 0, or 1 if carrying the memory did not lower the loss."""
    parser = argparse.ArgumentParser(prog="python -m transformers_titans.training.demo", description=__doc__)
    parser.add_argument("--output_dir", default="titans-demo", help="where the model and its logs are written")
    parser.add_argument("--max_steps", type=int, default=TRAINING["max_steps"], help="training steps")
    args = parser.parse_args(argv)
    started = time.monotonic()
    chapters = read_chapters()
    train(chapters[:-HELD_OUT_CHAPTERS], args.output_dir, args.max_steps)

    model = AutoModelForCausalLM.from_pretrained(args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    unseen = tokenizer("".join(chapters[-HELD_OUT_CHAPTERS:]), return_tensors="pt", verbose=False)["input_ids"][0]
    memory = TitansCache(model.config)
    loss = compare_memory(model, unseen, CONTEXT_LENGTH, memory)
    print(f"\nThe last {HELD_OUT_CHAPTERS} chapters, {len(unseen)} bytes that the model was not trained on:")
    print(f"  memory carried on:              {loss.carried:.4f} nats per byte")
    print(f"  memory reset every {CONTEXT_LENGTH} bytes:   {loss.reset:.4f} nats per byte")
    write_on(model, tokenizer, unseen, memory)
    print(f"\nModel, tokenizer and TensorBoard logs: {args.output_dir}. Time: {time.monotonic() - started:.0f} s.")
    if loss.carried >= loss.reset:
        print("FAILED: carrying the memory did not lower the loss.", file=sys.stderr)
        return 1
    return 0


def read_chapters() -> list[str]:
    """The novel that comes with the package, cut before each chapter's heading."""
    folder = importlib.resources.files("transformers_titans.training") / "novel"
    text = next(file for file in folder.iterdir() if file.name.endswith(".txt")).read_text(encoding="utf-8")
    return re.split(r"(?mi)^(?=chapter )", text)[1:]


def train(chapters: list[str], output_dir: str, max_steps: int) -> None:
    """Trains a new model with the memory carried through each chapter, and saves it to ``output_dir``."""
    training_args = TrainingArguments(output_dir=output_dir, **{**TRAINING, "max_steps": max_steps})
    prepare_training_arguments(training_args, carry_memory=True)
    set_seed(training_args.seed)
    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = TitansForCausalLM(TitansConfig(vocab_size=len(tokenizer), **ids, **MODEL))
    documents = tokenize_documents(datasets.Dataset.from_dict({"text": chapters}), tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(chapters)} chapters, {sum(documents['length']):,} bytes")
    data_args = DataArguments(dataset="novel", context_length=CONTEXT_LENGTH, carry_memory=True)
    trainer = build_trainer(model, tokenizer, documents, None, data_args, training_args)
    trainer.train()
    trainer.save_model()


def write_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: torch.Tensor, memory: TitansCache
) -> None:
    """Keeps the memory of ``text`` (T,) on disk, loads it back and writes on from it."""
    with tempfile.TemporaryDirectory() as folder:
        memory.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        memory = TitansCache.from_pretrained(folder, config=model.config)
    print(f"\nThe memory of these chapters, {size:,} bytes on disk, loaded back; the model goes on from it:\n")
    prompt = text[None]
    print(tokenizer.decode(text[-80:]), end="")
    set_seed(0)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=memory,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=True,
        temperature=0.7,
        streamer=streamer,
    )


if __name__ == "__main__":
    sys.exit(main())
