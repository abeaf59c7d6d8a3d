# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level BPE tokenizer: ``python -m transformers_titans.tokenization.train_tokenizer --help``."""

import argparse
import logging

import datasets

from transformers_titans.tokenization.bpe import (
    save_tokenizer,
    texts_from_dataset,
    texts_from_files,
    train_bpe_tokenizer,
)


def main(argv: list[str] | None = None) -> None:
    """Trains on the texts that the command line names and saves the tokenizer."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        texts, length = open_texts(args)
        tokenizer = train_bpe_tokenizer(texts, args.vocab_size, length=length)
    except ValueError as error:
        raise SystemExit(f"train_tokenizer: {error}") from error
    save_tokenizer(tokenizer, args.output_dir)
    print(f"{len(tokenizer)} tokens, saved in {args.output_dir}")


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(prog="train_tokenizer", description="Trains a byte-level BPE tokenizer.")
    parser.add_argument("files", nargs="*", help="UTF-8 text, .json, .jsonl or .parquet files")
    parser.add_argument("--dataset", help="a dataset to read instead of files: its name on the Hub, or its folder")
    parser.add_argument("--dataset-config", help="which configuration of the dataset")
    parser.add_argument("--split", default="train", help="which split of the dataset (default: %(default)s)")
    parser.add_argument("--text-column", default="text", help="the column with the text (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="number of tokens (default: %(default)s)")
    parser.add_argument("--output-dir", required=True, help="folder to save the tokenizer in")
    return parser


def open_texts(args: argparse.Namespace):
    """The texts that the arguments name and, where it is known, their number.

    Raises:
        ValueError: if neither files nor a dataset are named, or both, or if they cannot be read.
    """
    if bool(args.files) == bool(args.dataset):
        raise ValueError(f"name either files or --dataset, got files={args.files} and --dataset={args.dataset!r}")
    if args.files:
        return texts_from_files(args.files, args.text_column), None
    dataset = datasets.load_dataset(args.dataset, args.dataset_config, split=args.split)
    return texts_from_dataset(dataset, args.text_column), len(dataset)


if __name__ == "__main__":
    main()
