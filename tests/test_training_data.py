# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Text to rows: nothing is lost, nothing twice, nothing leaks from one document into the next."""

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

from transformers_titans.tokenization import byte_tokenizer
from transformers_titans.training.arguments import DataArguments
from transformers_titans.training.carry import StreamDataset, arrange_streams
from transformers_titans.training.data import (
    DOCUMENT_FEATURES,
    IGNORE_INDEX,
    ROWS_PER_CALL,
    RowCollator,
    cut_documents,
    load_texts,
    pack_documents,
    split_documents,
    tokenize_documents,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def numbered_documents(lengths: list[int]) -> datasets.Dataset:
    """Documents whose tokens are numbered through the corpus, so that a token tells where it belongs."""
    ends = np.cumsum(lengths)
    ids = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return datasets.Dataset.from_dict({"input_ids": ids, "length": lengths}, features=DOCUMENT_FEATURES)


def random_lengths(seed: int, context_length: int) -> list[int]:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(1, 4 * context_length, size=40).tolist()
    return [1, context_length, context_length + 1, 1, 2, 7 * context_length, *drawn, 1]


def flat(rows: datasets.Dataset, column: str) -> list[int]:
    return [value for row in rows[column] for value in row]


def expected_targets(lengths: list[int]) -> list[int]:
    last_tokens = set((np.cumsum(lengths) - 1).tolist())
    return [IGNORE_INDEX if token in last_tokens else token + 1 for token in range(sum(lengths))]


@pytest.mark.parametrize("context_length", [2, 7, 16])
@pytest.mark.parametrize("seed", range(4))
def test_packing_loses_and_repeats_no_token_and_keeps_the_order(seed, context_length):
    lengths = random_lengths(seed, context_length)
    rows = pack_documents(numbered_documents(lengths), context_length)
    assert flat(rows, "input_ids") == list(range(sum(lengths)))
    row_lengths = [len(row) for row in rows["input_ids"]]
    assert max(row_lengths) == context_length
    num_calls = -(-sum(lengths) // (ROWS_PER_CALL * context_length)) + 1
    assert sum(length < context_length for length in row_lengths) <= num_calls


@pytest.mark.parametrize("context_length", [2, 7, 16])
@pytest.mark.parametrize("seed", range(4))
def test_packed_positions_restart_at_every_border_and_nowhere_else(seed, context_length):
    lengths = random_lengths(seed, context_length)
    first_tokens = set((np.cumsum(lengths) - lengths).tolist())
    for row in pack_documents(numbered_documents(lengths), context_length):
        position = None
        for token, actual in zip(row["input_ids"], row["position_ids"], strict=True):
            position = 0 if position is None or token in first_tokens else position + 1
            assert actual == position


@pytest.mark.parametrize("context_length", [2, 7, 16])
@pytest.mark.parametrize("make", [pack_documents, cut_documents], ids=["packed", "cut"])
def test_every_token_but_a_documents_first_is_a_target_once(make, context_length):
    lengths = random_lengths(0, context_length)
    rows = make(numbered_documents(lengths), context_length)
    assert flat(rows, "shift_labels") == expected_targets(lengths)


def test_packing_many_documents_in_several_calls_keeps_all():
    lengths = [3] * 5000
    rows = pack_documents(numbered_documents(lengths), 4)
    assert flat(rows, "input_ids") == list(range(15000))
    assert flat(rows, "shift_labels") == expected_targets(lengths)
    assert len(rows) <= 15000 / 4 * (1 + 2 / ROWS_PER_CALL) + 1


@pytest.mark.parametrize("continues", [False, True], ids=["fresh", "carried"])
def test_cut_windows_hold_one_document_each(continues):
    rows = cut_documents(numbered_documents([5, 4, 9, 1]), 4, continue_positions=continues)
    assert rows["input_ids"][:] == [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17], [18]]
    offset = 4 if continues else 0
    assert rows["position_ids"][1] == [offset]
    assert rows["position_ids"][4] == [offset, offset + 1, offset + 2, offset + 3]
    assert rows["position_ids"][6] == [0]


@pytest.mark.parametrize("num_streams", [1, 2, 3, 8, 60])
@pytest.mark.parametrize("seed", range(3))
def test_streams_hold_every_window_once_and_documents_without_a_gap(seed, num_streams):
    counts = np.random.default_rng(seed).integers(1, 9, size=50)
    order = arrange_streams(counts, num_streams)
    assert sorted(order[order >= 0].tolist()) == list(range(counts.sum()))
    document_of = np.repeat(np.arange(len(counts)), counts)
    first_windows = set((np.cumsum(counts) - counts).tolist())
    for stream in order.T:
        windows = stream[stream >= 0]
        assert (stream[len(windows) :] == -1).all()
        for place, window in enumerate(windows):
            before = windows[place - 1] if place else -1
            assert window in first_windows or (window == before + 1 and document_of[window] == document_of[before])
    ends = (order >= 0).sum(0)
    assert ends.max() - ends.min() <= counts.max()


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_each_process_reads_its_own_streams(num_processes):
    batch_size = 2
    dataset = StreamDataset(numbered_documents([20, 3, 9, 14, 5, 5, 8, 1, 1]), 4, batch_size * num_processes)
    sampler = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)
    seen = []
    for process in range(num_processes):
        position = [None] * batch_size
        for batch in BatchSamplerShard(sampler, num_processes, process):
            assert len(batch) == batch_size
            for row, index in enumerate(batch):
                item = dataset[index]
                if item["input_ids"]:
                    continues = position[row] is not None and item["position_ids"][0] == position[row] + 1
                    assert continues or item["position_ids"][0] == 0
                    position[row] = item["position_ids"][-1]
                seen += item["input_ids"]
    assert sorted(seen) == list(range(66))


def test_streams_that_end_unevenly_are_filled_with_empty_rows(caplog):
    dataset = StreamDataset(numbered_documents([12, 4]), 4, 2)
    assert len(dataset) == 6
    assert [len(dataset[i]["input_ids"]) for i in range(6)] == [4, 4, 4, 0, 4, 0]
    assert "2 of 6 rows are empty" in caplog.text
    with pytest.raises(ValueError, match="num_streams must be >= 1, got 0"):
        arrange_streams(np.array([1]), 0)


def test_collator_pads_masks_and_labels():
    rows = cut_documents(numbered_documents([5, 3]), 4)
    batch = RowCollator(4, pad_token_id=99)([rows[1], rows[2], {name: [] for name in rows.column_names}])
    assert batch["input_ids"].tolist() == [[4, 99, 99, 99], [5, 6, 7, 99], [99] * 4]
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [0] * 4]
    assert batch["labels"].tolist() == [[-100] * 4, [-100, 6, 7, -100], [-100] * 4]
    assert batch["shift_labels"].tolist() == [[-100] * 4, [6, 7, -100, -100], [-100] * 4]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_collator_refuses_rows_that_are_too_long_or_lack_a_column():
    row = cut_documents(numbered_documents([5]), 8)[0]
    with pytest.raises(ValueError, match="5 tokens, more than the collator's context_length=4"):
        RowCollator(4, 0)([row])
    del row["shift_labels"]
    with pytest.raises(ValueError, match=r"label_names=\['shift_labels'\]"):
        RowCollator(8, 0)([row])


def test_tokenizing_ends_documents_and_drops_empty_texts():
    tokenizer = byte_tokenizer()
    texts = datasets.Dataset.from_dict({"body": ["one", "", None, " two\n", "ünï"], "other": range(5)})
    documents = tokenize_documents(texts, tokenizer, "body")
    assert documents["length"][:] == [4, 6, 6]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in documents["input_ids"])
    assert [tokenizer.decode(ids[:-1]) for ids in documents["input_ids"]] == ["one", " two\n", "ünï"]


def test_long_documents_are_cut_into_documents():
    tokenizer = byte_tokenizer()
    documents = tokenize_documents(datasets.Dataset.from_dict({"text": ["abcdefg", "h"]}), tokenizer, "text", 3)
    assert documents["length"][:] == [3, 3, 2, 2]
    joined = [token for ids in documents["input_ids"] for token in ids]
    assert joined == tokenizer("abcdefg")["input_ids"] + [tokenizer.eos_token_id] + tokenizer("h")["input_ids"] + [
        tokenizer.eos_token_id
    ]


def test_tokenizing_refuses_nothing_and_no_end():
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="column 'text' holds no text: all of its 2 rows are empty"):
        tokenize_documents(datasets.Dataset.from_dict({"text": ["", ""]}), tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="must have an eos_token"):
        tokenize_documents(datasets.Dataset.from_dict({"text": ["a"]}), tokenizer)


def test_validation_documents_are_disjoint_in_order_and_drawn_by_seed():
    documents = numbered_documents([1] * 50)
    train, drawn = split_documents(documents, 0.2, seed=3)
    parts = [flat(train, "input_ids"), flat(drawn, "input_ids")]
    assert [len(part) for part in parts] == [40, 10]
    assert all(part == sorted(part) for part in parts) and sorted(parts[0] + parts[1]) == list(range(50))
    assert flat(split_documents(documents, 0.2, seed=3)[1], "input_ids") == parts[1]
    assert flat(split_documents(documents, 0.2, seed=4)[1], "input_ids") != parts[1]
    assert len(split_documents(documents, 0.001, seed=3)[1]) == 1
    with pytest.raises(ValueError, match="needs at least 2 documents, got 1"):
        split_documents(numbered_documents([9]), 0.5, seed=0)


def test_rows_of_drawn_documents_are_made_from_them_alone():
    drawn = split_documents(numbered_documents([3] * 30), 0.3, seed=0)[1]
    assert flat(pack_documents(drawn, 4), "input_ids") == flat(drawn, "input_ids")
    assert flat(cut_documents(drawn, 2), "input_ids") == flat(drawn, "input_ids")


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("four\n", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"body": "five", "n": 5}\n{"body": "six", "n": 6}\n', encoding="utf-8")
    datasets.Dataset.from_dict({"text": ["seven", "eight"]}).to_parquet(tmp_path / "d.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "sample_by, texts",
    [
        ("document", ["one\ntwo\n\nthree\n", "four\n"]),
        ("paragraph", ["one\ntwo", "three\n", "four\n"]),
        ("line", ["one", "two", "", "three", "four"]),
    ],
)
def test_text_files_are_documents_paragraphs_or_lines(corpus, sample_by, texts):
    train, evaluation = load_texts(DataArguments(dataset=[str(corpus / "*.txt")], sample_by=sample_by))
    assert train["text"][:] == texts
    assert evaluation is None


def test_json_lines_parquet_and_evaluation_files(corpus):
    args = DataArguments(dataset=str(corpus / "c.jsonl"), text_column="body", eval_dataset=str(corpus / "b.txt"))
    train, evaluation = load_texts(args)
    assert train["body"][:] == ["five", "six"]
    assert evaluation["body"][:] == ["four\n"]
    assert load_texts(DataArguments(dataset=str(corpus / "d.parquet")))[0]["text"][:] == ["seven", "eight"]


@pytest.mark.parametrize(
    "names, column, message",
    [
        (["absent.txt"], "text", "a file that is not there: .*absent.txt"),
        (["a.txt", "c.jsonl"], "text", r"must be of one kind among .* got \['.jsonl', '.txt'\]"),
        (["c.jsonl"], "text", r"text_column='text' is not in .* columns are \['body', 'n'\]"),
        (["c.jsonl"], "n", "text_column='n' must hold strings"),
        (["a.txt", "no-such-folder"], "text", "these are not files"),
        (["folder-1", "folder-2"], "text", "must be one dataset on the Hub or a list of local files"),
    ],
)
def test_data_that_cannot_be_read_is_named(corpus, names, column, message):
    with pytest.raises(ValueError, match=message):
        load_texts(DataArguments(dataset=[str(corpus / name) for name in names], text_column=column))
