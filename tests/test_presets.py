# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The papers' model sizes: how many parameters each one has in each architecture."""

import pytest
import torch

from transformers_titans import TitansConfig, TitansForCausalLM
from transformers_titans.configuration_titans import PRESETS


VARIANTS = ("lmm", "mal", "mag", "mac")
# Parameters with the default vocabulary of 32,000 and an untied head, by architecture as above.
PARAMETERS = {
    "170m": (170_104_704, 170_113_920, 170_123_136, 170_123_136),
    "340m": (341_379_840, 339_299_072, 339_315_456, 339_315_456),
    "400m": (398_544_064, 399_875_264, 399_895_744, 399_895_744),
    "760m": (759_059_328, 759_096_192, 759_133_056, 759_133_056),
    "1.3b": (1_300_552_624, 1_298_230_192, 1_298_267_056, 1_298_267_056),
}
NOMINAL = {"170m": 170e6, "340m": 340e6, "400m": 400e6, "760m": 760e6, "1.3b": 1.3e9}


@pytest.mark.parametrize(("column", "variant"), list(enumerate(VARIANTS)), ids=VARIANTS)
@pytest.mark.parametrize("size", PRESETS)
def test_preset_has_the_parameters_of_its_name(size, column, variant):
    config = TitansConfig.from_preset(size, variant=variant)
    with torch.device("meta"):
        model = TitansForCausalLM(config)
    assert model.num_parameters() == PARAMETERS[size][column]
    assert abs(model.num_parameters() / NOMINAL[size] - 1) < 0.01


def test_papers_shapes():
    for size, shape in {"760m": (24, 1536, 16), "1.3b": (18, 2048, 8)}.items():
        config = TitansConfig.from_preset(size)
        assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == shape


def test_fields_take_precedence():
    config = TitansConfig.from_preset("170m", variant="mag", num_hidden_layers=3, vocab_size=100)
    assert (config.variant, config.num_hidden_layers, config.vocab_size) == ("mag", 3, 100)


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match=r"size must be one of \('170m', .* got '171m'"):
        TitansConfig.from_preset("171m")
