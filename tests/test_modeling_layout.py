# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Which token may touch which: causality, padding, batches, packed documents, and the surprise of each token."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from titans_testing import OPTIONS, assert_close, logits_of, parameter_gradients, random_ids, tiny_model
from transformers_titans import TitansCache, TitansForCausalLM
from variant_oracle import EVERY_VARIANT, VARIANTS, variant_model


F64 = torch.float64
CHUNK = 4

every_variant = pytest.mark.parametrize("variant", EVERY_VARIANT)


@pytest.mark.parametrize("option", ["default", "depth_1", "depth_3", "persistent_0", "persistent_3", "no_conv"])
def test_no_logit_moves_before_the_token_that_changes(option):
    model = tiny_model(dtype=F64, **OPTIONS[option])
    length = 3 * CHUNK + 2
    # One batch row per changed token, held against equal rows at the same place in the batch.
    ids = random_ids(1, length).repeat(length, 1)
    changed = ids.clone()
    changed[torch.arange(length), torch.arange(length)] = (ids[0] - 3 + 7) % 61 + 3
    difference = (logits_of(model, changed) - logits_of(model, ids)).abs().amax(-1)
    for j in range(length):
        assert not difference[j, :j].any(), j
        assert difference[j, j:].min() > 1e-6, f"token {j} is not seen by every later one"


PADDED = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    "left_over_a_chunk": [0] * 6 + [1] * 7,
    "right": [1, 1, 1, 1, 1, 1, 0, 0, 0],
    "interior": [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1],
    "everywhere": [0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0],
    "single": [0, 0, 1, 0],
}


@pytest.mark.parametrize("option", ["default", "no_conv", "conv_1", "chunk_1", "persistent_0", "depth_1"])
@pytest.mark.parametrize("padding", PADDED)
def test_padding_changes_nothing(padding, option):
    model = tiny_model(dtype=F64, **OPTIONS[option])
    mask = torch.tensor([PADDED[padding]])
    ids = random_ids(1, mask.shape[1])
    real = mask[0].bool()
    with torch.no_grad():
        alone = model(ids[:, real])
        padded = model(ids, attention_mask=mask)
        assert_close("logits", padded.logits[:, real], alone.logits, 1e-12)
        garbage = torch.where(mask.bool(), ids, random_ids(*mask.shape, seed=9))
        again = model(garbage, attention_mask=mask)
        assert torch.equal(again.logits[:, real], padded.logits[:, real])
        later = random_ids(1, 6, seed=4)
        expected = model(later, cache=alone.cache).logits
        assert_close("later", model(later, cache=padded.cache).logits, expected, 1e-12)
        assert_close("later, garbage", model(later, cache=again.cache).logits, expected, 1e-12)


@every_variant
def test_positions_are_derived_from_the_mask(variant):
    model = variant_model(variant, dtype=F64)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids = random_ids(2, 9)
    given = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert_close("logits", logits_of(model, ids, attention_mask=mask), given, 1e-12)


@every_variant
def test_padded_embeddings_may_hold_anything(variant):
    model = variant_model(variant)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1]])
    with torch.no_grad():
        embeds = model.get_input_embeddings()(random_ids(1, 7))
    real = mask[0].bool()
    expected = logits_of(model, inputs_embeds=embeds[:, real])
    huge = torch.where(mask.bool()[..., None], embeds, 1e30)
    assert_close("logits", logits_of(model, inputs_embeds=huge, attention_mask=mask)[:, real], expected, 1e-5)


@every_variant
def test_row_of_padding_alone_is_harmless(variant):
    model = variant_model(variant, dtype=F64)
    mask = torch.tensor([[0] * 9, [1] * 9])
    ids = random_ids(2, 9)
    with torch.no_grad():
        output = model(ids, attention_mask=mask)
        assert torch.isfinite(output.logits).all()
        assert_close("real row", output.logits[1:], model(ids[1:]).logits, 1e-12)
        later = random_ids(2, 7, seed=1)
        after = model(later, cache=output.cache).logits
        assert_close("first tokens", after[:1], model(later[:1]).logits, 1e-12)


@pytest.mark.parametrize("lengths", [(1, 5, 9), (4, 8, 13), (3, 3, 3)], ids=str)
def test_row_in_a_batch_equals_the_row_alone(lengths):
    model = tiny_model(dtype=F64)
    rows = [random_ids(1, length, seed=length) for length in lengths]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    logits = logits_of(model, ids, attention_mask=ids.ne(0).long())
    for row, actual in zip(rows, logits, strict=True):
        assert_close("row", actual[width - row.shape[1] :], logits_of(model, row)[0], 1e-12)


@every_variant
def test_scores_do_not_depend_on_the_batch_size(variant):
    # As evaluation harnesses score: right-padded, without any mask.
    model = variant_model(variant)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (20,), generator=generator).tolist()
    requests = [random_ids(length, seed=i) for i, length in enumerate(lengths)]

    def scores(batch_size, masked):
        sums = []
        for begin in range(0, 20, batch_size):
            batch = requests[begin : begin + batch_size]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = ids.ne(0).long() if masked else None
            logprobs = logits_of(model, ids, attention_mask=mask).log_softmax(-1)
            for row, request in zip(logprobs, batch, strict=True):
                sums.append(row[: len(request) - 1].gather(1, request[1:, None]).sum())
        return torch.stack(sums)

    alone = scores(1, masked=False)
    for batch_size in (4, 20):
        for masked in (False, True):
            torch.testing.assert_close(scores(batch_size, masked), alone, rtol=1e-5, atol=1e-4)


DOCUMENTS = {"mixed": (5, 9, 1, 70), "chunks": (4, 8, 4), "ones": (1, 1, 1, 1, 1), "one": (6,)}


def packed_inputs(kind: str, documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row of documents as transformers' own collator packs it, borders told in the given way."""
    collator = DataCollatorWithFlattening(
        return_position_ids=kind == "position_ids",
        return_flash_attn_kwargs=kind == "cu_seq_lens",
        return_seq_idx=kind == "seq_idx",
    )
    return dict(collator([{"input_ids": document} for document in documents]))


@pytest.mark.parametrize("kind", ["position_ids", "cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_packed_documents_equal_documents_alone(lengths, kind):
    model = tiny_model(dtype=F64)
    documents = [random_ids(length, seed=i) for i, length in enumerate(DOCUMENTS[lengths])]
    batch = packed_inputs(kind, documents)
    assert ("position_ids" in batch) == (kind == "position_ids")
    logits = logits_of(model, **batch)
    alone = [logits_of(model, document[None]) for document in documents]
    assert_close("logits", logits, torch.cat(alone, 1), 1e-11)


@pytest.mark.parametrize("kind", ["position_ids", "cu_seq_lens", "seq_idx"])
def test_gradients_of_packed_documents_equal_documents_alone(kind):
    model = tiny_model(dtype=F64).train()
    documents = [random_ids(length, seed=i) for i, length in enumerate((5, 9, 1, 14))]
    batch = packed_inputs(kind, documents)
    packed_loss = model(**batch, num_items_in_batch=1).loss
    actual = parameter_gradients(model, packed_loss)
    losses = [model(d[None], labels=d[None], num_items_in_batch=1).loss for d in documents if len(d) > 1]
    # A document of one token has no target; it still must not disturb its neighbours.
    loss = torch.stack(losses).sum()
    assert_close("loss", packed_loss, loss, 1e-12)
    expected = parameter_gradients(model, loss)
    for name, gradient in expected.items():
        assert_close(name, actual[name], gradient, 1e-9)


@pytest.mark.parametrize("option", ["default", "no_conv", "persistent_0", "persistent_chunk_and_1", "forget_to_start"])
def test_a_document_does_not_see_the_one_before(option):
    model = tiny_model(**OPTIONS[option])
    ids = random_ids(1, 16)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    expected = logits_of(model, ids, position_ids=positions)
    for j in range(7):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] - 3 + 7) % 61 + 3
        logits = logits_of(model, changed, position_ids=positions)
        assert torch.equal(logits[:, 7:], expected[:, 7:])
        assert not torch.equal(logits[:, j:7], expected[:, j:7])


@every_variant
def test_documents_start_from_the_learned_start_state(variant):
    model = variant_model(variant, dtype=F64)
    ids = random_ids(1, 12)
    reset = logits_of(model, ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]))
    assert_close("second document", reset[:, 5:], logits_of(model, ids[:, 5:]), 1e-12)
    assert (reset[:, 5:] - logits_of(model, ids)[:, 5:]).abs().amax(-1).min() > 1e-3
    # Not from zero either: what the weights were before any token is learned, and every document feels it.
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.memory.start_weights():
                weight.mul_(0.5)
    moved = logits_of(model, ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])) - reset
    assert moved.abs().amax(-1).min() > 1e-3


def test_rows_pack_documents_differently_and_with_padding():
    model = tiny_model(dtype=F64)
    lengths = [[6, 5], [3, 1, 4], [11]]
    documents = [[random_ids(n, seed=10 * r + i) for i, n in enumerate(row)] for r, row in enumerate(lengths)]
    ids, positions, mask = (torch.zeros(3, 13, dtype=torch.long) for _ in range(3))
    for r, row in enumerate(documents):
        joined = torch.cat(row)
        # Left padding before, right padding behind.
        place = slice(r, r + len(joined))
        ids[r, place] = joined
        mask[r, place] = 1
        positions[r, place] = torch.cat([torch.arange(len(d)) for d in row])
    logits = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for r, row in enumerate(documents):
        expected = torch.cat([logits_of(model, d[None])[0] for d in row])
        assert_close(f"row {r}", logits[r, mask[r].bool()], expected, 1e-11)


@every_variant
def test_windows_of_a_document_continue_and_a_new_one_resets_its_row_alone(variant):
    model = variant_model(variant, dtype=F64)
    a, b, c = (random_ids(1, length, seed=s) for length, s in ((18, 1), (7, 2), (11, 3)))
    cache = TitansCache(model.config)
    outputs = []
    # Row 0 reads a; row 1 reads b in windows of 6 with padding, then c.
    b_padded = torch.cat([b, torch.zeros(1, 5, dtype=torch.long)], 1)
    for window in range(3):
        columns = slice(6 * window, 6 * window + 6)
        ids = torch.cat([a[:, columns], b_padded[:, columns] if window < 2 else c[:, :6]])
        positions = torch.arange(6) + torch.tensor([[6 * window], [6 * window if window < 2 else 0]])
        mask = torch.ones(2, 6, dtype=torch.long)
        if window == 1:
            mask[1, 1:] = 0
        outputs.append(logits_of(model, ids, attention_mask=mask, position_ids=positions, cache=cache))
    whole = torch.cat(outputs, 1)
    assert_close("a", whole[:1], logits_of(model, a), 1e-11)
    assert_close("b", whole[1:, :7], logits_of(model, b), 1e-11)
    assert_close("c", whole[1:, 12:], logits_of(model, c[:, :6]), 1e-11)


def surprise_by_definition(memory, hidden_states: torch.Tensor, prefix_states: torch.Tensor) -> list:
    """|M(k) - v|^2 (H,) of each token of one row, at the weights that the layer's own state holds for the open chunk.

    The row is read token by token. A token that closes its chunk leaves weights behind that it has changed: None.
    """
    state = memory.start_state(prefix_states)
    losses = []
    for t in range(hidden_states.shape[0]):
        now = memory(hidden_states[None, t : t + 1], state)
        k, v = now.state.memory.pending.k, now.state.memory.pending.v
        if now.state.memory.count == 0:
            losses.append(None)
        else:
            x = k[0, -1]
            hidden = x
            for layer, w in enumerate(now.state.memory.weights):
                hidden = hidden if layer == 0 else torch.nn.functional.gelu(hidden, approximate="tanh")
                hidden = torch.einsum("hi,hio->ho", hidden, w[0])
            hidden = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)
            answer = x + hidden * memory.memory_norm_weight + memory.memory_norm_bias
            losses.append((answer - v[0, -1]).square().sum(-1))
        state = now.state
    return losses


def test_surprise_is_the_inner_loss_at_the_chunks_start():
    model = tiny_model(dtype=F64)
    layer = model.model.layers[0]
    ids = random_ids(1, 11)
    with torch.no_grad():
        surprise = model(ids, output_surprise=True).surprise
        hidden = layer.input_layernorm(model.get_input_embeddings()(ids))[0]
        expected = surprise_by_definition(layer.memory, hidden, layer.input_layernorm(layer.persistent_tokens()))
    assert len(surprise) == 2 and surprise[0].shape == (1, 11, 2)
    seen = [t for t, loss in enumerate(expected) if loss is not None]
    assert len(seen) == 9
    assert_close("surprise", surprise[0][0, seen], torch.stack([expected[t] for t in seen]), 1e-12)


def test_surprise_of_padding_is_zero_and_of_real_tokens_unchanged():
    model = tiny_model(dtype=F64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1]])
    ids = random_ids(1, 9)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, output_surprise=True).surprise
        alone = model(ids[:, mask[0].bool()], output_surprise=True).surprise
    for actual, expected in zip(padded, alone, strict=True):
        assert not actual[:, ~mask[0].bool()].any()
        assert_close("surprise", actual[:, mask[0].bool()], expected, 1e-12)


def test_surprise_of_a_split_call_equals_one_call():
    model = tiny_model(dtype=F64)
    ids = random_ids(2, 19)
    with torch.no_grad():
        whole = model(ids, output_surprise=True).surprise
        cache, parts = TitansCache(model.config), []
        for part in ids.split([3, 1, 6, 9], 1):
            parts.append(model(part, cache=cache, output_surprise=True).surprise)
    for layer, expected in enumerate(whole):
        assert_close("surprise", torch.cat([part[layer] for part in parts], 1), expected, 1e-11)


# Independent segments begin at the start state, to which the text is new.
@pytest.mark.parametrize("variant", [*VARIANTS, "lmm_grm"])
def test_text_read_again_surprises_less(variant):
    model = variant_model(variant, num_hidden_layers=1, memory_max_lr=0.05, memory_max_forget=0.001)
    ids = random_ids(4, 32)
    with torch.no_grad():
        first = model(ids, output_surprise=True)
        second = model(ids, cache=first.cache, output_surprise=True)
    assert (second.surprise[0].mean((1, 2)) < 0.9 * first.surprise[0].mean((1, 2))).all()


@every_variant
def test_surprise_has_no_gradient_and_leaves_the_loss_alone(variant):
    model = variant_model(variant, model_class=TitansForCausalLM).train()
    ids = random_ids(2, 9)
    plain = parameter_gradients(model, model(ids, labels=ids).loss)
    output = model(ids, labels=ids, output_surprise=True)
    assert not any(s.requires_grad for s in output.surprise)
    for name, gradient in parameter_gradients(model, output.loss).items():
        assert torch.equal(gradient, plain[name]), name
    assert model(ids).surprise is None
