# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding in C++: the numbers of PyTorch, and PyTorch wherever a model is more than C++ knows."""

import copy

import pytest
import torch
from torch import nn
from transformers.generation.configuration_utils import CompileConfig

from stream_testing import EXACT, F64, assert_same_future, assert_same_state, feed, state_tensors
from titans_testing import MATRIX_MEMORY, TOLERANCE, assert_close, logits_of, random_ids
from transformers_titans import TitansCache, native_blocks, native_rooms
from transformers_titans.memory_state import iterate_tensors
from transformers_titans.native_library import native_library
from triton_testing import Guards
from variant_oracle import VARIANTS, variant_model


CHUNK, ROWS = 8, 2
# Nothing is a multiple of a vector's lanes; query heads share keys.
ODD = {
    "hidden_size": 35,
    "intermediate_size": 45,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "memory_num_heads": 3,
    "memory_head_dim": 7,
    "memory_expansion": 3,
    "num_persistent_tokens": 5,
    "attention_bias": True,
}
MEMORIES = {
    "default": {},
    "odd": ODD,
    "deep": {"memory_gate_granularity": "chunk", "memory_forget_to": "start", "memory_depth": 3},
    "bare": {
        "memory_norm": False,
        "memory_residual": False,
        "memory_conv_kernel_size": 0,
        "memory_momentum": False,
        "memory_gating": "sigmoid",
        "num_persistent_tokens": 0,
    },
    "dla": {"memory_rule": "dla", "memory_forgetting": False},
    "dla_bare": {"memory_rule": "dla", "memory_norm": False},
    "linear_attention": {"memory_rule": "linear_attention"} | MATRIX_MEMORY,
    "swla": {"memory_rule": "swla", "memory_forget_to": "start", "memory_conv_kernel_size": 2} | MATRIX_MEMORY,
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def model_of(variant, backend="native", dtype=F64, **options):
    fields = {"memory_chunk_size": CHUNK, "segment_length": 2 * CHUNK, "sliding_window": 11}
    return variant_model(variant, dtype=dtype, memory_backend=backend, **(fields | options)).eval()


@pytest.fixture
def calls(monkeypatch):
    """The sources whose library decoding has asked for: one for each token that C++ has read."""
    asked = []

    def note(source, *defines):
        asked.append(source)
        return native_library(source, *defines)

    monkeypatch.setattr(native_blocks, "native_library", note)
    return asked


def fed(model, ids, sizes, **kwargs):
    cache = TitansCache(model.config)
    return feed(model, cache, ids, sizes, **kwargs), cache


def started(model, rows=1):
    """A cache in the midst of a chunk whose tokens are known, hence one that C++ goes on from."""
    return fed(model, random_ids(rows, CHUNK + 3), [CHUNK + 2, 1])[1]


@pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES)
@every_variant
def test_tokens_read_in_cpp_are_those_read_in_pytorch(variant, options, calls):
    """Through ends of chunks, of segments and of the window; not only what is said, but what is known."""
    model, reference = (model_of(variant, backend, **options) for backend in ("native", "chunked"))
    ids = random_ids(ROWS, 4 * CHUNK + 3)
    sizes = [3] + [1] * (ids.shape[1] - 3)
    logits, cache = fed(model, ids, sizes)
    assert len(calls) == len(sizes) - 1
    expected, expected_cache = fed(reference, ids, sizes)
    assert_close("logits", logits, expected, EXACT)
    assert_same_state(cache, expected_cache, EXACT)
    assert state_tensors(cache).keys() == state_tensors(expected_cache).keys()
    assert_same_future(reference, cache, expected_cache)


@every_variant
def test_float32_and_a_whole_text(variant, calls):
    model, ids = model_of(variant, dtype=torch.float32, **ODD), random_ids(ROWS, 4 * CHUNK + 3)
    logits, _ = fed(model, ids, [1] * ids.shape[1])
    assert len(calls) == ids.shape[1] - 1
    exact = logits_of(model_of(variant, "chunked", **ODD), ids, use_cache=False)
    assert_close("logits", logits.double(), exact, 50 * TOLERANCE[torch.float32])


@every_variant
def test_calls_of_any_size_between_tokens(variant):
    model, reference = (model_of(variant, backend) for backend in ("native", "chunked"))
    ids = random_ids(3, 5 * CHUNK)
    sizes = [1, 1, 2, 1, 1, 9, 1, 1, 1, 4, 1, 1, 1, 1, 1, 13]
    assert_close("logits", fed(model, ids, sizes)[0], logits_of(reference, ids, use_cache=False), EXACT)


@pytest.mark.parametrize("rows", [1, 7, 8])
@every_variant
def test_any_number_of_threads_gives_the_same_numbers(variant, rows):
    model = model_of(variant, dtype=torch.float32, **ODD)
    cache, ids, results = started(model, rows), random_ids(rows, CHUNK, seed=1), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        own = copy.deepcopy(cache)
        results.append((feed(model, own, ids, 1), state_tensors(own)))
        torch.set_num_threads(1)
    (logits, states), (others, other_states) = results
    assert torch.equal(logits, others)
    assert all(torch.equal(states[name], other_states[name]) for name in states)


@pytest.mark.parametrize("options", [ODD, MEMORIES["deep"], MEMORIES["bare"]], ids=["odd", "deep", "bare"])
@every_variant
def test_nothing_is_read_before_it_is_written_or_beside_what_was_given(
    variant, options, calls, monkeypatch, nan_filled_empty
):
    """Parameters and states lie in guards of NaN, and so does what comes of them; the library's own buffers are NaN
    at first."""
    model = model_of(variant, dtype=torch.float32, **options)
    cache, ids = started(model), random_ids(1, CHUNK, seed=1)
    expected = feed(model, copy.deepcopy(cache), ids, 1)
    guards, library = Guards(), native_library(native_blocks.SOURCE, "TITANS_POISON")
    for parameter in model.parameters():
        parameter.data = guards(parameter.data)
    empty, room_behind = native_rooms._empty, native_blocks._room_behind
    monkeypatch.setattr(native_rooms, "_empty", lambda like, *shape: guards(empty(like, *shape)))
    monkeypatch.setattr(
        native_blocks,
        "_room_behind",
        lambda *given: [None if t is None else guards(t) for t in room_behind(*given)],
    )
    monkeypatch.setattr(native_blocks, "native_library", lambda source: library)
    actual = feed(model, cache, ids, 1)
    guards.check()
    assert torch.equal(actual, expected)


@every_variant
def test_a_state_that_was_read_from_is_not_changed(variant):
    model = model_of(variant)
    cache = started(model)
    before = [layer.state for layer in cache.layers]
    copies = copy.deepcopy(before)
    feed(model, cache, random_ids(1, 2 * CHUNK), 1)
    for layer, state, own in zip(cache.layers, before, copies, strict=True):
        assert layer.state is not state
        assert_equal(state, own)


def assert_equal(one, other):
    pairs = zip(iterate_tensors(one), iterate_tensors(other), strict=True)
    assert all(name == same and torch.equal(t, u) for (name, t), (same, u) in pairs)


@every_variant
def test_a_state_can_be_looked_at_copied_and_kept_at_every_token(variant, calls, tmp_path):
    """Behind each token a state lies where the next one goes on; who holds it longer has it as it was."""
    model, reference = (model_of(variant, backend) for backend in ("native", "chunked"))
    cache, ids = started(model, ROWS), random_ids(ROWS, 2 * CHUNK, seed=1)
    expected_cache, held = copy.deepcopy(cache), []
    for t in range(ids.shape[1]):
        actual, expected = (feed(m, c, ids[:, t : t + 1]) for m, c in ((model, cache), (reference, expected_cache)))
        assert_close("logits", actual, expected, EXACT)
        held.append([layer.sealed for layer in cache.layers])
        if t % 3 == 0:
            assert_same_state(cache, expected_cache, EXACT)
            cache.save_pretrained(tmp_path)
            assert_equal(TitansCache.from_pretrained(tmp_path)._tree(), cache._tree())
        if t % 5 == 0:
            cache = copy.deepcopy(cache)
    assert len(calls) == ids.shape[1]
    again = started(model, ROWS)
    for t, states in enumerate(held):
        feed(model, again, ids[:, t : t + 1])
        for state, layer in zip(states, again.layers, strict=True):
            assert_close_states(state.content, layer.state)


def assert_close_states(one, other):
    for (name, t), (_, u) in zip(iterate_tensors(one), iterate_tensors(other), strict=True):
        assert_close(name, t, u, EXACT)


@every_variant
def test_caches_that_share_a_state_go_on_apart(variant):
    model, reference = (model_of(variant, backend) for backend in ("native", "chunked"))
    cache = started(model)
    feed(model, cache, random_ids(1, 2), 1)
    caches = [copy.copy(cache) for _ in range(3)]
    for other in caches:
        other.layers = [copy.copy(layer) for layer in cache.layers]
    texts = [random_ids(1, 2 * CHUNK, seed=seed) for seed in (1, 2, 3)]
    expected = [feed(reference, copy.deepcopy(cache), text) for text in texts]
    parts = [[], [], []]
    for t in range(2 * CHUNK):
        for part, other, text in zip(parts, caches, texts, strict=True):
            part.append(feed(model, other, text[:, t : t + 1]))
    for part, logits in zip(parts, expected, strict=True):
        assert_close("logits", torch.cat(part, 1), logits, EXACT)


@every_variant
def test_a_call_that_breaks_off_behind_cpp_changes_nothing(variant, monkeypatch):
    """At every token of a chunk the first try fails, and the second one gives what there would have been."""
    model, reference = (model_of(variant, backend) for backend in ("native", "chunked"))
    cache, ids = started(model), random_ids(1, 2 * CHUNK, seed=1)
    expected = feed(reference, copy.deepcopy(cache), ids)
    logits = []

    def broken_advance(*arguments):
        raise KeyboardInterrupt

    for t in range(ids.shape[1]):
        with monkeypatch.context() as patch:
            patch.setattr(TitansCache, "advance", broken_advance)
            with pytest.raises(KeyboardInterrupt):
                logits_of(model, random_ids(1, 1, seed=t), cache=cache)
        logits.append(feed(model, cache, ids[:, t : t + 1]))
    assert_close("logits", torch.cat(logits, 1), expected, EXACT)


def test_a_compiled_call_goes_on_from_it(calls):
    model, reference = (model_of("mac", backend, num_hidden_layers=1) for backend in ("native", "chunked"))
    cache, ids = started(model), random_ids(1, 3, seed=1)
    expected = feed(reference, copy.deepcopy(cache), ids)
    compiled = model.get_compiled_call(CompileConfig(backend="eager", mode=None))
    calls.clear()
    with torch.no_grad():
        forms = model, compiled, model
        logits = [form(t, cache=cache).logits for form, t in zip(forms, ids.split(1, 1), strict=True)]
    assert_close("logits", torch.cat(logits, 1), expected, EXACT)
    assert len(calls) == 2


@every_variant
def test_beams_and_steps_back(variant, calls):
    model, reference = (model_of(variant, backend) for backend in ("native", "chunked"))
    prompt = random_ids(2, CHUNK + 3)
    options = {"max_new_tokens": 2 * CHUNK, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))
    assert len(calls) > CHUNK
    cache = started(model)
    cache.activate_past_recording()
    other, ids = copy.deepcopy(cache), random_ids(1, CHUNK, seed=3)
    feed(model, cache, ids, 1)
    cache.crop(-3)
    feed(reference, other, ids[:, :-3])
    assert_same_future(reference, cache, other)


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: 2 * output)


def pre_hook(model):
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda module, given: (2 * given[0],))


def own_forward(model):
    layer = model.model.layers[0].memory.o_norm
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


def own_class(model):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[1].self_attn.v_proj.__class__ = Doubled


def other_activation(model):
    model.model.layers[0].mlp.act_fn = nn.Sigmoid()


def narrower_layer(model):
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).weight.data = getattr(mlp, name).weight.data[:-5].clone()
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :-5].clone()


def training(model):
    model.train()


def half_of_it(model):
    model.model.layers[1].mlp.half()
    hook = model.model.layers[1].mlp.register_forward_pre_hook
    hook(lambda module, given: (given[0].half(),))
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output.to(F64))


def exchanged(model):
    attention = model.model.layers[0].self_attn
    attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj


def replaced(model):
    memory = model.model.layers[1].memory
    memory.v_proj = copy.deepcopy(memory.v_proj)
    nn.init.constant_(memory.v_proj.weight, 0.1)


def biased(model):
    projection = model.model.layers[1].mlp.down_proj
    projection.bias = nn.Parameter(torch.full((projection.out_features,), 0.1, dtype=F64))


def changed_in_place(model):
    model.model.layers[0].memory.o_proj.weight.data.mul_(2)


def transposed(model):
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.mT


CHANGES = [hook, pre_hook, own_forward, own_class, other_activation, narrower_layer, training, half_of_it]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_model_that_was_changed_is_read_by_pytorch(change, calls):
    model, reference = (model_of("mac", backend) for backend in ("native", "chunked"))
    caches = [started(m) for m in (model, reference)]
    calls.clear()
    for m in (model, reference):
        change(m)
    token = random_ids(1, 1, seed=2)
    with torch.no_grad():
        actual, expected = (m(token, cache=cache).logits for m, cache in zip((model, reference), caches, strict=True))
    assert not calls
    assert_close("logits", actual, expected, EXACT)


def forgetting_to_the_start(model):
    model.config.memory_forget_to = "start"


READ_BY_PYTORCH = [hook, own_class, biased]
KNOWN = [*READ_BY_PYTORCH, exchanged, replaced, changed_in_place, transposed, forgetting_to_the_start]


@pytest.mark.parametrize("change", KNOWN, ids=[change.__name__ for change in KNOWN])
def test_what_changes_amid_a_chunk_is_read_as_it_is_then(change, calls):
    """In the model that has begun the chunk, and in another one that goes on with its cache."""
    models = [model_of("mac", backend) for backend in ("native", "chunked")]
    caches = [started(m) for m in models]
    text, other_text = random_ids(1, 3, seed=2), random_ids(1, 2, seed=4)
    results, reads = [], []
    for m, cache in zip(models, caches, strict=True):
        logits = [feed(m, cache, text, 1)]
        change(m)
        calls.clear()
        logits.append(feed(m, cache, text, 1))
        other = copy.deepcopy(m)
        for parameter in other.parameters():
            parameter.data.mul_(1.1)
        logits.append(feed(other, cache, other_text, 1))
        results.append(torch.cat(logits, 1))
        reads.append(len(calls))
    assert_close("logits", *results, EXACT)
    assert reads == [0 if change in READ_BY_PYTORCH else 5, 0]


def test_weights_that_were_moved_or_converted_are_found(calls):
    model, reference = (model_of("mag", backend, dtype=torch.float32) for backend in ("native", "chunked"))
    cache, token = started(model), random_ids(1, 1, seed=2)
    for m in (model, reference):
        m.to(F64)
        m.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=False, dtype=F64)
        nn.init.constant_(m.model.layers[0].mlp.up_proj.weight, 0.1)
        m.eval()
    # The state is in float32: PyTorch reads; from a cache of the new weights' own, C++ does.
    calls.clear()
    logits_of(model, token, cache=cache)
    assert not calls
    caches = [started(m) for m in (model, reference)]
    assert_close("logits", *(feed(m, c, token) for m, c in zip((model, reference), caches, strict=True)), EXACT)
    assert calls


def test_what_is_more_than_a_token_of_rows_that_are_alike_is_read_by_pytorch(calls):
    model = model_of("mac")
    token = random_ids(1, 1, seed=2)

    def ask(rows=1, given=None, **kwargs):
        cache = started(model, rows)
        calls.clear()
        output = model(random_ids(rows, 1, seed=2) if given is None else given, cache=cache, **kwargs)
        return len(calls), output

    with torch.no_grad():
        assert ask()[0] == 1
        assert ask(rows=8)[0] == 1 and ask(rows=9)[0] == 0
        assert ask(given=torch.cat([token, token], 1))[0] == 0
        assert ask(rows=2, attention_mask=torch.tensor([[1], [0]]))[0] == 0
        count, output = ask(output_hidden_states=True)
        assert count == 0 and len(output.hidden_states) == 3
        assert ask(output_hidden_states=0)[0] == 0
        # The hooks that this has left behind look at nothing.
        assert ask()[0] == 1
        count, output = ask(output_surprise=True)
        assert count == 0 and len(output.surprise) == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert ask()[0] == 0
    count, output = ask()
    assert count == 0 and output.logits.requires_grad


@pytest.mark.parametrize("options", [{"memory_backend": "chunked"}, {"memory_caching": "grm"}])
def test_other_backends_and_memory_caching_do_not_ask_for_it(options, calls):
    model = model_of("lmm", **({"backend": options.pop("memory_backend")} if "memory_backend" in options else options))
    feed(model, started(model), random_ids(1, 3), 1)
    assert not calls


def test_no_memory_is_an_error_and_changes_nothing(monkeypatch):
    class Library:
        def titans_read_blocks(self, *arguments):
            return 1

    model = model_of("mac")
    cache = started(model)
    states = [layer.state for layer in cache.layers]
    monkeypatch.setattr(native_blocks, "native_library", lambda source: Library())
    with pytest.raises(MemoryError, match="decoding in C"):
        logits_of(model, random_ids(1, 1), cache=cache)
    assert all(layer.state is state for layer, state in zip(cache.layers, states, strict=True))
    assert cache.get_seq_length() == CHUNK + 3
