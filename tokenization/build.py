# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What all tokenizers of this package share, and the two that need no training.

Ids: 0 pad, 1 bos, 2 eos, then the tokens proper. Nothing is added to a text by itself; a document's end is marked by
whoever lays documents in rows. As with other transformers tokenizers, a special token that is spelled out in a text is
read as that token, unless the call says ``split_special_tokens=True``.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN = "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, EOS_TOKEN)
# Longer texts cause a warning, and `truncation=True` cuts here: the default of TitansConfig.max_position_embeddings.
MODEL_MAX_LENGTH = 32768

BASES = "ACGTN"
# IUPAC codes of several possible bases, N itself aside.
AMBIGUOUS_BASES = "RYKMSWBDHV"


def wrap_tokenizer(tokenizer: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Gives a `tokenizers.Tokenizer` whose first ids are `SPECIAL_TOKENS` the interface of transformers.

    It pads on the left, as decoder-only models need it for generation, and decodes without touching spaces.
    """
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (*SPECIAL_TOKENS, *special_tokens.values())]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        model_max_length=MODEL_MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8: id = byte + 3, vocabulary 259. Any text comes back exactly."""
    symbols = _byte_symbols()
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *symbols))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap_tokenizer(tokenizer)


def dna_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per nucleotide: A, C, G, T, N (ids 4 to 8), vocabulary 9.

    Lower case is read as upper case, U as T, and every IUPAC code of several bases (R, Y, K, M, S, W, B, D, H, V) as
    N; white space, such as the line ends of a FASTA record, is dropped. Any other character, gaps included, becomes
    the unknown token (id 3). So decoding gives the sequence in these five letters, not the text letter by letter.
    """
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, UNK_TOKEN, *BASES))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK_TOKEN))
    readings = {"": r"\s", "A": "a", "C": "c", "G": "g", "T": "[tUu]", "N": _any_case(AMBIGUOUS_BASES, "n")}
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(pattern), base) for base, pattern in readings.items()]
    )
    tokenizer.decoder = decoders.Fuse()
    return wrap_tokenizer(tokenizer, unk_token=UNK_TOKEN)


def _any_case(letters: str, others: str) -> str:
    return f"[{letters}{letters.lower()}{others}]"


def _byte_symbols() -> list[str]:
    """The characters by which a byte-level vocabulary spells the bytes 0 to 255, in the bytes' order.

    Printable Latin-1 characters stand for themselves; the other bytes take, in order, the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]
