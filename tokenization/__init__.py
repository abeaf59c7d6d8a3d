# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for Titans models: byte-level BPE trained on one's own text, single bytes, and DNA.

All are plain `PreTrainedTokenizerFast` objects: `AutoTokenizer` reads what they save without this package.
"""

from transformers_titans.tokenization.bpe import (
    save_tokenizer,
    texts_from_dataset,
    texts_from_files,
    train_bpe_tokenizer,
)
from transformers_titans.tokenization.build import byte_tokenizer, dna_tokenizer


__all__ = [
    "byte_tokenizer",
    "dna_tokenizer",
    "save_tokenizer",
    "texts_from_dataset",
    "texts_from_files",
    "train_bpe_tokenizer",
]
