# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What decoding in C++ takes of a model: the blocks' parameters, as long as their modules are what `TitansModel` has
made of them.

All of it is looked at with each token, since modules and parameters may change between two; hence by ways that are
shorter than `nn.Module`'s own.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from .attention_titans import TitansAttention
from .decoder_layer import TitansCombination, TitansDecoderLayer, TitansMLP, TitansPersistentTokens
from .memory_layer import TitansGate, TitansNeuralMemory, TitansRMSNorm, TitansStartWeights
from .short_calls import TitansConvolution


SILU, SIGMOID = (type(ACT2FN[name]) for name in ("silu", "sigmoid"))
# What a block consists of. An adapter's or quantizer's layer has a class of its own.
PLAIN = {
    nn.Linear,
    SILU,
    SIGMOID,
    TitansAttention,
    TitansCombination,
    TitansConvolution,
    TitansDecoderLayer,
    TitansGate,
    TitansMLP,
    TitansNeuralMemory,
    TitansPersistentTokens,
    TitansRMSNorm,
    TitansStartWeights,
}


class _Blocks:
    """Blocks that C++ may read, as long as nothing has changed.

    Attributes:
        places: for each block, in the order of `titans::BlockWeights`, a module's parameters and a name among them.
    """

    def __init__(self, layers: nn.ModuleList, modules: list[nn.Module]):
        self.places = [_places(layer) for layer in layers]
        self._modules, self._types = modules, [type(module) for module in modules]
        self._own = [module.__dict__ for module in modules]
        self._parents = [own for own in self._own if own["_modules"]]
        self._children = self._present_children()

    def are_of(self, layers: nn.ModuleList) -> bool:
        """Whether these are the layers' modules, and plain as before."""
        return (
            self._modules[: len(layers)] == list(layers)
            and [type(module) for module in self._modules] == self._types
            and not any(map(_does_more, self._own))
            and self._present_children() == self._children
        )

    def _present_children(self) -> list[list[nn.Module | None]]:
        return [list(own["_modules"].values()) for own in self._parents]


_known: WeakKeyDictionary[nn.ModuleList, _Blocks] = WeakKeyDictionary()


def plain_parameters(layers: nn.ModuleList, dtype: torch.dtype) -> list[list[torch.Tensor | None]] | None:
    """Each block's parameters in the order of `titans::BlockWeights`, None for absent ones; or None where the blocks
    are more than C++ knows, differ in their shapes, or are not of ``dtype`` on a CPU."""
    if _has_any_global_hook():
        return None
    blocks = _known.get(layers)
    if blocks is None or not blocks.are_of(layers):
        modules = _plain_modules(layers)
        if modules is None:
            return None
        blocks = _known[layers] = _Blocks(layers, modules)
    parameters = [[own.get(name) for own, name in places] for places in blocks.places]
    return parameters if are_alike(parameters, (nn.Parameter, dtype, True)) else None


def are_alike(tensors: list[list[torch.Tensor | None]], kind: tuple[type, torch.dtype, bool]) -> bool:
    """Whether each block's tensors have the shapes of the first one's, and are all of one (class, dtype, is_cpu)."""
    kinds = {(type(t), t.dtype, t.is_cpu) for given in tensors for t in given if t is not None}
    if not kinds <= {kind}:
        return False
    shapes = [[None if t is None else t.shape for t in given] for given in tensors]
    return all(own == shapes[0] for own in shapes)


def _plain_modules(layers: nn.ModuleList) -> list[nn.Module] | None:
    """All modules, if they compute what their classes say, with the activations that C++ knows."""
    if not all(type(layer) is TitansDecoderLayer for layer in layers):
        return None
    modules = list(layers)
    for module in modules:
        own = module.__dict__
        if type(module) not in PLAIN or _does_more(own):
            return None
        if own["_modules"]:
            modules += [child for child in own["_modules"].values() if child is not None]
    return modules if all(type(layer.mlp.act_fn) is SILU for layer in layers) else None


def _does_more(own: dict) -> bool:
    """Whether a module with these attributes does more than its class says."""
    if own["training"] or own["_forward_pre_hooks"] or "forward" in own:
        return True
    # transformers' own look at outputs only while somebody has asked for them, and then `read_blocks` reads.
    hooks = own["_forward_hooks"]
    return bool(hooks) and any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks.values())


def _places(layer: TitansDecoderLayer) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    memory, linear = layer.memory, ("weight", "bias")
    attention, combination = (getattr(layer, name, None) for name in ("self_attn", "combination"))
    return [
        *_of(layer, ("input_layernorm", "persistent_tokens"), "weight"),
        *_of(memory, ("q_proj", "k_proj", "v_proj", "theta_proj", "alpha_proj", "eta_proj"), *linear),
        *_of(memory, ("o_gate_proj", "o_proj"), *linear),
        *_of(memory, ("conv1d",), "weight"),
        (memory._parameters, "memory_norm_weight"),
        (memory._parameters, "memory_norm_bias"),
        *_of(memory, ("o_norm",), "weight"),
        *((memory.start_weights._parameters, name) for name in memory.start_weights._parameters),
        *_of(attention, ("q_proj", "k_proj", "v_proj", "o_proj"), *linear),
        *_of(layer, ("pre_attention_layernorm",), "weight"),
        *_of(combination, ("attention_norm", "memory_norm"), "weight"),
        *_of(layer, ("pre_mlp_layernorm",), "weight"),
        *_of(layer.mlp, ("gate_proj", "up_proj", "down_proj"), *linear),
    ]


def _of(module: nn.Module | None, children: tuple[str, ...], *names: str):
    """The places of the children's parameters."""
    own = {} if module is None else module._modules
    found = [own.get(child) for child in children]
    return [({} if child is None else child._parameters, name) for child in found for name in names]
