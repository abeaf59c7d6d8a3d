# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile takes the memory and whole models without a graph break, and gives eager's numbers and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from titans_testing import (
    LONG_TEXT,
    RULES,
    SHORT_TEXT,
    TOLERANCE,
    assert_close,
    fill_with_noise,
    input_gradients,
    iterate_floats,
    logits_of,
    make_inputs,
    op_arguments,
    parameter_gradients,
    random_ids,
    result_tensors,
    run_op,
    tiny_config,
    tiny_model,
)
from transformers_titans import TitansCache, chunk_forward
from transformers_titans.compiled_decoding import _vector_products_pass, replace_vector_products
from transformers_titans.memory_layer import TitansNeuralMemory
from transformers_titans.memory_ops import neural_memory


# 2.6 was tried: its compiler fails inside itself on named tuples, of which states and arguments consist; 2.9 works.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch.compile fails on named tuples before 2.9")

F64 = torch.float64
# One small layer each, since a trace takes long; the depth of the memory is the op's own concern.
SMALL = {"num_hidden_layers": 1, "memory_depth": 1}
VARIANTS = {
    "lmm": SMALL,
    "mal": SMALL | {"variant": "mal", "sliding_window": 5},
    "mag": SMALL | {"variant": "mag", "sliding_window": 5},
    "mac": SMALL | {"variant": "mac", "segment_length": 4},
}
# What rows that are alike keep is a matter of numbers, for which a trace need not wait.
CACHING = SMALL | {"memory_caching": "grm", "cache_segment_length": 4, "cache_max_segments": 1}
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]])


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiler():
    """Compiles without a graph break; ``frame_count`` is the number of graphs it has made."""
    return CompileCounterWithBackend("aot_eager")


@pytest.fixture
def tracer():
    """A compiler that runs a graph as it was traced: for the number of graphs and what they were traced from."""
    return CompileCounterWithBackend("eager")


def compiled(function, compiler):
    return torch.compile(function, fullgraph=True, backend=compiler)


# AOT autograd takes longer than the trace: it goes over the op where rows differ and over whole models where they do
# not, and `test_compiled_spans_equal_plain_ones` over each rule.
PADDED = {"length": 7, "mask": MASK.bool(), "count": [1, 3], "gate_granularity": "chunk", "forget_to": "start"}
OPS = {
    "alike": ({"length": 7, "count": 2, "depth": 1}, "eager"),
    "padded": (PADDED, "aot_eager"),
    "swla": ({"length": 7, "count": 2} | RULES["swla"], "eager"),
}


@pytest.mark.parametrize(("options", "backend"), OPS.values(), ids=OPS)
def test_op(options, backend):
    compiler = CompileCounterWithBackend(backend)
    inputs = make_inputs(**options).require_grad()
    expected = result_tensors(run_op(inputs, output_surprise=True), 4)
    arguments = op_arguments(inputs) | {"output_surprise": True}
    actual = result_tensors(compiled(neural_memory, compiler)(**arguments), 4)
    for name, tensor in expected.items():
        assert_close(name, actual[name], tensor, TOLERANCE[F64])
    reference = input_gradients(expected, inputs)
    for name, gradient in input_gradients(actual, inputs).items():
        assert_close(f"gradient of {name}", gradient, reference[name], TOLERANCE[F64])
    assert compiler.frame_count == 1


def memory_layer(dtype=F64, **fields) -> TitansNeuralMemory:
    layer = TitansNeuralMemory(tiny_config(**(SHORT_TEXT | fields))).to(dtype)
    fill_with_noise(layer)
    return layer


def layer_gradients(layer, function, hidden_states, mask, prefix):
    """Result, final weights, and the gradients of everything that the layer was given or has learned."""
    output = function(hidden_states, attention_mask=mask, prefix_states=prefix)
    loss = output.hidden_states.sin().sum() + sum(t.sin().sum() for t in iterate_floats(output.state))
    named = {"hidden_states": hidden_states, "prefix": prefix} | dict(layer.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    return {"output": output.hidden_states, "loss": loss} | dict(zip(named, gradients, strict=True))


def test_layer_trains(tracer):
    layer = memory_layer(memory_depth=1).train()
    hidden_states = torch.randn(2, 7, 32, dtype=F64, requires_grad=True)
    prefix = torch.randn(2, 32, dtype=F64, requires_grad=True)
    expected = layer_gradients(layer, layer, hidden_states, MASK, prefix)
    actual = layer_gradients(layer, compiled(layer, tracer), hidden_states, MASK, prefix)
    for name, tensor in expected.items():
        assert_close(name, actual[name], tensor, TOLERANCE[F64])
    assert tracer.frame_count == 1


@pytest.mark.parametrize("counts", ["int", "tensor"])
def test_layer_decodes_with_few_compilations(tracer, counts):
    """100 tokens over 6 ends of chunks; a count that is an int is a length, of which some are compiled apart."""
    layer = memory_layer(memory_depth=1, memory_chunk_size=16, memory_max_lr=0.02, memory_max_forget=0.002).eval()
    step, hidden_states = compiled(layer, tracer), torch.randn(2, 100, 32, dtype=F64)
    mask = None
    if counts == "tensor":
        mask = torch.ones(2, 100)
        mask[1, 0] = 0
    with torch.no_grad():
        expected = layer(hidden_states, attention_mask=mask).hidden_states
        state = layer(hidden_states[:, :1], attention_mask=None if mask is None else mask[:, :1]).state
        for t in range(1, 100):
            output = step(hidden_states[:, t : t + 1], state=state)
            assert_close(f"token {t}", output.hidden_states, expected[:, t : t + 1], TOLERANCE[F64])
            state = output.state
    assert isinstance(state.memory.count, int if counts == "int" else torch.Tensor)
    assert tracer.frame_count <= (8 if counts == "int" else 2)


TRAINED = {
    "mag": (VARIANTS["mag"], MASK, "eager"),
    "mac": (VARIANTS["mac"], None, "aot_eager"),
    "caching": (CACHING, None, "aot_eager"),
}


@pytest.mark.parametrize(("fields", "mask", "backend"), TRAINED.values(), ids=TRAINED)
def test_model_trains(fields, mask, backend):
    compiler = CompileCounterWithBackend(backend)
    model, ids = tiny_model(dtype=F64, **fields).train(), random_ids(2, 7)
    loss = model(ids, attention_mask=mask, labels=ids).loss
    expected = parameter_gradients(model, loss)
    compiled_loss = compiled(model, compiler)(ids, attention_mask=mask, labels=ids).loss
    assert_close("loss", compiled_loss, loss, TOLERANCE[F64])
    actual = parameter_gradients(model, compiled_loss)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(name, actual[name], gradient, TOLERANCE[F64])
    assert compiler.frame_count == 1


# LMM alone is decoded below; in MAL and MAG it has attention behind it or beside it.
@pytest.mark.parametrize("variant", ["mal", "mag", "mac"])
def test_model_decodes_100_tokens_with_two_graphs(tracer, variant):
    """As generate() does it, with a mask that grows; over many ends of chunks, windows and segments."""
    fields = {"memory_chunk_size": 8, "segment_length": 16, "sliding_window": 20} | LONG_TEXT
    model = tiny_model(dtype=F64, **(VARIANTS[variant] | fields))
    step, ids, mask = compiled(model, tracer), random_ids(2, 110), torch.ones(2, 110, dtype=torch.long)
    mask[0, :4] = 0
    cache = TitansCache(model.config)
    decoded = [logits_of(model, ids[:, :10], attention_mask=mask[:, :10], cache=cache)]
    for t in range(10, 110):
        decoded.append(logits_of(step, ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache))
    real = mask.bool()
    expected = logits_of(model, ids, attention_mask=mask)[real]
    assert_close("logits", torch.cat(decoded, 1)[real], expected, TOLERANCE[F64])
    assert tracer.frame_count <= 2


def test_model_decodes_with_a_cache(compiler):
    """Prefill in eager, then token by token without a mask: the states that a graph returns own their memory."""
    model = tiny_model(dtype=F64, **VARIANTS["mac"])
    step, ids = compiled(model, compiler), random_ids(2, 24)
    cache = TitansCache(model.config)
    logits_of(model, ids[:, :3], cache=cache)
    decoded = [logits_of(step, ids[:, t : t + 1], cache=cache) for t in range(3, 24)]
    assert_close("logits", torch.cat(decoded, 1), logits_of(model, ids)[:, 3:], TOLERANCE[F64])
    assert compiler.frame_count <= 2
    assert cache.get_seq_length() == 24
    for tensor in iterate_floats(cache):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(("variant", "padded"), [("lmm", False), ("mal", True), ("mag", False), ("mac", True)])
def test_compiled_call_decodes_over_ends_of_chunks(tracer, variant, padded):
    """What generate() decodes with where it is given a compile_config: tokens that close a chunk are not compiled."""
    fields = {"memory_chunk_size": 8, "segment_length": 16, "sliding_window": 20}
    model = tiny_model(dtype=F64, **(VARIANTS[variant] | fields)).eval()
    ids, mask = random_ids(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[0, : 4 * padded] = 0
    step = model.get_compiled_call(compile_config(tracer))
    with torch.no_grad():
        cache = model(ids[:, :10], attention_mask=mask[:, :10], use_cache=True).cache
        decoded = [
            logits_of(step, ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache) for t in range(10, 45)
        ]
    expected = logits_of(model, ids, attention_mask=mask)[:, 10:]
    assert_close("logits", torch.cat(decoded, 1), expected, TOLERANCE[F64])
    assert 1 <= tracer.frame_count <= 4


def compile_config(compiler, **fields) -> CompileConfig:
    # A configuration copies its backend, but not a function.
    return CompileConfig(fullgraph=True, backend=lambda graph, inputs: compiler(graph, inputs), **fields)


def test_generate_decodes_compiled_where_it_is_asked_to(tracer):
    model = tiny_model(dtype=F64, **(VARIANTS["mac"] | {"memory_chunk_size": 8, "segment_length": 8})).eval()
    prompt, options = random_ids(2, 9), {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(prompt, **options)
    config = compile_config(tracer)
    assert torch.equal(model.generate(prompt, compile_config=config, **options), expected)
    count = tracer.frame_count
    assert count >= 1
    model.generate(prompt, compile_config=config, **options)
    assert tracer.frame_count == count, "a second text is decoded with the graphs of the first"
    torch._dynamo.reset()
    for refused in ({"compile_config": config, "disable_compile": True}, {}):
        model.generate(prompt, **refused, **options)
    model.hf_device_map = {"model.layers.0": 0, "lm_head": "cpu"}
    model.generate(prompt, compile_config=config, **options)
    assert tracer.frame_count == count


def test_compiled_call_leaves_all_else_to_eager_mode(compiler):
    """Gradients, hidden states, several tokens, and a call without a cache are what they are without it."""
    model = tiny_model(dtype=F64, **VARIANTS["mac"]).eval()
    step, ids = model.get_compiled_call(compile_config(compiler)), random_ids(2, 12)
    parameter_gradients(model, step(ids, labels=ids).loss)
    with torch.no_grad():
        assert torch.equal(step(ids).logits, model(ids).logits)
        cache = step(ids[:, :6], use_cache=True).cache
        actual, expected = (model(ids[:, 6:9], cache=copy.deepcopy(cache)).logits for model in (step, model))
        assert torch.equal(actual, expected)
        hidden_states = step(ids[:, 6:7], cache=cache, output_hidden_states=True).hidden_states
    assert len(hidden_states) == model.config.num_hidden_layers + 1
    assert compiler.frame_count == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_products_of_one_row_become_sums(rows):
    """Also where the row is computed beside them, is a part of another tensor, or the result is too."""

    def function(x, other, first, second, bias):
        return F.linear(F.silu(F.linear(x, first)) * 2, second, bias), F.linear(other[..., 3:], second)

    arguments = [torch.randn(*shape, dtype=F64) for shape in ((1, rows, 5), (1, rows, 12), (9, 5), (7, 9), (7,))]
    graph = make_fx(function, tracing_mode="fake")(*arguments)
    replace_vector_products(graph.graph)
    graph.recompile()
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    left = [len(graph.graph.find_nodes(op="call_function", target=target)) for target in products]
    assert left == ([0, 0] if rows == 1 else [2, 1])
    expected = function(*arguments)
    compiled_function = torch.compile(function, options={"post_grad_custom_pre_pass": _vector_products_pass()})
    for result in (graph(*arguments), compiled_function(*arguments)):
        for index, pair in enumerate(zip(result, expected, strict=True)):
            assert_close(f"result {index}", *pair, TOLERANCE[F64])


def test_model_with_memory_caching_decodes_over_ends_of_segments(tracer):
    """Each number of kept memories is a graph of its own, a segment's end another; a bound bounds both."""
    # Of two tokens: each length of an open chunk is one more graph.
    model = tiny_model(dtype=F64, **(CACHING | {"memory_chunk_size": 2, "cache_segment_length": 2}))
    step, ids = compiled(model, tracer), random_ids(2, 14)
    cache = TitansCache(model.config)
    logits_of(model, ids[:, :3], cache=cache)
    decoded = [logits_of(step, ids[:, t : t + 1], cache=cache) for t in range(3, 14)]
    assert_close("logits", torch.cat(decoded, 1), logits_of(model, ids)[:, 3:], TOLERANCE[F64])
    assert cache.layers[0].state.memory.kept.closed == 7
    assert tracer.frame_count <= 4


def test_padded_rows_with_memory_caching_may_break_the_graph_but_change_no_number():
    """Where rows differ, how many segments end in a call is known to the device alone."""
    layer, hidden_states = memory_layer(**CACHING), torch.randn(2, 7, 32, dtype=F64)
    with torch.no_grad():
        expected = layer(hidden_states, attention_mask=MASK).hidden_states
        actual = torch.compile(layer, backend="eager")(hidden_states, attention_mask=MASK).hidden_states
    assert_close("output", actual[MASK.bool()], expected[MASK.bool()], TOLERANCE[F64])


def test_model_makes_a_cache_in_a_padded_call(tracer):
    model = tiny_model(dtype=F64, **VARIANTS["lmm"])
    ids, later = random_ids(2, 7), random_ids(2, 5, seed=1)
    with torch.no_grad():
        expected = model(ids, attention_mask=MASK, use_cache=True)
        actual = compiled(model, tracer)(ids, attention_mask=MASK, use_cache=True)
    assert_close("logits", actual.logits, expected.logits, TOLERANCE[F64])
    rest = logits_of(model, later, cache=expected.cache)
    assert_close("later", logits_of(model, later, cache=actual.cache), rest, TOLERANCE[F64])


def test_documents_may_break_the_graph_but_change_no_number():
    """The number of documents sizes a table, for which a trace has to stop: not a case for ``fullgraph=True``."""
    model = tiny_model(dtype=F64, **VARIANTS["lmm"])
    ids, positions = random_ids(1, 5), torch.tensor([[0, 1, 2, 0, 1]])
    expected = logits_of(model, ids, position_ids=positions, use_cache=False)
    actual = logits_of(torch.compile(model, backend="eager"), ids, position_ids=positions, use_cache=False)
    assert_close("logits", actual, expected, TOLERANCE[F64])


def test_inductor_decodes_a_token():
    layer = memory_layer(torch.float32, memory_depth=1).eval()
    hidden_states = torch.randn(2, 3, 32)
    with torch.no_grad():
        state = layer(hidden_states[:, :2]).state
        expected = layer(hidden_states[:, 2:], state=state)
        actual = torch.compile(layer, fullgraph=True, backend="inductor")(hidden_states[:, 2:], state=state)
    assert_close("output", actual.hidden_states, expected.hidden_states, TOLERANCE[torch.float32])
    for index, pair in enumerate(zip(iterate_floats(actual.state), iterate_floats(expected.state), strict=True)):
        assert_close(f"state {index}", *pair, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "length, count, options",
    [(31, 0, {}), (13, 3, {}), (13, 3, RULES["dla"]), (13, 3, RULES["swla"])],
    ids=["fresh", "titans", "dla", "swla"],
)
def test_compiled_spans_equal_plain_ones(length, count, options, compiler, monkeypatch):
    """backend="compiled": whole chunks go through torch.compile, one graph for all spans alike; the rest does not."""
    monkeypatch.setattr(chunk_forward, "_compiled", lambda function: torch.compile(function, backend=compiler))
    inputs = make_inputs(length=length, count=count, **options).require_grad()
    expected = result_tensors(run_op(inputs, "chunked"), inputs.chunk_size)
    actual = result_tensors(run_op(inputs, "compiled"), inputs.chunk_size)
    gradients = [input_gradients(tensors, inputs) for tensors in (expected, actual)]
    for name, tensor in expected.items():
        assert_close(name, actual[name], tensor, TOLERANCE[F64])
    for name, gradient in gradients[0].items():
        assert_close(f"gradient of {name}", gradients[1][name], gradient, TOLERANCE[F64])
    assert compiler.frame_count == 2
