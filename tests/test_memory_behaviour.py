# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the memory is for: a test of behaviour beside each equation, so that a wrong sign cannot hide behind a formula.

Equation numbers are those of Titans (arXiv 2501.00663).
"""

import pytest
import torch

from titans_testing import GATES, OpInputs, assert_close, continue_from, make_inputs, memory_network, run_op


pytestmark = pytest.mark.parametrize("backend", ["recurrent", "chunked"])

NETWORKS = {
    "depth1": {"depth": 1},
    "depth2": {"depth": 2},
    "depth3": {"depth": 3},
    "no_norm": {"norm": False},
    "no_residual": {"residual": False},
    "bare": {"norm": False, "residual": False},
}
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


def fresh_memory(
    length: int, *, theta=0.05, alpha=0.0, eta=0.0, batch=1, head_dim=8, chunk_size=1, **options
) -> OpInputs:
    """A memory without momentum or pending tokens, and random tokens under constant gates."""
    inputs = make_inputs(length=length, batch=batch, head_dim=head_dim, chunk_size=chunk_size, **options)
    inputs.momentum = tuple(torch.zeros_like(s) for s in inputs.momentum)
    set_gates(inputs, theta=theta, alpha=alpha, eta=eta)
    return inputs


def set_gates(inputs: OpInputs, **values: float) -> None:
    for name in GATES:
        if name in values:
            inputs.tokens[name] = torch.full_like(inputs.tokens[name], values[name])


def set_tokens(inputs: OpInputs, **values: torch.Tensor) -> None:
    """Queries, keys or values (T, H, D) for every row."""
    for name, value in values.items():
        inputs.tokens[name] = value.expand_as(inputs.tokens[name]).contiguous()


def read(inputs: OpInputs, state, queries: torch.Tensor, backend: str) -> torch.Tensor:
    """What the memory answers to ``queries`` (B, T, H, D), with nothing written."""
    asked = continue_from(inputs, state)
    zeros = torch.zeros_like(queries[..., 0])
    asked.tokens = {"q": queries, "k": queries, "v": queries, "theta": zeros, "alpha": zeros, "eta": zeros}
    return run_op(asked, backend).output


def losses(outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (outputs - values).square().sum(-1)


@every_network
def test_writing_a_pair_lowers_its_loss(backend, network):
    """Eq. 12-14: the memory's answer to a key moves towards the key's value, in every row and head."""
    inputs = fresh_memory(1, theta=0.0005, batch=4, **network)
    inputs.tokens["q"] = inputs.tokens["k"]
    result = run_op(inputs, backend, output_surprise=True)
    after = losses(result.output, inputs.tokens["v"])
    assert (after < result.surprise).all()
    assert_close(
        "loss of reading later",
        losses(read(inputs, result.state, inputs.tokens["k"], backend), inputs.tokens["v"]),
        after,
        1e-12,
    )


@every_network
def test_repeated_writes_converge_to_the_value(backend, network):
    """Eq. 14: descent on one pair; the loss falls at each write and ends near zero."""
    inputs = fresh_memory(300, theta=0.005, **network)
    pair = {name: inputs.tokens[name][:, :1] for name in ("k", "v")}
    if network.get("norm", True):
        # A normalised memory reaches only answers of its norm: take a value that it can give.
        target = fresh_memory(1, seed=5, **network)
        parameters = inputs.network()
        pair["v"] = torch.stack([memory_network(pair["k"][0, 0], [w[0] for w in target.weights], **parameters)])[None]
    set_tokens(inputs, q=pair["k"][0], k=pair["k"][0], v=pair["v"][0])
    surprise = run_op(inputs, backend, output_surprise=True).surprise
    assert (surprise[:, 1:] < surprise[:, :-1] + 1e-12).all()
    assert (surprise[:, -1] < 0.05 * surprise[:, 0]).all()


def test_the_read_sees_the_write_of_its_own_token(backend):
    """Eq. 15: y_t is read from W_t, so a query equal to the token's own key already finds its value nearer."""
    inputs = fresh_memory(12, theta=0.001, chunk_size=4)
    inputs.tokens["q"] = inputs.tokens["k"]
    with_write = losses(run_op(inputs, backend).output, inputs.tokens["v"])
    for t in range(12):
        silent = inputs.columns(0, t + 1)
        silent.tokens = {name: tensor.clone() for name, tensor in silent.tokens.items()}
        silent.tokens["theta"][:, t] = 0
        assert (with_write[:, t] < losses(run_op(silent, backend).output, silent.tokens["v"])[:, t]).all(), t


def test_surprise_is_the_loss_at_the_weights_of_the_chunk_start(backend):
    """Eq. 12 and 16: within a chunk each loss is measured before any write of that chunk."""
    inputs = fresh_memory(8, chunk_size=4)
    result = run_op(inputs, backend, output_surprise=True)
    first = run_op(inputs.columns(0, 4), backend)
    for state, chunk in ((None, slice(0, 4)), (first.state, slice(4, 8))):
        weights = inputs.weights if state is None else state.weights
        for t in range(chunk.start, chunk.stop):
            answer = memory_network(inputs.tokens["k"][0, t], [w[0] for w in weights], **inputs.network())
            assert_close(f"surprise {t}", result.surprise[0, t], losses(answer, inputs.tokens["v"][0, t]), 1e-12)


def test_zero_steps_leave_the_memory_as_it_is(backend):
    """Eq. 13-14 with theta = 0 and alpha = 0: nothing is written, bit for bit."""
    inputs = fresh_memory(9, theta=0.0, eta=0.7, chunk_size=4)
    result = run_op(inputs, backend)
    for before, after in zip(inputs.weights, result.state.weights, strict=True):
        assert torch.equal(after, before)
    assert not any(s.any() for s in result.state.momentum)


def test_full_forgetting_leaves_only_the_last_surprise(backend):
    """Eq. 13 with alpha = 1: W_t = S_t; without a step and without momentum nothing is left."""
    inputs = fresh_memory(8, alpha=1.0, eta=0.6, chunk_size=4)
    state = run_op(inputs, backend).state
    for w, s in zip(state.weights, state.momentum, strict=True):
        assert s.any()
        assert_close("weights", w, s, 1e-14)
    set_gates(inputs, theta=0.0)
    assert not any(w.any() for w in run_op(inputs, backend).state.weights)


def test_full_forgetting_to_the_start_weights_gives_the_start_weights(backend):
    inputs = fresh_memory(8, theta=0.0, alpha=1.0, chunk_size=4, forget_to="start")
    for w, start in zip(run_op(inputs, backend).state.weights, inputs.forget_to_weights, strict=True):
        assert_close("weights", w, start[None], 1e-14)


def test_forgetting_shrinks_the_memory_by_the_product_of_the_gates(backend):
    """Eq. 13 without a step: W_T = prod_t (1 - alpha_t) W_0."""
    inputs = fresh_memory(8, theta=0.0, chunk_size=4)
    inputs.tokens["alpha"] = torch.linspace(0, 0.5, 16, dtype=torch.float64).view(1, 8, 2)
    kept = (1 - inputs.tokens["alpha"][0]).prod(0)[:, None, None]
    for before, after in zip(inputs.weights, run_op(inputs, backend).state.weights, strict=True):
        assert_close("weights", after, before * kept, 1e-14)


def weights_after_sgd(inputs: OpInputs, head: int, momentum: float, decay: float) -> list[torch.Tensor]:
    """One head's network trained by torch.optim.SGD, a step per chunk on the sum of the chunk's losses."""
    network = inputs.network(head)
    parameters = [torch.nn.Parameter(w[0, head : head + 1].clone()) for w in inputs.weights]
    optimizer = torch.optim.SGD(parameters, lr=inputs.tokens["theta"][0, 0, head].item(), momentum=momentum)
    keys, values = (inputs.tokens[name][0, :, head : head + 1] for name in ("k", "v"))
    for begin in range(0, keys.shape[0], inputs.chunk_size):
        optimizer.zero_grad()
        for t in range(begin, begin + inputs.chunk_size):
            losses(memory_network(keys[t], parameters, **network), values[t]).sum().backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1 - decay)
        optimizer.step()
    return [p.detach()[0] for p in parameters]


@pytest.mark.parametrize("chunk_size", [1, 4], ids="C{}".format)
@every_network
def test_without_momentum_it_is_plain_gradient_descent(backend, network, chunk_size):
    """Eq. 8 and 16 with eta = alpha = 0: a chunk is one step of SGD on the sum of its losses."""
    inputs = fresh_memory(12, theta=0.03, chunk_size=chunk_size, **network)
    state = run_op(inputs, backend).state
    for head in range(2):
        for layer, expected in enumerate(weights_after_sgd(inputs, head, momentum=0.0, decay=0.0)):
            assert_close(f"layer {layer}", state.weights[layer][0, head], expected, 1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.1], ids="alpha{}".format)
@every_network
def test_constant_gates_are_sgd_with_momentum_and_decoupled_decay(backend, network, decay):
    """Eq. 10 and 13-14 token by token: S = -theta * SGD's buffer; alpha shrinks the weights and not the gradient."""
    inputs = fresh_memory(12, theta=0.02, eta=0.8, alpha=decay, **network)
    state = run_op(inputs, backend).state
    for head in range(2):
        for layer, expected in enumerate(weights_after_sgd(inputs, head, momentum=0.8, decay=decay)):
            assert_close(f"layer {layer}", state.weights[layer][0, head], expected, 1e-10)


def test_momentum_carries_surprise_to_later_tokens(backend):
    """Eq. 10: after one surprising token the weights go on moving, by eta_t of the last movement, without any step."""
    inputs = fresh_memory(1, theta=0.05)
    quiet = fresh_memory(1, theta=0.0, eta=0.6, seed=1)
    first = run_op(inputs, backend).state
    later = run_op(
        continue_from(quiet, first), backend, norm_weight=inputs.norm_weight, norm_bias=inputs.norm_bias
    ).state
    moves = zip(inputs.weights, first.weights, later.weights, strict=True)
    for before, after, afterwards in moves:
        assert (after - before).abs().max() > 1e-3
        assert_close("second movement", afterwards - after, 0.6 * (after - before), 1e-10)
    set_gates(quiet, eta=0.0)
    still = run_op(continue_from(quiet, first), backend).state
    assert all(torch.equal(a, b) for a, b in zip(still.weights, first.weights, strict=True))


def test_momentum_speeds_learning_up(backend):
    """Eq. 10: at the same small step a pair repeated with momentum is learned further than without."""
    surprise = []
    for eta in (0.0, 0.9):
        inputs = fresh_memory(40, theta=0.001, eta=eta, norm=False)
        set_tokens(inputs, k=inputs.tokens["k"][0, :1], v=inputs.tokens["v"][0, :1])
        surprise.append(run_op(inputs, backend, output_surprise=True).surprise[:, -1])
    assert (surprise[1] < 0.5 * surprise[0]).all()


@pytest.mark.parametrize("chunk_size", [1, 4], ids="C{}".format)
def test_a_memory_of_pairs_recalls_them(backend, chunk_size):
    """Keys of 8 pairs, written over 20 passes, bring back their own values; before the writes they do not."""
    inputs = fresh_memory(8 * 20, theta=0.1, head_dim=16, chunk_size=chunk_size, residual=False, norm=False)
    keys, values = (inputs.tokens[name][0, :8] for name in ("k", "v"))
    set_tokens(inputs, k=keys.repeat(20, 1, 1), v=values.repeat(20, 1, 1))

    def recalled(state):
        answers = read(inputs, state, keys[None], backend)[0]
        distance = (answers[:, None] - values[None]).square().sum(-1)
        return (distance.argmin(1) == torch.arange(8)[:, None]).double().mean()

    before = run_op(inputs.columns(0, 1), backend, theta=torch.zeros(1, 1, 2, dtype=torch.float64)).state
    assert recalled(before) <= 0.5
    assert recalled(run_op(inputs, backend).state) == 1.0


@pytest.mark.parametrize("chunk_size", [1, 4, 16], ids="C{}".format)
def test_a_second_pass_surprises_less(backend, chunk_size):
    inputs = fresh_memory(32, theta=0.02, alpha=0.001, eta=0.3, chunk_size=chunk_size)
    first = run_op(inputs, backend, output_surprise=True)
    second = run_op(continue_from(inputs, first.state), backend, output_surprise=True)
    assert (second.surprise.mean(1) < 0.9 * first.surprise.mean(1)).all()


@pytest.mark.parametrize("name", ["q", "k", "v", *GATES])
def test_no_output_moves_before_the_token_that_changed(backend, name):
    """Every token over two chunks and the open third: outputs before it are equal bit for bit, its own is not."""
    inputs = make_inputs(length=10, chunk_size=4, count=1, batch=1)
    expected = run_op(inputs, backend).output
    for j in range(10):
        changed = inputs.tokens[name].clone()
        changed[:, j] = 0.5 * changed[:, j] + 0.01
        output = run_op(inputs, backend, **{name: changed}).output
        assert torch.equal(output[:, :j], expected[:, :j]), j
        assert not torch.equal(output[:, j], expected[:, j]), j


def test_no_gradient_comes_from_later_tokens(backend):
    inputs = make_inputs(length=10, chunk_size=4, count=1, batch=1).require_grad()
    output = run_op(inputs, backend).output
    for t in range(10):
        gradients = torch.autograd.grad(output[:, t].sum(), list(inputs.tokens.values()), retain_graph=True)
        for name, gradient in zip(inputs.tokens, gradients, strict=True):
            assert not gradient[:, t + 1 :].any(), (name, t)
            assert gradient[:, t].any(), (name, t)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_deep_memory_without_weights_is_dead(backend, depth):
    """Why forgetting must stay below 1: at W = 0 each layer's gradient is a product with another layer's zero."""
    inputs = fresh_memory(20, theta=0.1, eta=0.5, depth=depth)
    inputs.weights = tuple(torch.zeros_like(w) for w in inputs.weights)
    state = run_op(inputs, backend).state
    assert not any(w.any() for w in state.weights)
    assert not any(s.any() for s in state.momentum)


def test_a_matrix_memory_without_weights_learns(backend):
    inputs = fresh_memory(20, theta=0.05, depth=1, norm=False)
    inputs.weights = tuple(torch.zeros_like(w) for w in inputs.weights)
    assert all(w.any() for w in run_op(inputs, backend).state.weights)


@pytest.mark.parametrize(("depth", "halvings"), [(2, 10), (3, 3)])
def test_a_memory_that_forgot_by_halves_can_still_store(backend, depth, halvings):
    """A deep memory that is small but not zero comes back: new pairs are stored after tokens of alpha = 0.5."""
    inputs = fresh_memory(halvings, theta=0.0, alpha=0.5, depth=depth, norm=False)
    forgetful = run_op(inputs, backend).state
    for before, after in zip(inputs.weights, forgetful.weights, strict=True):
        assert_close("weights", after, before * 0.5**halvings, 1e-12)
    writes = fresh_memory(200, theta=0.2, eta=0.9, depth=depth, norm=False, seed=1)
    set_tokens(writes, k=writes.tokens["k"][0, :1], v=writes.tokens["v"][0, :1])
    surprise = run_op(continue_from(writes, forgetful), backend, output_surprise=True).surprise
    assert (surprise[:, -1] < 0.1 * surprise[:, 0]).all()
