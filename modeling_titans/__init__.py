# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Titans for Hugging Face Transformers: neural long-term memory that learns at test time.

Importing the package makes transformers' Auto classes know the Titans models. The op and its state need torch only;
transformers is imported when a name that needs it is asked for.
"""

import importlib

from .auto_registration import watch_imports


__version__ = "0.1.0"

_EXPORTS = {
    "MemoryState": "memory_state",
    "NeuralMemoryState": "memory_state",
    "SegmentState": "memory_state",
    "TitansCache": "cache_titans",
    "TitansConfig": "configuration_titans",
    "TitansForCausalLM": "modeling_titans",
    "TitansForSequenceClassification": "modeling_titans",
    "TitansForTokenClassification": "modeling_titans",
    "TitansModel": "modeling_titans",
    "TitansNeuralMemory": "memory_layer",
    "TitansPreTrainedModel": "modeling_titans",
    "TokenLayout": "token_layout",
    "neural_memory": "memory_ops",
}

__all__ = [
    "MemoryState",
    "NeuralMemoryState",
    "SegmentState",
    "TitansCache",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansForTokenClassification",
    "TitansModel",
    "TitansNeuralMemory",
    "TitansPreTrainedModel",
    "TokenLayout",
    "neural_memory",
]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


watch_imports(__name__)
