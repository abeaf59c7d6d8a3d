# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' own tests of models and of `generate()`, on every variant, and on three with memory caching.

They are transformers' files, run from a checkout that TRANSFORMERS_REPO names; here stand the tiny models, and what
the suite must be told of a cache that holds states in place of keys and values. CONTRIBUTING.md says how to run them.

Results with transformers 5.24.0 and torch 2.13, on a CPU, offline, and those of Qwen3-Next, a hybrid in transformers:

| tests      | passed | failed | skipped |
|------------|--------|--------|---------|
| Qwen3-Next |    154 |      0 |     159 |
| lmm        |    118 |      0 |     191 |
| mal        |    149 |      0 |     160 |
| mag        |    149 |      0 |     160 |
| mac        |    147 |      0 |     162 |
| lmm, grm   |    118 |      0 |     191 |
| mag, soup  |    149 |      0 |     160 |
| mac, ssc   |    147 |      0 |     162 |

The test files were those of the 5.24.0 source distribution; for the ones that it leaves out (`tests/generation`,
`tests/exporters`, `tests/utils`, `causal_lm_tester.py`, Qwen3-Next's) those of 5.16.0.dev0 (19 August 2026), in which
`past_key_values` was renamed to `cache` and the tester's default sizes, gone from transformers since, were written in.
`distributed_testing_utils.py` was in neither: FSDP runs were skipped.
Nearly all skips are the suite's own: no GPU, no flash-attn, slow tests, pipelines without a model on the Hub. What
Qwen3-Next passes and is skipped here: a static cache and what is compiled with it (`generate()` refuses one: a Titans
cache has a constant size), 4D attention masks (a memory reads a token or does not), experts, tensor-parallel plans,
question answering, old names of weights; for `lmm` whatever needs attention, for `mac` its weights.
What passes here and is skipped there: assisted decoding, prompt lookup, attention in float16, packed documents.
"""

import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto

from transformers_titans import (
    TitansCache,
    TitansConfig,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansForTokenClassification,
    TitansModel,
)
from transformers_titans.memory_state import iterate_tensors


REPOSITORY = os.environ.get("TRANSFORMERS_REPO")
if not REPOSITORY:
    pytest.skip("TRANSFORMERS_REPO does not name a checkout of the transformers repository", allow_module_level=True)

# Both projects call the folder `tests`, and transformers' files import one another by that name.
package = sys.modules.setdefault("tests", ModuleType("tests"))
package.__path__ = [*getattr(package, "__path__", ()), str(Path(REPOSITORY).resolve() / "tests")]

from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester  # noqa: E402


# The suite asks these tables of in-tree models which classes take labels and which one is the base model.
AUTO_NAMES = {
    "MODEL_MAPPING_NAMES": "TitansModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "TitansForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "TitansForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "TitansForTokenClassification",
}

IMPLEMENTATION_TESTS = ("test_eager_matches", "test_flash", "test_sdpa")


class TitansModelTester(CausalLMModelTester):
    """Tiny models. The suite's texts have seven tokens: two chunks, two segments and more than a window."""

    config_class = TitansConfig
    base_model_class = TitansModel
    causal_lm_class = TitansForCausalLM
    sequence_classification_class = TitansForSequenceClassification
    token_classification_class = TitansForTokenClassification

    def __init__(self, parent):
        super().__init__(
            parent=parent,
            variant=parent.variant,
            memory_chunk_size=4,
            memory_expansion=2,
            segment_length=4,
            sliding_window=5,
            num_persistent_tokens=2,
            cache_segment_length=4,
            **parent.fields,
        )


class TransformersSuite(CausalLMModelTest):
    """What the tests of all variants share: how to look at a Titans cache, and where transformers' habits differ."""

    variant: str
    fields: dict[str, Any] = {}
    model_tester_class = TitansModelTester

    def setUp(self):
        super().setUp()
        if "_export_" in self._testMethodName:
            self.skipTest("transformers' exporter builds tuples from iterators, which a state's named tuples refuse")
        for table, name in AUTO_NAMES.items():
            self._patch(mock.patch.dict(getattr(modeling_auto, table), {"titans": name}))
        # The suite's one flag also stands for "knows padding", and for "has implementations to compare".
        compares = self.variant != "lmm" and self._testMethodName.startswith(IMPLEMENTATION_TESTS)
        if compares or "padding" in self._testMethodName:
            self.has_attentions = True
        if "padding_free" in self._testMethodName:
            self._patch(mock.patch.object(TitansForCausalLM, "_supports_attention_backend", True))
        if "recurrent_layers_mask_padding" in self._testMethodName:
            types = ["linear_attention"] * self.model_tester.num_hidden_layers
            self._patch(mock.patch.object(TitansConfig, "layer_types", types, create=True))

    def _patch(self, patch):
        patch.start()
        self.addCleanup(patch.stop)

    def _check_past_key_values_for_generate(self, batch_size, cache, seq_length, config):
        """A state per layer in place of keys and values, and the columns that it has read."""
        self.assertIsInstance(cache, TitansCache)
        self.assertEqual(len(cache), config.num_hidden_layers)
        self.assertEqual(cache.get_seq_length(), seq_length)
        cache.check(config, batch_size)

    def _check_caches_are_equal(self, cache1, cache2):
        one, other = ([dict(iterate_tensors(layer.tree())) for layer in cache.layers] for cache in (cache1, cache2))
        self.assertTrue(all(one))
        torch.testing.assert_close(one, other)


class LMMTest(TransformersSuite, unittest.TestCase):
    variant = "lmm"
    has_attentions = False

    def setUp(self):
        super().setUp()
        if "rope_scaling" in self._testMethodName:
            self.skipTest("lmm has no attention, hence no positions")


class AttentionSuite(TransformersSuite):
    """The variants with attention."""

    def _check_attentions_for_generate(self, batch_size, attentions, prompt_length, output_length, config, **kwargs):
        """As the suite does it, but for the keys, of which the window keeps the last ones alone."""
        self.assertEqual(len(attentions), output_length - prompt_length)
        for step, layers in enumerate(attentions):
            self.assertEqual(len(layers), config.num_hidden_layers)
            queries = 1 if step and kwargs["decoder_past_key_values"] is not None else prompt_length + step
            for weights in layers:
                self.assertEqual(weights.shape[:3], (batch_size, config.num_attention_heads, queries))
                self.assertIn(weights.shape[3], range(1, prompt_length + step + 1))

    def test_model_rope_scaling_from_config_1_dynamic(self):
        with self.assertRaisesRegex(StrictDataclassError, "rope_type.*dynamic"):
            super().test_model_rope_scaling_from_config_1_dynamic()

    def test_model_rope_scaling_frequencies(self):
        # It asks for a linear scale, which must pass, then for a dynamic one.
        with self.assertRaisesRegex(ValueError, "rope_type.*dynamic"):
            super().test_model_rope_scaling_frequencies()


class MALTest(AttentionSuite, unittest.TestCase):
    variant = "mal"


class MAGTest(AttentionSuite, unittest.TestCase):
    variant = "mag"


class MACTest(AttentionSuite, unittest.TestCase):
    variant = "mac"
    has_attentions = False

    def test_training_overfit(self):
        # Its 300 steps of 64 tokens would take minutes in segments of four.
        for name in ("memory_chunk_size", "segment_length", "cache_segment_length"):
            setattr(self.model_tester, name, 32)
        super().test_training_overfit()


class LMMCachingTest(LMMTest):
    fields = {"memory_caching": "grm"}


class MAGCachingTest(MAGTest):
    fields = {"memory_caching": "soup", "cache_initialization": "independent", "cache_max_segments": 2}


class MACCachingTest(MACTest):
    fields = {
        "memory_caching": "ssc",
        "cache_segmentation": "logarithmic",
        "cache_initialization": "independent",
        "cache_top_k": 1,
    }
