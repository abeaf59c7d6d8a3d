# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The oracle of whole models: LMM, MAL, MAG and MAC written out token by token (Titans, sections 4.1-4.4).

It reads a model's configuration and parameters by name and computes everything else itself: one document at a time,
in the parameters' own dtype (float64 in the tests), with loops over tokens and gradients from `torch.autograd`. The
memory's recurrence is `titans_testing.oracle_memory`; nothing comes from the package under test.

Letters: T tokens of a document, C hidden size, H heads, D head dimension, N keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from titans_testing import memory_network, oracle_memory, tiny_model


Parameters = dict[str, torch.Tensor]

# One small model of each variant. Attention reaches past a chunk (4 tokens) and ends inside one; a segment has two.
VARIANTS = {
    "lmm": {"variant": "lmm"},
    "mal": {"variant": "mal", "sliding_window": 5},
    "mag": {"variant": "mag", "sliding_window": 5},
    "mac": {"variant": "mac", "segment_length": 8},
}
# With memory caching: segments as long as `mac`'s, ones that end at other tokens than those, and short ones of which
# few are kept.
CACHING_VARIANTS = {
    "lmm_grm": {"memory_caching": "grm", "cache_segment_length": 8},
    "mac_ssc": {
        **VARIANTS["mac"],
        "memory_caching": "ssc",
        "cache_segment_length": 12,
        "cache_segmentation": "logarithmic",
        "cache_initialization": "independent",
        "cache_top_k": 1,
    },
    "mag_soup": {
        **VARIANTS["mag"],
        "memory_caching": "soup",
        "cache_segment_length": 4,
        "cache_initialization": "independent",
        "cache_max_segments": 2,
        "connector": "query",
    },
}
EVERY_VARIANT = VARIANTS | CACHING_VARIANTS


def variant_model(variant: str, **overrides: Any):
    """`titans_testing.tiny_model` of this variant."""
    return tiny_model(**(EVERY_VARIANT[variant] | overrides))


def inside(parameters: Parameters, name: str) -> Parameters:
    """The parameters below ``name``, under the rest of their names."""
    return {key[len(name) + 1 :]: value for key, value in parameters.items() if key.startswith(f"{name}.")}


def linear(parameters: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """A linear layer, with a bias where it has one."""
    y = x @ parameters[f"{name}.weight"].T
    return y + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class DocumentMemory:
    """A layer's neural memory while it reads one document: W, S and what the convolutions have seen.

    Args:
        parameters: those of the layer's ``memory``.
        config: the model's.
        prefix: (N_p, C) what the memory reads before the document, or None. Its last chunk is closed behind it.
    """

    def __init__(self, parameters: Parameters, config, prefix: torch.Tensor | None):
        self.parameters, self.config = parameters, config
        start = inside(parameters, "start_weights")
        self.start = [start[str(layer)] for layer in range(config.memory_depth)]
        self.weights, self.momentum = self.start, [torch.zeros_like(w) for w in self.start]
        self.written: list[torch.Tensor] = []
        self.asked: list[torch.Tensor] = []
        if prefix is not None:
            size = config.memory_chunk_size
            whole = len(prefix) // size * size
            for part, chunk in ((prefix[:whole], size), (prefix[whole:], len(prefix) - whole)):
                if len(part):
                    self._recur(part, chunk)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Writes and reads T tokens (T, C), the first of which begins a chunk; returns (T, C)."""
        return self._answer(self._recur(x, self.config.memory_chunk_size), x)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Asks the memory as it stands, (T, C) -> (T, C)."""
        network = self._network()
        answers = [memory_network(q, self.weights, **network) for q in self._ask(x)]
        return self._answer(torch.stack(answers), x)

    def _recur(self, x: torch.Tensor, chunk_size: int) -> torch.Tensor:
        q, k, v = self._project(x)
        # In MAC keys and values come from a reading of these very weights. The inner gradient takes them as given
        # (Titans, eq. 12), hence it is taken in copies that nothing but the writing has seen.
        weights = [w.clone() for w in self.weights]
        result = oracle_memory(
            q,
            k,
            v,
            *self._gates(x, chunk_size),
            weights,
            self.momentum,
            chunk_size=chunk_size,
            forget_to_weights=self.start if self.config.memory_forget_to == "start" else None,
            rule=self.config.memory_rule,
            **self._network(),
        )
        self.weights, self.momentum = result.anchor_weights, result.anchor_momentum
        return result.output

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys of length 1, and values, (T, H, D) each, of tokens that are written."""
        projected = torch.cat([linear(self.parameters, f"{name}_proj", x) for name in "qkv"], -1)
        q, k, v = (self._heads(part) for part in self._convolve(projected, self.written).chunk(3, -1))
        return self._unit(q), self._unit(k), v

    def _ask(self, x: torch.Tensor) -> torch.Tensor:
        """Queries of length 1 (T, H, D) of tokens that only read: they have a convolution of their own."""
        return self._unit(self._heads(self._convolve(linear(self.parameters, "q_proj", x), self.asked)))

    def _network(self) -> dict[str, Any]:
        names = ("weight", "bias")
        norm = {f"norm_{name}": self.parameters.get(f"memory_norm_{name}") for name in names}
        return {**norm, "residual": self.config.memory_residual}

    def _gates(self, x: torch.Tensor, chunk_size: int) -> list[torch.Tensor]:
        limits = {"theta": self.config.memory_max_lr, "alpha": self.config.memory_max_forget, "eta": 1.0}
        if self.config.memory_rule == "swla":
            limits["eta"] = self.config.memory_max_lr
        gates = []
        for name, limit in limits.items():
            if f"{name}_proj.weight" in self.parameters:
                gate = limit * torch.sigmoid(linear(self.parameters, f"{name}_proj", x))
            else:
                gate = x.new_full((len(x), self.config.memory_num_heads), 1.0 if name == "theta" else 0.0)
            if self.config.memory_gate_granularity == "chunk":
                gate = torch.stack([gate[t - t % chunk_size] for t in range(len(x))])
            gates.append(gate)
        return gates

    def _convolve(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        """The causal convolution of (T, channels) behind the inputs ``past``, to which they are added; then SiLU."""
        kernel = self.parameters.get("conv1d.weight")
        if kernel is None:
            return silu(x)
        outputs = []
        for token in x:
            past.append(token)
            # The last tap belongs to the token itself. Queries are the first channels.
            taps = reversed(kernel[: token.shape[0], 0].unbind(-1))
            outputs.append(sum(tap * value for tap, value in zip(taps, reversed(past), strict=False)))
        return silu(torch.stack(outputs))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.config.memory_num_heads, self.config.memory_head_dim))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)

    def _answer(self, answers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(answers, self.parameters["o_norm.weight"], self.config.rms_norm_eps)
        return linear(self.parameters, "o_proj", normed.flatten(1) * silu(linear(self.parameters, "o_gate_proj", x)))


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary position embedding of one token's heads (H, D): feature i turns with feature i + D/2."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def attention(
    parameters: Parameters,
    config,
    queries: torch.Tensor,
    prefix: torch.Tensor | None,
    keys: torch.Tensor,
    key_positions: Sequence[int],
    sees: Callable[[int, int], bool],
) -> torch.Tensor:
    """Attention with a prefix that has no position.

    Args:
        queries: (T, C), query i at position i. prefix: (N_p, C), seen by all, or None.
        keys: (N, C), what keys and values are made from, at ``key_positions``.
        sees: (query, key) -> whether the query sees the key.

    Returns:
        (T, C)
    """
    heads, width = config.num_attention_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        """(n, C) -> (n, H, D); a head of keys serves several neighbouring heads of queries."""
        y = linear(parameters, f"{name}_proj", x).unflatten(-1, (-1, width))
        return y.repeat_interleave(heads // y.shape[1], 1)

    q, k, v = project("q", queries), project("k", keys), project("v", keys)
    prefix_k, prefix_v = ([], []) if prefix is None else (project("k", prefix), project("v", prefix))
    rotated = [rotate(key, position, theta) for key, position in zip(k, key_positions, strict=True)]
    outputs = []
    for i, query in enumerate(q):
        turned = rotate(query, i, theta)
        visible = [j for j in range(len(keys)) if sees(i, j)]
        scores = [(query * key).sum(-1) for key in prefix_k] + [(turned * rotated[j]).sum(-1) for j in visible]
        values = torch.stack([*prefix_v, *(v[j] for j in visible)])
        weights = torch.softmax(torch.stack(scores) * width**-0.5, 0)
        outputs.append((weights[..., None] * values).sum(0).flatten())
    return linear(parameters, "o_proj", torch.stack(outputs))


class Block:
    """One layer over one document; each variant is a method (T, C) -> (T, C)."""

    memory_class = DocumentMemory

    def __init__(self, parameters: Parameters, config):
        self.parameters, self.config = parameters, config
        self.persistent = parameters.get("persistent_tokens.weight")

    def norm(self, name: str, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else rms_norm(x, self.parameters[f"{name}.weight"], self.config.rms_norm_eps)

    def memory(self, prefix: torch.Tensor | None) -> DocumentMemory:
        return self.memory_class(inside(self.parameters, "memory"), self.config, prefix)

    def attend(self, *arguments) -> torch.Tensor:
        return attention(inside(self.parameters, "self_attn"), self.config, *arguments)

    def window_attention(self, x: torch.Tensor, prefix: torch.Tensor | None) -> torch.Tensor:
        """Each token sees itself and those before it, `sliding_window` of them in all."""
        return self.attend(x, prefix, x, range(len(x)), lambda i, j: 0 <= i - j < self.config.sliding_window)

    def gate(self, m: torch.Tensor) -> torch.Tensor:
        m = self.norm("combination.memory_norm", m)
        return {"silu": silu, "sigmoid": torch.sigmoid}[self.config.memory_gating](m)

    def lmm(self, x: torch.Tensor) -> torch.Tensor:
        prefix = self.norm("input_layernorm", self.persistent)
        return x + self.memory(prefix).run(self.norm("input_layernorm", x))

    def mal(self, x: torch.Tensor) -> torch.Tensor:
        """Titans, eq. 29-31."""
        x = self.lmm(x)
        prefix = self.norm("pre_attention_layernorm", self.persistent)
        return x + self.window_attention(self.norm("pre_attention_layernorm", x), prefix)

    def mag(self, x: torch.Tensor) -> torch.Tensor:
        """Titans, eq. 26-28."""
        n, prefix = self.norm("input_layernorm", x), self.norm("input_layernorm", self.persistent)
        y = self.window_attention(n, prefix)
        return x + self.norm("combination.attention_norm", y) * self.gate(self.memory(prefix).run(n))

    def mac(self, x: torch.Tensor) -> torch.Tensor:
        """Titans, eq. 21-25, with each token's reading visible from that token on."""
        n, prefix = self.norm("input_layernorm", x), self.norm("input_layernorm", self.persistent)
        memory, added = self.memory(None), []
        for segment in n.split(self.config.segment_length):
            read = self.norm("input_layernorm", memory.read(segment))
            size = len(segment)
            y = self.attend(
                segment, prefix, torch.cat([read, segment]), [*range(size)] * 2, lambda i, j, size=size: j % size <= i
            )
            z = self.norm("combination.attention_norm", y)
            added.append(z * self.gate(memory.run(z)))
        return x + torch.cat(added)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        parameters, n = inside(self.parameters, "mlp"), self.norm("pre_mlp_layernorm", x)
        gate, up = linear(parameters, "gate_proj", n), linear(parameters, "up_proj", n)
        return linear(parameters, "down_proj", silu(gate) * up)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self.config.variant)(x)
        return x + self.mlp(x)


def oracle_logits(
    model, ids: torch.Tensor, documents: Sequence[int] | None = None, block: type[Block] = Block
) -> torch.Tensor:
    """Logits of one row, differentiable in the model's parameters.

    Args:
        model: a `TitansForCausalLM`.
        ids: (T,) token ids.
        documents: the lengths of the documents in the row; None: it is one.
        block: what reads a layer.

    Returns:
        (T, vocab_size)
    """
    config, named = model.config, dict(model.named_parameters())
    base = inside(named, "model")
    head = named.get("lm_head.weight", base["embed_tokens.weight"])
    outputs = []
    for document in ids.split(list(documents or [len(ids)])):
        x = base["embed_tokens.weight"][document]
        for layer in range(config.num_hidden_layers):
            x = block(inside(base, f"layers.{layer}"), config).run(x)
        outputs.append(rms_norm(x, base["norm.weight"], config.rms_norm_eps) @ head.T)
    return torch.cat(outputs)
