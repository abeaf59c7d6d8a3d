# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The model card that goes with a checkpoint."""

import importlib.resources
import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from transformers_titans.training.arguments import DataArguments


def write_model_card(
    output_dir: str | os.PathLike, model: PreTrainedModel, data_args: DataArguments, metrics: dict[str, float]
) -> None:
    """Fills the package's template ``model_card.md`` in and writes it to ``output_dir/README.md``.

    Args:
        output_dir: folder of the checkpoint; its name becomes the model's.
        model: what was trained.
        data_args: what it was trained on.
        metrics: what was measured; those of the evaluation are listed.
    """
    template = importlib.resources.files("transformers_titans.training") / "model_card.md"
    evaluation = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    with importlib.resources.as_file(template) as path:
        card = ModelCard.from_template(
            ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["titans"]),
            template_path=str(path),
            model_name=Path(output_dir).resolve().name,
            variant=model.config.variant,
            num_parameters=f"{model.num_parameters():,}",
            context_length=data_args.context_length,
            carry_memory=data_args.carry_memory,
            # Where a file lies on the trainer's disk is nobody else's business.
            datasets=[Path(name).name if Path(name).is_absolute() else name for name in data_args.dataset],
            metrics=evaluation,
        )
    (Path(output_dir) / "README.md").write_text(str(card), encoding="utf-8")
