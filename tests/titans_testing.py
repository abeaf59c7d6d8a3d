# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests share: comparison, op inputs, tiny models, and the oracle: the memory written out token by token.

The oracle is the only judge of the op's numbers. It follows Titans, eq. 12-16 (for other rules Memory Caching, eq. 28
and 30), to the letter, in Python loops over one row, and gets every inner gradient from `torch.autograd`; nothing in
it comes from the package under test.

Letters: B rows, T tokens, H heads, D head dimension, C chunk length, P pending tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


GATES = ("theta", "alpha", "eta")
TOKENS = ("q", "k", "v", *GATES)

# Relative error allowed against the float64 oracle. The op computes in float32 for the three narrower types, and a
# 16-bit result is rounded once at the end: half a unit in the last place (2**-8, 2**-11) and the float32 error.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
}


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference, or the plain RMS where the reference is all zero."""
    actual, reference = actual.detach().double(), reference.detach().double()
    if reference.numel() == 0:
        return 0.0
    scale = reference.square().mean().sqrt().item()
    return (actual - reference).square().mean().sqrt().item() / (scale or 1.0)


def assert_close(name: str, actual: torch.Tensor, reference: torch.Tensor, ratio: float) -> None:
    """Fails unless ``actual`` equals ``reference`` of the same shape up to a relative error of ``ratio``.

    Two figures must hold: the RMS error over the RMS of the reference is at most ``ratio``, and no single error is
    larger than 10 times ``ratio`` times the largest reference value, so that one wrong element cannot hide among many
    right ones. An all-zero reference is taken to be of size 1. Both sides must be finite.
    """
    assert actual.shape == reference.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    for side, tensor in (("actual", actual), ("reference", reference)):
        bad = (~torch.isfinite(tensor)).sum().item()
        assert bad == 0, f"{name}: {bad} of {tensor.numel()} values of the {side} side are not finite"
    if reference.numel() == 0:
        return
    error = relative_error(actual, reference)
    worst = (actual.detach().double() - reference.detach().double()).abs().max().item()
    largest = reference.detach().abs().max().item()
    figures = f"RMS ratio {error:.3e}, max error {worst:.3e}, max reference {largest:.3e}, allowed ratio {ratio:.1e}"
    assert error <= ratio and worst <= 10 * ratio * (largest or 1.0), f"{name}: {figures}"


class OracleResult(NamedTuple):
    """One row through the oracle; lists have one entry per token of the call, also for masked ones (state unchanged).

    Attributes:
        output: (T, H, D), zero at masked tokens.
        surprise: (T, H) inner loss of each token at its chunk's anchor weights, zero at masked tokens.
        weights, momentum: the running (W_t, S_t), per token a list of layers (H, D_in, D_out).
        anchor_weights, anchor_momentum: (W, S) at the start of the chunk that is open after the call.
        pending: the open chunk's tokens, each a tuple (k, v, theta, alpha, eta).
    """

    output: torch.Tensor
    surprise: torch.Tensor
    weights: list[list[torch.Tensor]]
    momentum: list[list[torch.Tensor]]
    anchor_weights: list[torch.Tensor]
    anchor_momentum: list[torch.Tensor]
    pending: list[tuple[torch.Tensor, ...]]


def memory_network(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: bool = True,
) -> torch.Tensor:
    """M(x) of one token for all heads: (H, D) -> (H, D), weights (H, D_in, D_out), GELU (tanh) between layers."""
    hidden = x
    for layer, weight in enumerate(weights):
        if layer > 0:
            inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
            hidden = 0.5 * hidden * (1 + torch.tanh(inner))
        hidden = torch.einsum("hi,hio->ho", hidden, weight)
    if norm_weight is not None:
        centred = hidden - hidden.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        hidden = centred / torch.sqrt(variance + norm_eps) * norm_weight + norm_bias
    return x + hidden if residual else hidden


def inner_loss_and_gradient(k, v, weights, rule: str, **network) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """|M_W(k) - v|^2 (Titans, eq. 12) or, under any rule but "titans", -<M_W(k), v> (Memory Caching, eq. 30) per head
    (H,), and its gradient in every layer; differentiable again."""
    with torch.enable_grad():
        weights = [w if w.requires_grad else w.detach().requires_grad_() for w in weights]
        output = memory_network(k, weights, **network)
        loss = (output - v).square().sum(-1) if rule == "titans" else -(output * v).sum(-1)
        # Heads do not share weights, so the gradient of the sum holds the gradient of each head's own loss.
        return loss, list(torch.autograd.grad(loss.sum(), weights, create_graph=True))


def oracle_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    theta: torch.Tensor,
    alpha: torch.Tensor,
    eta: torch.Tensor,
    weights: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
    pending: Sequence[tuple[torch.Tensor, ...]] = (),
    *,
    chunk_size: int,
    forget_to_weights: Sequence[torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    start_weights: Sequence[torch.Tensor] | None = None,
    start_momentum: Sequence[torch.Tensor] | None = None,
    gate_granularity: str = "token",
    rule: str = "titans",
    **network: Any,
) -> OracleResult:
    """The neural memory over one row, token by token. Titans, eq. 13-16, with the gradient at the chunk's start.

    Args:
        q, k, v: (T, H, D). theta, alpha, eta: (T, H).
        weights, momentum: (W, S) at the start of the open chunk, each layer (H, D_in, D_out).
        pending: the open chunk's tokens before the call, each (k, v, theta, alpha, eta).
        chunk_size: C. forget_to_weights: where forgetting leads; None: to zero.
        mask: (T,) real tokens. document_starts: (T,) real tokens before which the row goes back to
            (``start_weights``, ``start_momentum``) with nothing pending.
        gate_granularity: whose gates a token has: "token", its own; "chunk", those of the first token in its chunk.
        rule: the inner loss and, for "swla", another write: of the token's own pair and of that before it.
        network: norm_weight, norm_bias, norm_eps, residual of `memory_network`.
    """
    anchor_w, anchor_s = list(weights), list(momentum)
    running_w, running_s = anchor_w, anchor_s
    open_chunk: list[tuple[torch.Tensor, ...]] = []
    output, surprise = torch.zeros_like(q), torch.zeros_like(theta)
    outputs, losses, all_w, all_s = list(output), list(surprise), [], []

    def write(token):
        nonlocal anchor_w, anchor_s, running_w, running_s, open_chunk
        token_k, token_v, *own_gates = token
        first = open_chunk[0] if open_chunk and gate_granularity == "chunk" else None
        step, forget, decay = own_gates if first is None else first[2:]
        loss, gradient = inner_loss_and_gradient(token_k, token_v, anchor_w, rule, **network)
        step, forget, decay = (gate[:, None, None] for gate in (step, forget, decay))
        if rule == "swla":
            pair = torch.einsum("hi,ho->hio", token_k, token_v)
            added, running_s = [decay * running_s[0] + step * pair], [pair]
        else:
            added = running_s = [decay * s - step * u for s, u in zip(running_s, gradient, strict=True)]
        kept = [(1 - forget) * w for w in running_w]
        if forget_to_weights is not None:
            kept = [w + forget * goal for w, goal in zip(kept, forget_to_weights, strict=True)]
        running_w = [w + s for w, s in zip(kept, added, strict=True)]
        open_chunk = [*open_chunk, token]
        if len(open_chunk) == chunk_size:
            anchor_w, anchor_s, open_chunk = running_w, running_s, []
        return loss

    for token in pending:
        write(token)
    for t in range(q.shape[0]):
        if mask is None or mask[t]:
            if document_starts is not None and document_starts[t]:
                anchor_w, anchor_s, open_chunk = list(start_weights), list(start_momentum), []
                running_w, running_s = anchor_w, anchor_s
            losses[t] = write((k[t], v[t], theta[t], alpha[t], eta[t]))
            outputs[t] = memory_network(q[t], running_w, **network)
        all_w.append(running_w)
        all_s.append(running_s)
    return OracleResult(torch.stack(outputs), torch.stack(losses), all_w, all_s, anchor_w, anchor_s, open_chunk)


@dataclass
class OpInputs:
    """Everything that `neural_memory` takes, as plain tensors that the op and the oracle are both fed with.

    ``tokens`` maps q, k, v (B, T, H, D) and theta, alpha, eta (B, T, H). ``pending`` are the open chunk's k, v, theta,
    alpha, eta with P tokens, P as `MemoryState` wants it: the count if it is an int, else C - 1. ``start_weights`` and
    ``start_momentum`` have one row.
    """

    tokens: dict[str, torch.Tensor]
    weights: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]
    pending: tuple[torch.Tensor, ...]
    count: int | torch.Tensor
    chunk_size: int
    norm_weight: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None
    residual: bool = True
    forget_to_weights: tuple[torch.Tensor, ...] | None = None
    gate_granularity: str = "token"
    rule: str = "titans"
    mask: torch.Tensor | None = None
    document_starts: torch.Tensor | None = None
    start_weights: tuple[torch.Tensor, ...] = field(default=())
    start_momentum: tuple[torch.Tensor, ...] = field(default=())

    def leaves(self) -> dict[str, torch.Tensor]:
        """Each floating-point tensor under a readable name."""
        named = dict(self.tokens)
        for name in ("weights", "momentum", "forget_to_weights", "start_weights", "start_momentum"):
            named |= {f"{name}.{layer}": w for layer, w in enumerate(getattr(self, name) or ())}
        named |= {f"pending.{name}": t for name, t in zip(TOKENS[1:], self.pending, strict=True)}
        norm = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        return named | {name: t for name, t in norm.items() if t is not None}

    def map(self, fn) -> "OpInputs":
        """A copy with ``fn`` applied to each floating-point tensor."""

        def apply(values):
            return None if values is None else tuple(fn(t) for t in values)

        return replace(
            self,
            tokens={name: fn(t) for name, t in self.tokens.items()},
            **{
                name: apply(getattr(self, name))
                for name in ("weights", "momentum", "pending", "forget_to_weights", "start_weights", "start_momentum")
            },
            **{
                name: None if getattr(self, name) is None else fn(getattr(self, name))
                for name in ("norm_weight", "norm_bias")
            },
        )

    def to(self, dtype: torch.dtype) -> "OpInputs":
        """A copy with every floating-point tensor in ``dtype``, detached."""
        return self.map(lambda t: t.detach().to(dtype))

    def require_grad(self) -> "OpInputs":
        """A copy whose floating-point tensors are leaves that require a gradient."""
        return self.map(lambda t: t.detach().clone().requires_grad_())

    def rows(self, index: slice | list[int]) -> "OpInputs":
        """The same for some of the rows."""

        def take(tensors):
            return tuple(t[index] for t in tensors)

        return replace(
            self,
            tokens={name: t[index] for name, t in self.tokens.items()},
            weights=take(self.weights),
            momentum=take(self.momentum),
            pending=take(self.pending),
            count=self.count if isinstance(self.count, int) else self.count[index],
            mask=None if self.mask is None else self.mask[index],
            document_starts=None if self.document_starts is None else self.document_starts[index],
        )

    def columns(self, begin: int, end: int) -> "OpInputs":
        """The same for the tokens begin..end-1."""
        return replace(
            self,
            tokens={name: t[:, begin:end] for name, t in self.tokens.items()},
            mask=None if self.mask is None else self.mask[:, begin:end],
            document_starts=None if self.document_starts is None else self.document_starts[:, begin:end],
        )

    def network(self, head: int | None = None) -> dict[str, Any]:
        """The keyword arguments of `memory_network`; for one head only if ``head`` is given."""
        norm = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        if head is not None:
            norm = {name: None if t is None else t[head : head + 1] for name, t in norm.items()}
        return {**norm, "residual": self.residual}


# What `make_inputs` takes for a memory of each other rule.
_MATRIX = {"depth": 1, "norm": False, "residual": False}
RULES = {
    "dla": {"rule": "dla"},
    "linear_attention": {"rule": "linear_attention"} | _MATRIX,
    "swla": {"rule": "swla"} | _MATRIX,
}

# Gates under which rounding errors hardly grow over thousands of tokens. Larger ones make the inner loop chaotic: with
# steps up to 0.02 and forgetting up to 0.002, float32 is off by 0.3 after 2048 tokens of noise in chunks of 16.
LONG = {"max_step": 0.005, "max_forget": 0.0005}


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _random_tokens(shape, generator, max_step: float, max_forget: float) -> dict[str, torch.Tensor]:
    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return {
        "q": _unit(normal(*shape)),
        "k": _unit(normal(*shape)),
        "v": _unit(normal(*shape)),
        "theta": max_step * torch.sigmoid(normal(*shape[:3])),
        "alpha": max_forget * torch.sigmoid(normal(*shape[:3])),
        "eta": 0.9 * torch.sigmoid(normal(*shape[:3])),
    }


def make_inputs(
    *,
    seed: int = 0,
    batch: int = 2,
    length: int = 13,
    heads: int = 2,
    head_dim: int = 5,
    depth: int = 2,
    hidden: int | None = None,
    chunk_size: int = 4,
    count: int | Sequence[int] = 0,
    norm: bool = True,
    residual: bool = True,
    forget_to: str = "zero",
    gate_granularity: str = "token",
    rule: str = "titans",
    mask: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    max_step: float = 0.1,
    max_forget: float = 0.3,
) -> OpInputs:
    """Seeded float64 inputs, large enough to matter at every place and small enough for a stable inner loop.

    Args:
        hidden: width between layers, default 4 * head_dim. count: pending tokens, an int or one per row.
        forget_to: "zero" or "start". max_step, max_forget: theta and alpha are drawn from
            (0, max_step) and (0, max_forget). The defaults are large, so that an error in any gate shows within a few
            tokens; for hundreds of tokens take ``**LONG``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    hidden = 4 * head_dim if hidden is None else hidden
    widths = [head_dim, *[hidden] * (depth - 1), head_dim]
    shapes = [(heads, d_in, d_out) for d_in, d_out in zip(widths[:-1], widths[1:], strict=True)]

    def layers(*lead, scale):
        return tuple(scale * normal(*lead, *shape) / math.sqrt(shape[1]) for shape in shapes)

    tokens = _random_tokens((batch, length, heads, head_dim), generator, max_step, max_forget)
    room = count if isinstance(count, int) else chunk_size - 1
    open_chunk = _random_tokens((batch, room, heads, head_dim), generator, max_step, max_forget)
    if not isinstance(count, int):
        count = torch.tensor(count)
        real = torch.arange(room) < count[:, None]
        open_chunk = {name: t * real.view(*real.shape, *[1] * (t.dim() - 2)) for name, t in open_chunk.items()}
    return OpInputs(
        tokens=tokens,
        weights=layers(batch, scale=1.0),
        momentum=layers(batch, scale=0.05),
        pending=tuple(open_chunk[name] for name in TOKENS[1:]),
        count=count,
        chunk_size=chunk_size,
        norm_weight=1 + 0.3 * normal(heads, head_dim) if norm else None,
        norm_bias=0.3 * normal(heads, head_dim) if norm else None,
        residual=residual,
        forget_to_weights=layers(scale=1.0) if forget_to == "start" else None,
        gate_granularity=gate_granularity,
        rule=rule,
        mask=mask,
        document_starts=document_starts,
        start_weights=layers(1, scale=1.0) if document_starts is not None else (),
        start_momentum=layers(1, scale=0.05) if document_starts is not None else (),
    )


def op_arguments(inputs: OpInputs) -> dict[str, Any]:
    """The keyword arguments of `neural_memory` for these inputs."""
    from transformers_titans.memory_state import MemoryState, PendingTokens
    from transformers_titans.token_layout import TokenLayout

    start_state = None
    if inputs.document_starts is not None:
        start = MemoryState.initial([w[0] for w in inputs.start_weights], 1)
        start_state = start._replace(momentum=inputs.start_momentum)
    layout = None
    if inputs.mask is not None or inputs.document_starts is not None:
        layout = TokenLayout.build(
            inputs.mask, inputs.document_starts, count=inputs.count, chunk_size=inputs.chunk_size
        )
    return {
        **inputs.tokens,
        "state": MemoryState(inputs.weights, inputs.momentum, PendingTokens(*inputs.pending), inputs.count),
        "chunk_size": inputs.chunk_size,
        "norm_weight": inputs.norm_weight,
        "norm_bias": inputs.norm_bias,
        "residual": inputs.residual,
        "forget_to_weights": inputs.forget_to_weights,
        "gate_granularity": inputs.gate_granularity,
        "rule": inputs.rule,
        "layout": layout,
        "start_state": start_state,
    }


def run_op(inputs: OpInputs, backend: str = "auto", **overrides: Any):
    """`neural_memory` on these inputs; ``overrides`` replace or add arguments."""
    from transformers_titans.memory_ops import neural_memory

    return neural_memory(**(op_arguments(inputs) | {"backend": backend} | overrides))


def continue_from(inputs: OpInputs, state) -> OpInputs:
    """These inputs with the memory in ``state``, as a call before has returned it."""
    return replace(
        inputs,
        weights=state.weights,
        momentum=state.momentum,
        pending=tuple(state.pending),
        count=state.count,
    )


def result_tensors(result, chunk_size: int) -> dict[str, torch.Tensor]:
    """A result of the op as named tensors; pending tokens are padded to C - 1, the count is (B,)."""
    state = result.state
    named = {"output": result.output}
    if result.surprise is not None:
        named["surprise"] = result.surprise
    for name in ("weights", "momentum"):
        named |= {f"{name}.{layer}": w for layer, w in enumerate(getattr(state, name))}
    for name, tensor in zip(TOKENS[1:], state.pending, strict=True):
        missing = chunk_size - 1 - tensor.shape[1]
        padding = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
        named[f"pending.{name}"] = torch.cat([tensor, padding], 1)
    return named | {"count": torch.as_tensor(state.count).expand(result.output.shape[0])}


def run_oracle(inputs: OpInputs) -> dict[str, torch.Tensor]:
    """The oracle on each row, as the same named tensors as `result_tensors`, in float64."""
    rows = [oracle_row(inputs, row) for row in range(inputs.tokens["q"].shape[0])]
    named = {name: torch.stack([getattr(r, name) for r in rows]) for name in ("output", "surprise")}
    named["surprise"] = named["surprise"].detach()
    for layer in range(len(inputs.weights)):
        named[f"weights.{layer}"] = torch.stack([r.anchor_weights[layer] for r in rows])
        named[f"momentum.{layer}"] = torch.stack([r.anchor_momentum[layer] for r in rows])
    for index, name in enumerate(TOKENS[1:]):
        blank = torch.zeros_like(inputs.tokens[name][0, 0], dtype=torch.float64)
        padded = [
            [token[index] for token in r.pending] + [blank] * (inputs.chunk_size - 1 - len(r.pending)) for r in rows
        ]
        filled = [torch.stack(row) if row else blank.new_zeros(0, *blank.shape) for row in padded]
        named[f"pending.{name}"] = torch.stack(filled)
    return named | {"count": torch.tensor([len(r.pending) for r in rows])}


def oracle_row(inputs: OpInputs, row: int) -> OracleResult:
    """The oracle on one row, in float64, with a graph back to the inputs."""
    inputs = inputs.map(lambda t: t.double())
    count = inputs.count if isinstance(inputs.count, int) else int(inputs.count[row])
    return oracle_memory(
        *(inputs.tokens[name][row] for name in TOKENS),
        [w[row] for w in inputs.weights],
        [s[row] for s in inputs.momentum],
        [tuple(t[row, i] for t in inputs.pending) for i in range(count)],
        chunk_size=inputs.chunk_size,
        forget_to_weights=inputs.forget_to_weights,
        gate_granularity=inputs.gate_granularity,
        rule=inputs.rule,
        mask=None if inputs.mask is None else inputs.mask[row],
        document_starts=None if inputs.document_starts is None else inputs.document_starts[row],
        start_weights=[w[0] for w in inputs.start_weights],
        start_momentum=[s[0] for s in inputs.start_momentum],
        **inputs.network(),
    )


def projection(named: dict[str, torch.Tensor], seed: int = 1) -> torch.Tensor:
    """A loss that sees each element of output and final state: their sum under random signs.

    Signs are exact in every dtype, so that a gradient's error is the op's own.
    """
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for name in sorted(named):
        tensor = named[name]
        if name in ("count", "surprise"):
            continue
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        loss = loss + (tensor.double() * signs).sum()
    return loss


def input_gradients(named: dict[str, torch.Tensor], inputs: OpInputs, seed: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of `projection` in every leaf of ``inputs``; zero where the loss does not depend on it."""
    leaves = inputs.leaves()
    gradients = torch.autograd.grad(
        projection(named, seed), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients, strict=True))


def tiny_config(**overrides: Any):
    """A `TitansConfig` that trains in milliseconds: two layers of width 32, two memory heads of 16, chunks of 4."""
    from transformers_titans import TitansConfig

    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "memory_num_heads": 2,
        "memory_head_dim": 16,
        "memory_expansion": 2,
        "memory_chunk_size": 4,
        "num_persistent_tokens": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return TitansConfig(**(fields | overrides))


# Fields under which a tiny model's memory is strong, yet rounding errors hardly grow: up to some 250 tokens with the
# first, thousands with the second.
SHORT_TEXT = {"memory_max_lr": 0.03, "memory_max_forget": 0.1}
LONG_TEXT = {"memory_max_lr": 0.02, "memory_max_forget": 0.002}


def fill_with_noise(model, seed: int = 0) -> None:
    """Gives every parameter seeded noise of the size at which it matters, so that no error hides behind a zero.

    Weights keep the size of the stream, norms stay near 1, and the gates start at theta = 0.27 memory_max_lr,
    alpha = 0.05 memory_max_forget, eta = 0.5, differently for each token. Noise is drawn in float64 whatever the
    model's dtype, so that copies of a model in two dtypes agree up to rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    gate_bias = {"theta_proj": -1.0, "alpha_proj": -3.0, "eta_proj": 0.0}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        *_, owner, leaf = ["", *name.split(".")]
        if leaf == "bias":
            value = gate_bias.get(owner, 0.0) + 0.3 * noise
        elif leaf == "memory_norm_bias":
            value = 0.3 * noise
        elif leaf == "memory_norm_weight" or parameter.dim() == 1:
            value = 1 + 0.2 * noise
        elif owner == "start_weights":
            value = noise if leaf == "0" else 1.5 * noise / math.sqrt(parameter.shape[1])
        elif owner in ("embed_tokens", "persistent_tokens"):
            value = noise
        else:
            value = noise / math.sqrt(parameter[0].numel())
        parameter.data.copy_(value)


def tiny_model(model_class=None, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any):
    """A model of `tiny_config` in evaluation mode, every parameter filled with noise that makes its memory matter."""
    from transformers_titans import TitansForCausalLM

    config = tiny_config(**(SHORT_TEXT | overrides))
    model = (model_class or TitansForCausalLM)(config).to(dtype).eval()
    fill_with_noise(model, seed)
    return model


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids 3..63: none of the special tokens of `tiny_config`."""
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


# The fields of a matrix memory, which is what two of the rules are of.
MATRIX_MEMORY = {"memory_depth": 1, "memory_residual": False, "memory_norm": False}

# One config per option of the memory and of the model, beside the default.
OPTIONS = {
    "default": {},
    "depth_1": {"memory_depth": 1},
    "depth_3": {"memory_depth": 3},
    "expansion_1": {"memory_expansion": 1},
    "one_head": {"memory_num_heads": 1, "memory_head_dim": 12},
    "chunk_1": {"memory_chunk_size": 1},
    "no_conv": {"memory_conv_kernel_size": 0},
    "conv_1": {"memory_conv_kernel_size": 1},
    "no_momentum": {"memory_momentum": False},
    "no_forgetting": {"memory_forgetting": False},
    "chunk_gates": {"memory_gate_granularity": "chunk"},
    "forget_to_start": {"memory_forget_to": "start"},
    "no_residual": {"memory_residual": False},
    "no_norm": {"memory_norm": False},
    "dla": {"memory_rule": "dla"},
    "linear_attention": {"memory_rule": "linear_attention"} | MATRIX_MEMORY,
    "swla": {"memory_rule": "swla"} | MATRIX_MEMORY,
    "persistent_0": {"num_persistent_tokens": 0},
    "persistent_1": {"num_persistent_tokens": 1},
    "persistent_3": {"num_persistent_tokens": 3},
    "persistent_chunk": {"num_persistent_tokens": 4},
    "persistent_chunk_and_1": {"num_persistent_tokens": 5},
    "tied": {"tie_word_embeddings": True},
}


def logits_of(model, input_ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """The model's logits, without a graph."""
    with torch.no_grad():
        return model(input_ids, **kwargs).logits


def parameter_gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of ``loss`` by parameter name; a parameter that it does not reach is missing."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return named


def iterate_floats(state):
    """Each floating-point tensor of a `TitansCache`, or of a state."""
    from transformers_titans.memory_state import iterate_tensors

    if hasattr(state, "layers"):
        state = tuple(layer.tree() for layer in state.layers)
    return [t for _, t in iterate_tensors(state) if t.is_floating_point()]
