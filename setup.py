# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent
# The folder that a checkpoint carries is the import package itself; see CONTRIBUTING.md.
PACKAGE_DIR = {
    "transformers_titans": "modeling_titans",
    "transformers_titans.tokenization": "tokenization",
    "transformers_titans.training": "training",
}
INIT = (ROOT / "modeling_titans" / "__init__.py").read_text(encoding="utf-8")

setup(
    name="transformers-titans",
    version=re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE).group(1),
    description="Titans for Hugging Face Transformers: neural long-term memory that learns at test time",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The transformers-titans authors",
    license_expression="Apache-2.0",
    package_dir=PACKAGE_DIR,
    packages=list(PACKAGE_DIR),
    package_data={
        "transformers_titans": ["*.cpp", "*.h"],
        "transformers_titans.training": ["model_card.md", "novel/*", "recipes/*.yaml"],
    },
    python_requires=">=3.10",
    install_requires=[
        "accelerate>=1.1",
        "datasets",
        "huggingface_hub",
        "jinja2",
        "numpy",
        "pyyaml",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "torch>=2.6",
        "tqdm",
        "transformers>=5.24,<6",
    ],
    extras_require={
        "flash": ["flash-attn>=2.7.0"],
        "eval": ["lm-eval"],
        "triton": ["triton"],
        "bench": ["matplotlib", "memory-caching", "titans-pytorch"],
        "dev": [
            "bitsandbytes",
            "build",
            "peft",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools",
            "torchao",
            "transformers-mlinter",
            "triton",
        ],
    },
    entry_points={"console_scripts": ["titans-train = transformers_titans.training.train:main"]},
)
