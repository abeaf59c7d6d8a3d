# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: exact round trips, the interface transformers users expect, saving, and errors."""

import json
import os
import subprocess
import sys

import datasets
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from transformers_titans.tokenization import (
    byte_tokenizer,
    dna_tokenizer,
    save_tokenizer,
    texts_from_dataset,
    texts_from_files,
    train_bpe_tokenizer,
)
from transformers_titans.tokenization.train_tokenizer import main


CORPUS = [
    "It is a truth universally acknowledged,\n\n  that a single man in possession\r\n",
    "of a good fortune. " * 20,
]
TEXTS = {
    "leading_spaces": "  two spaces,\tthen a tab",
    "only_white_space": " \n\n\r\n\t  \u00a0\u2003",
    "punctuation_spacing": "Don't !  you ' re , it 's ; n't",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "lone_combining_marks": "\u0301\u0327a\u0301\u0323 e\u0301 \u00e9",
    "scripts": "\u4e2d\u6587 \u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0639 \ud55c\uad6d \u1112\u1161\u11ab",
    "controls": "\x00\x01\x7f\x85\u2028\ufeff\uffff\U0010ffff",
    "replacement_character": "\ufffd\ufffd",
    "empty": "",
}
FACTORIES = {
    "bytes": byte_tokenizer,
    "dna": dna_tokenizer,
    "bpe": lambda: train_bpe_tokenizer(CORPUS, 275, show_progress=False),
}


@pytest.fixture(scope="module", params=FACTORIES)
def tokenizer(request):
    return FACTORIES[request.param]()


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def exact_tokenizer(request):
    return FACTORIES[request.param]()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_decoding_gives_the_text_back(exact_tokenizer, text):
    ids = exact_tokenizer(text)["input_ids"]
    assert exact_tokenizer.decode(ids) == text
    assert exact_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_character_of_the_basic_plane_comes_back(exact_tokenizer):
    text = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    assert exact_tokenizer.decode(exact_tokenizer(text, verbose=False)["input_ids"]) == text


def test_byte_ids_are_the_bytes_of_utf_8():
    text = TEXTS["scripts"] + TEXTS["emoji"] + "".join(map(chr, range(256)))
    assert byte_tokenizer()(text)["input_ids"] == [byte + 3 for byte in text.encode()]


def test_byte_vocabulary_is_the_byte_level_alphabet():
    assert set(byte_tokenizer().convert_ids_to_tokens(range(3, 259))) == set(pre_tokenizers.ByteLevel.alphabet())


def test_vocabulary_sizes():
    assert len(byte_tokenizer()) == 259
    assert len(dna_tokenizer()) == 9
    assert [len(train_bpe_tokenizer(CORPUS, size, show_progress=False)) for size in (259, 260, 275)] == [259, 260, 275]


def test_special_ids(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_only_the_dna_tokenizer_has_an_unknown_token():
    assert {name: make().unk_token_id for name, make in FACTORIES.items()} == {"bytes": None, "dna": 3, "bpe": None}


def test_nothing_is_added_to_a_text(tokenizer):
    assert tokenizer("ACG")["input_ids"] == tokenizer("ACG", add_special_tokens=False)["input_ids"]
    assert not set(tokenizer("ACG")["input_ids"]) & set(tokenizer.all_special_ids)


def test_special_tokens_spelled_out_in_a_text(tokenizer):
    text = "AC" + tokenizer.eos_token + "GT"
    assert tokenizer(text)["input_ids"].count(tokenizer.eos_token_id) == 1
    assert tokenizer.eos_token_id not in tokenizer(text, split_special_tokens=True)["input_ids"]


def test_split_special_tokens_makes_any_text_exact(exact_tokenizer):
    text = "".join(exact_tokenizer.all_special_tokens)
    ids = exact_tokenizer(text, split_special_tokens=True)["input_ids"]
    assert exact_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["ACGT", "A", ""], padding=True, return_tensors="pt")
    assert list(batch) == ["input_ids", "attention_mask"]
    width = batch["input_ids"].shape[1]
    lengths = [len(ids) for ids in tokenizer(["ACGT", "A", ""])["input_ids"]]
    assert batch["attention_mask"].tolist() == [[0] * (width - n) + [1] * n for n in lengths]
    assert (batch["input_ids"] == 0).tolist() == (batch["attention_mask"] == 0).tolist()
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["ACGT", "A", ""]


def test_truncation_to_the_models_length(tokenizer):
    assert tokenizer.model_max_length == 32768
    assert len(tokenizer("AC " * 40000, truncation=True)["input_ids"]) == 32768


def test_applies_to_datasets(tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["ACG", "", "T"]})
    mapped = rows.map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns="text")
    assert mapped["input_ids"][:] == tokenizer(["ACG", "", "T"])["input_ids"]


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("ACGTN", "ACGTN"),
        ("acgtn", "ACGTN"),
        ("UuAu", "TTAT"),
        ("RYKMSWBDHVrykmswbdhv", "N" * 20),
        ("ACG\nTT A\r\n", "ACGTTA"),
        ("A-.*X1\u00e9A", "A" + "<|unknown|>" * 6 + "A"),
    ],
    ids=["bases", "lower_case", "rna", "ambiguous", "white_space", "other_characters"],
)
def test_reading_of_dna(text, decoded):
    tokenizer = dna_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == decoded
    assert len(ids) == len(decoded.replace("<|unknown|>", "?"))


def test_training_is_reproducible_and_takes_any_pieces():
    first, second = (train_bpe_tokenizer(texts, 275, show_progress=False) for texts in (CORPUS, iter(CORPUS)))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_training_learns_words():
    tokenizer = train_bpe_tokenizer(["memory memory memory"] * 3, 270, show_progress=False)
    assert len(tokenizer(" memory")["input_ids"]) == 1
    assert len(tokenizer("\u4e2d")["input_ids"]) == 3


def test_too_few_texts_for_the_vocabulary_warn(caplog):
    tokenizer = train_bpe_tokenizer(["ab ab"], 1000, show_progress=False)
    assert len(tokenizer) == 260
    assert "only 260 tokens of the vocab_size=1000" in caplog.text


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["a"], 258, "vocab_size must be an integer >= 259 .* got 258"),
        (["a"], 300.0, "vocab_size must be an integer >= 259 .* got 300.0"),
        (["a"], True, "vocab_size must be an integer >= 259 .* got True"),
        ([], 300, "texts must hold at least one string"),
        (["", ""], 300, "texts must hold at least one string"),
        ("abc", 300, "texts must be an iterable of strings, got one string, 'abc'"),
        (["a", None], 300, "texts must hold strings, but item 1 is of type NoneType"),
        ([["a", "b"]], 300, "texts must hold strings, but item 0 is of type list"),
    ],
    ids=["small", "float", "bool", "no_texts", "empty_texts", "one_string", "none", "list"],
)
def test_bad_training_input(texts, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        train_bpe_tokenizer(texts, vocab_size, show_progress=False)


def test_files_of_all_kinds(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo")
    (tmp_path / "b.jsonl").write_text('{"body": "three", "n": 1}\n{"body": "four", "n": 2}\n')
    datasets.Dataset.from_dict({"body": ["five"]}).to_parquet(tmp_path / "c.parquet")
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet")]
    assert list(texts_from_files(paths, "body")) == ["one\r\n\r\ntwo", "three", "four", "five"]


def test_a_large_text_file_comes_in_blocks_of_whole_lines(tmp_path):
    text = "a line\n" * 400000
    (tmp_path / "large.txt").write_text(text)
    blocks = list(texts_from_files([tmp_path / "large.txt"]))
    assert "".join(blocks) == text
    assert len(blocks) > 1 and all(block.endswith("\n") for block in blocks)


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "streamed"])
def test_texts_of_a_dataset(streamed):
    rows = datasets.Dataset.from_dict({"body": [str(i) for i in range(2500)]})
    rows = rows.to_iterable_dataset() if streamed else rows
    assert list(texts_from_dataset(rows, "body")) == [str(i) for i in range(2500)]


def test_column_that_is_absent_or_not_text():
    rows = datasets.Dataset.from_dict({"text": ["a"], "n": [1]})
    with pytest.raises(ValueError, match=r"text_column must be one of \['n', 'text'\], got 'body'"):
        texts_from_dataset(rows, "body")
    with pytest.raises(ValueError, match="text_column must name a column of strings, but 'n' holds Value"):
        texts_from_dataset(rows, "n")


def test_column_of_a_stream_that_does_not_know_its_columns():
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"n": 1}]))
    assert rows.features is None
    with pytest.raises(ValueError, match=r"text_column must be one of \['n'\], got 'text'"):
        list(texts_from_dataset(rows))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="files must be existing files, got '.*absent.txt'"):
        texts_from_files([tmp_path / "absent.txt"])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="files must be UTF-8 text, but '.*latin.txt' is not"):
        list(texts_from_files([tmp_path / "latin.txt"]))
    (tmp_path / "b.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(ValueError, match="b.jsonl: text_column must name a column of strings, but 'body' holds"):
        list(texts_from_files([tmp_path / "b.jsonl"], "body"))


def test_saving_keeps_other_files_and_leaves_no_trace(tmp_path, tokenizer):
    (tmp_path / "model.safetensors").write_text("weights")
    for _ in range(2):
        save_tokenizer(tokenizer, tmp_path)
    names = ["model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_failure_while_saving_leaves_the_old_tokenizer(tmp_path, monkeypatch):
    save_tokenizer(byte_tokenizer(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def write_half(self, folder, **kwargs):
        with open(os.path.join(folder, "tokenizer.json"), "w") as file:
            file.write("{")
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", write_half)
    with pytest.raises(OSError, match="disk full"):
        save_tokenizer(dna_tokenizer(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_loads_without_this_package(tmp_path):
    """In a fresh process that cannot import the package, from a folder that also holds a Titans config."""
    expected = {}
    for name, make in FACTORIES.items():
        save_tokenizer(make(), tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "titans"}')
        expected[name] = make()(["ac\u00e9 GT", "A"], padding=True)["input_ids"]
    script = (
        "import json, sys; sys.modules['transformers_titans'] = None; from transformers import AutoTokenizer\n"
        "load = lambda name: AutoTokenizer.from_pretrained(name)\n"
        "ids = {n: load(n)(['ac\\u00e9 GT', 'A'], padding=True)['input_ids'] for n in ('bytes', 'dna', 'bpe')}\n"
        "print(json.dumps([ids, [load(n).eos_token_id for n in ids], [load(n).padding_side for n in ids]]))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [expected, [2, 2, 2], ["left"] * 3]


def test_command_line(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(CORPUS) * 3)
    main([str(tmp_path / "text.txt"), "--vocab-size", "275", "--output-dir", str(tmp_path / "out")])
    assert "275 tokens" in capsys.readouterr().out
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 275


def test_command_line_with_a_dataset(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"body": "a word, a word"}\n' * 3)
    arguments = ["--dataset", str(tmp_path / "data"), "--text-column", "body", "--vocab-size", "262"]
    main([*arguments, "--output-dir", str(tmp_path / "out")])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 262


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name either files or --dataset"),
        (["text.txt", "--dataset", "name"], "name either files or --dataset"),
        (["absent.txt"], "files must be existing files, got 'absent.txt'"),
        (["text.txt", "--vocab-size", "10"], "vocab_size must be an integer >= 259"),
    ],
    ids=["nothing", "both", "absent", "small"],
)
def test_command_line_errors_write_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(SystemExit, match=message):
        main([*arguments, "--output-dir", "out"])
    assert not (tmp_path / "out").exists()
