# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""generate(): every way of decoding gives, with the memory-state cache, what it gives without any cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, pipeline
from transformers.generation import BaseStreamer

from titans_testing import OPTIONS, logits_of, random_ids, tiny_config, tiny_model
from transformers_titans import TitansCache, TitansConfig, TitansForCausalLM
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


CHUNK, SEGMENT = 4, 8
every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)
# Without an end, so that every row runs to its full length.
ENDLESS = {"eos_token_id": None, "do_sample": False}


def greedy(model, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The definition: the likeliest next token again and again, everything read anew each time."""
    for _ in range(new_tokens):
        ids = torch.cat([ids, logits_of(model, ids, use_cache=False)[:, -1:].argmax(-1)], 1)
    return ids


def assert_greedy(model, generated: torch.Tensor, prompt: torch.Tensor, new_tokens: int) -> None:
    """It is `greedy` of the prompt: each new token is the likeliest one behind those before it, all read anew."""
    length = prompt.shape[1]
    assert generated.shape[1] == length + new_tokens
    predicted = logits_of(model, generated[:, :-1], use_cache=False)[:, length - 1 :].argmax(-1)
    assert torch.equal(generated, torch.cat([prompt, predicted], 1))


def left_pad(rows: list[torch.Tensor], pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def repetitive_ids(length: int = 40) -> torch.Tensor:
    return torch.tensor([[5, 9, 14, 7, 33, 21, 8, 11] * (length // 8)])


@pytest.fixture(params=[*VARIANTS, "mac_ssc"])
def model(request):
    return variant_model(request.param, num_hidden_layers=1)


# What only a model with attention can be told.
ATTENTION_OPTIONS = {
    "attention_bias": {"attention_bias": True},
    "one_key_value_head": {"num_key_value_heads": 1},
    "sigmoid": {"memory_gating": "sigmoid"},
}
EVERY_OPTION = OPTIONS | ATTENTION_OPTIONS


# The memory is the same in every variant, but every switch is thrown in all of them.
SWITCHES = ["default", "no_momentum", "no_forgetting", "no_residual", "no_norm", "tied", "no_conv", "persistent_0"]
SWITCHES += ["chunk_gates", *ATTENTION_OPTIONS]


@pytest.mark.parametrize(
    ("variant", "option"),
    [
        (variant, option)
        for variant in VARIANTS
        for option in EVERY_OPTION
        if option in (OPTIONS if variant == "lmm" else SWITCHES)
    ],
)
def test_greedy_for_each_option_and_prompt_length(variant, option):
    # Past an end of a segment, or two, and so past the ends of chunks and of the window.
    model = variant_model(variant, num_hidden_layers=1, **EVERY_OPTION[option])
    lengths = (1, CHUNK, 2 * CHUNK + 1)
    # Switches that have to do with where in a chunk, or how far behind the text's start, a token is.
    if option in ("default", "no_conv", "persistent_0", "chunk_gates"):
        lengths += (CHUNK - 1, CHUNK + 1)
    for length in lengths:
        ids, new_tokens = random_ids(2, length, seed=length), SEGMENT * (2 if length == 1 else 1) + 2
        assert_greedy(model, model.generate(ids, max_new_tokens=new_tokens, **ENDLESS), ids, new_tokens)


def test_no_boolean_option_is_left_out():
    booleans = {name for name, kind in TitansConfig.__annotations__.items() if kind is bool} - {"use_cache"}
    switched = [fields for option, fields in EVERY_OPTION.items() if option in SWITCHES]
    assert booleans == {name for fields in switched for name, value in fields.items() if isinstance(value, bool)}


def test_greedy_without_cache_equals_with_cache(model):
    ids = random_ids(2, 7)
    with_cache = model.generate(ids, max_new_tokens=10, **ENDLESS)
    assert torch.equal(model.generate(ids, max_new_tokens=10, use_cache=False, **ENDLESS), with_cache)


@every_variant
def test_greedy_over_many_chunks_in_float64(variant):
    model = variant_model(variant, dtype=torch.float64)
    ids = random_ids(1, 3)
    assert_greedy(model, model.generate(ids, max_new_tokens=60, **ENDLESS), ids, 60)


def test_logits_of_each_step_equal_the_full_forward(model):
    ids = random_ids(2, 6)
    output = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, output_logits=True, **ENDLESS)
    expected = logits_of(model, output.sequences[:, :-1], use_cache=False)[:, 5:]
    torch.testing.assert_close(torch.stack(output.logits, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_seeded_sampling(model, use_cache):
    ids = random_ids(3, 6)
    arguments = {"max_new_tokens": 12, "do_sample": True, "top_k": 10, "temperature": 0.8, "eos_token_id": None}
    torch.manual_seed(1)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, use_cache=use_cache, **arguments), expected)
    torch.manual_seed(2)
    assert not torch.equal(model.generate(ids, **arguments), expected)


@pytest.mark.parametrize("sampling", [False, True], ids=["search", "sample"])
@every_variant
def test_beams_equal_beams_without_cache(variant, sampling):
    model = variant_model(variant, dtype=torch.float64)
    inputs = left_pad([random_ids(length, seed=length) for length in (3, 9, 6)])
    arguments = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "do_sample": sampling}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(model.generate(**inputs, use_cache=use_cache, **arguments))
    assert results[0].shape[0] == 12
    assert torch.equal(results[0], results[1])


def test_beam_of_one_is_greedy_and_more_beams_score_at_least_as_well(model):
    ids = random_ids(1, 6)

    def score(sequences):
        logprobs = logits_of(model, sequences[:, :-1]).log_softmax(-1)[:, 5:]
        return logprobs.gather(2, sequences[:, 6:, None]).sum()

    arguments = {"max_new_tokens": 10, "length_penalty": 0.0, **ENDLESS}
    one_beam = model.generate(ids, num_beams=1, **arguments)
    assert_greedy(model, one_beam, ids, 10)
    assert score(model.generate(ids, num_beams=8, **arguments)) >= score(one_beam)


def test_num_return_sequences_draws_different_rows(model):
    torch.manual_seed(0)
    generated = model.generate(
        random_ids(2, 6), num_return_sequences=3, do_sample=True, max_new_tokens=8, eos_token_id=None
    )
    assert generated.shape == (6, 14)
    assert torch.equal(generated[:3, :6], random_ids(2, 6)[:1].expand(3, -1))
    assert len({tuple(row.tolist()) for row in generated}) == 6


@pytest.mark.parametrize(
    ("variant", "pad"),
    [("lmm", 0), *((variant, 2) for variant in EVERY_VARIANT)],
    ids=lambda value: {0: "pad", 2: "pad_is_eos"}.get(value, value),
)
def test_left_padded_rows_equal_rows_alone(variant, pad):
    model = variant_model(variant, pad_token_id=pad)
    rows = [random_ids(length, seed=length) for length in (5, 23, 1, 12)]
    generated = model.generate(**left_pad(rows, pad), max_new_tokens=20, pad_token_id=pad, **ENDLESS)
    for row, actual in zip(rows, generated, strict=True):
        assert_greedy(model, actual[23 - len(row) :][None], row[None], 20)


def test_one_padded_prompt_in_a_batch_of_one(model):
    row = random_ids(9)
    ids = torch.cat([torch.zeros(13, dtype=torch.long), row])[None]
    mask = torch.cat([torch.zeros(13, dtype=torch.long), torch.ones(9, dtype=torch.long)])[None]
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=20, **ENDLESS)
    assert_greedy(model, generated[:, 13:], row[None], 20)


def test_row_that_has_ended_does_not_disturb_the_others():
    model = tiny_model()
    rows = [random_ids(5, seed=1), random_ids(5, seed=2)]
    free = greedy(model, torch.stack(rows), 20)
    # The first row ends at its third new token, wherever the second one may be.
    end = free[0][7].item()
    generated = model.generate(torch.stack(rows), max_new_tokens=20, eos_token_id=end, pad_token_id=0, do_sample=False)
    for row, alone in zip(generated, free, strict=True):
        stop = (alone[5:] == end).nonzero()
        length = 25 if not len(stop) else 5 + stop[0].item() + 1
        assert torch.equal(row[:length], alone[:length][: len(row)])


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten())

    def end(self):
        self.ended = True


def test_streamer_gets_the_prompt_and_each_token(model):
    recorder = Recorder()
    generated = model.generate(random_ids(1, 6), max_new_tokens=9, streamer=recorder, **ENDLESS)
    assert [len(piece) for piece in recorder.pieces] == [6] + [1] * 9
    assert torch.equal(torch.cat(recorder.pieces), generated[0]) and recorder.ended


@pytest.mark.parametrize("rows, first", [(2, 1), (1, CHUNK), (2, 10)])
@every_variant
def test_continuing_with_the_returned_cache(variant, rows, first):
    model = variant_model(variant)
    ids, turn = random_ids(rows, 7), random_ids(rows, 15, seed=4)
    output = model.generate(ids, max_new_tokens=first, return_dict_in_generate=True, **ENDLESS)
    assert isinstance(output.cache, TitansCache)
    # The last token is chosen but not yet read.
    assert output.cache.get_seq_length() == 7 + first - 1
    joined = torch.cat([output.sequences, turn], 1)
    # Said outright: where it is not, generate() takes a padding token that the model has chosen for padding.
    mask = torch.ones_like(joined)
    generated = model.generate(joined, attention_mask=mask, cache=output.cache, max_new_tokens=SEGMENT + 2, **ENDLESS)
    assert_greedy(model, generated, joined, SEGMENT + 2)


def test_continuing_a_left_padded_batch(model):
    rows = [random_ids(5, seed=1), random_ids(9, seed=2)]
    inputs = left_pad(rows)
    output = model.generate(**inputs, max_new_tokens=6, return_dict_in_generate=True, **ENDLESS)
    turn = random_ids(2, 5, seed=3)
    joined = torch.cat([output.sequences, turn], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 11, dtype=torch.long)], 1)
    generated = model.generate(joined, attention_mask=mask, cache=output.cache, max_new_tokens=10, **ENDLESS)
    for index, row in enumerate(rows):
        real = slice(9 - len(row), None)
        assert_greedy(model, generated[index, real][None], joined[index, real][None], 10)


def test_continuing_after_one_row_has_ended():
    # A row that ended early is filled up with padding, which must not be taken for text, nor for a new document.
    model = tiny_model()
    rows = [random_ids(5, seed=1), random_ids(5, seed=4)]
    end = greedy(model, rows[0][None], 3)[0, -1].item()
    assert end not in greedy(model, rows[1][None], 12)[0, 5:]
    ids = torch.stack(rows)
    output = model.generate(
        ids, max_new_tokens=12, eos_token_id=end, pad_token_id=0, do_sample=False, return_dict_in_generate=True
    )
    assert output.sequences[0, 8:].eq(0).all()
    joined = torch.cat([output.sequences, random_ids(2, 6, seed=3)], 1)
    mask = joined.ne(0).long()
    try:
        generated = model.generate(joined, attention_mask=mask, cache=output.cache, max_new_tokens=8, **ENDLESS)
    except ValueError as error:
        # Also right: the memory has read padding as text and cannot give it back.
        assert "attention_mask" in str(error) and "cache" in str(error)
    else:
        for row, alone in zip(generated, (joined[:1, mask[0].bool()], joined[1:]), strict=True):
            assert torch.equal(row[-8:], greedy(model, alone, 8)[0, -8:])


def primed_cache(model, ids: torch.Tensor, **kwargs) -> TitansCache:
    cache = TitansCache(model.config)
    logits_of(model, ids, cache=cache, **kwargs)
    return cache


def test_a_text_read_once_is_asked_with_the_full_text_or_the_full_mask(model):
    text, question = random_ids(1, 21), random_ids(1, 6, seed=1)
    joined = torch.cat([text, question], 1)
    generated = model.generate(joined, cache=primed_cache(model, text), max_new_tokens=9, **ENDLESS)
    assert_greedy(model, generated, joined, 9)
    # The text itself may be gone: its length is enough.
    mask = torch.ones(1, 27, dtype=torch.long)
    asked = model.generate(question, attention_mask=mask, cache=primed_cache(model, text), max_new_tokens=9, **ENDLESS)
    assert torch.equal(asked[:, 6:], generated[:, 27:])


def test_a_question_alone_is_refused_clearly_or_answered(model):
    # transformers takes ids without a longer mask for the whole text, the cached part included.
    text, question = random_ids(1, 21), random_ids(1, 6, seed=1)
    cache = primed_cache(model, text)
    try:
        generated = model.generate(question, cache=cache, max_new_tokens=9, **ENDLESS)
    except ValueError as error:
        assert "21" in str(error) and "attention_mask" in str(error)
        assert cache.get_seq_length() == 21
    else:
        assert_greedy(model, torch.cat([text, generated], 1), torch.cat([text, question], 1), 9)


@pytest.mark.parametrize(
    "positions",
    [torch.cat([torch.arange(12), torch.arange(9)])[None], 5 + torch.arange(21)[None]],
    ids=["packed_documents", "offset"],
)
def test_generation_goes_on_from_wherever_the_cache_stands(positions, model):
    # generate() counts positions in columns; the memory must not take the difference for a new document.
    text, question = random_ids(1, 21), random_ids(1, 6, seed=1)
    cache = primed_cache(model, text, position_ids=positions)
    follow = copy.deepcopy(cache)
    expected = question
    logits = logits_of(model, question, cache=follow)
    for _ in range(9):
        token = logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, token], 1)
        logits = logits_of(model, token, cache=follow)
    joined = torch.cat([text, question], 1)
    generated = model.generate(joined, cache=cache, max_new_tokens=9, **ENDLESS)
    assert torch.equal(generated[:, 21:], expected)


@pytest.mark.parametrize(
    "arguments",
    [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3, "do_sample": False}, {"num_beams": 1}],
    ids=["return_sequences", "beams", "greedy"],
)
@every_variant
def test_primed_cache_is_repeated_for_the_rows_to_come(variant, arguments):
    model = variant_model(variant, dtype=torch.float64)
    text, question = random_ids(2, 13), random_ids(2, 4, seed=1)
    joined = torch.cat([text, question], 1)
    results = []
    for cache in (primed_cache(model, text), None):
        torch.manual_seed(5)
        results.append(model.generate(joined, cache=cache, max_new_tokens=9, eos_token_id=None, **arguments))
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@every_variant
def test_a_cache_that_is_passed_is_used_where_the_config_says_none(variant, arguments):
    """Training scripts leave `use_cache=False` behind in a checkpoint's config."""
    model = variant_model(variant, dtype=torch.float64)
    text = random_ids(2, 17)
    expected = model.generate(text, max_new_tokens=9, **ENDLESS, **arguments)
    model.generation_config.use_cache = False
    cache = primed_cache(model, text[:, :13])
    generated = model.generate(text, cache=cache, max_new_tokens=9, **ENDLESS, **arguments)
    assert torch.equal(generated, expected) and cache.get_seq_length() == 17 + 9 - 1


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left_padded"])
def test_prefill_in_chunks(padded, model):
    rows = [random_ids(23 if not padded else 9, seed=1), random_ids(23, seed=2)]
    inputs = left_pad(rows)
    expected = model.generate(**inputs, max_new_tokens=6, **ENDLESS)
    for chunk in (1, 3, CHUNK, 7, 50):
        generated = model.generate(**inputs, max_new_tokens=6, prefill_chunk_size=chunk, **ENDLESS)
        assert torch.equal(generated, expected), chunk


def test_generation_from_embeddings(model):
    ids = random_ids(2, 9)
    embeds = model.get_input_embeddings()(ids).detach()
    generated = model.generate(inputs_embeds=embeds, max_new_tokens=9, **ENDLESS)
    assert_greedy(model, torch.cat([ids, generated], 1), ids, 9)


def test_generation_leaves_no_trace_in_the_model(model):
    fresh = copy.deepcopy(model)
    four, one = random_ids(4, 9), random_ids(1, 5)
    before = copy.deepcopy(model.state_dict())
    first = model.generate(four, max_new_tokens=7, **ENDLESS)
    second = model.generate(one, max_new_tokens=7, **ENDLESS)
    model.train()
    for _ in range(2):
        model(four, labels=four).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()
    assert torch.equal(model.generate(four, max_new_tokens=7, **ENDLESS), first)
    assert torch.equal(model.generate(one, max_new_tokens=7, **ENDLESS), second)
    assert torch.equal(fresh.generate(one, max_new_tokens=7, **ENDLESS), second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_generation_in_training_mode_equals_evaluation_mode(model):
    ids = random_ids(2, 9)
    expected = model.generate(ids, max_new_tokens=9, **ENDLESS)
    model.train()
    assert torch.equal(model.generate(ids, max_new_tokens=9, **ENDLESS), expected)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=9, **ENDLESS), expected)


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded", "offloaded_static"])
def test_other_cache_implementations_are_refused(implementation, model):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(random_ids(1, 5), cache_implementation=implementation, max_new_tokens=3)


@pytest.mark.parametrize("cache", [DynamicCache(), ((torch.zeros(1),) * 2,)], ids=["DynamicCache", "tuple"])
def test_other_caches_are_refused(cache, model):
    with pytest.raises(ValueError, match="TitansCache"):
        model.generate(random_ids(1, 5), cache=cache, max_new_tokens=3)


def test_cache_of_other_rows_is_refused(model):
    ids = random_ids(2, 9)
    cache = primed_cache(model, random_ids(3, 5))
    with pytest.raises(ValueError, match="cache is of 3 rows, the input of 2"):
        model.generate(ids, cache=cache, max_new_tokens=3, **ENDLESS)
    assert cache.get_seq_length() == 5


def test_continuous_batching_is_refused_at_once(model):
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=3)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate(random_ids(1, 5), cache_implementation="paged", max_new_tokens=3)


def test_text_generation_pipeline(model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 64)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["w5 w9 w14", "w7 w33 w21 w8 w11 w40"]
    outputs = generate(prompts, max_new_tokens=6, batch_size=2, **ENDLESS)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        answer = tokenizer.decode(greedy(model, ids, 6)[0, ids.shape[1] :], skip_special_tokens=True)
        assert output[0]["generated_text"] == prompt + answer


def test_a_model_without_an_explicit_config_of_generation_saves_and_generates(tmp_path):
    TitansForCausalLM(tiny_config()).save_pretrained(tmp_path)
    loaded = TitansForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.eos_token_id == 2
    assert loaded.generate(random_ids(1, 4), max_new_tokens=3).shape[1] <= 7
