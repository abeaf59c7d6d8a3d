# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What is installed: the wheel's files, its one top-level name, its data, and what an import pulls in."""

import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData

import transformers_titans
import transformers_titans.tokenization


ROOT = Path(__file__).parents[1]
SOURCES = ("modeling_titans", "tokenization", "training")
FOLDER_NAMES = ("modeling_titans", "configuration_titans", "tokenization", "training", "tests", "setup")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "modeling_titans/MEMORY.md")


def run_python(script: str, *paths, cwd=None) -> str:
    """Runs a script in a fresh process, with folders in front of the import path; returns what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built without a network, from a copy: building leaves files in the folder it builds from."""
    copy, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    copy.mkdir()
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, copy)
    shutil.copy(ROOT / "LICENSE", copy)
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    run = subprocess.run([*command, "--wheel-dir", out, copy], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel's files, unpacked as an installation would."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    expected = set()
    for folder, package in zip(SOURCES, ("", "tokenization/", "training/"), strict=True):
        expected |= {f"transformers_titans/{package}{path.name}" for path in (ROOT / folder).glob("*.py")}
    data = [ROOT / "training/model_card.md", *(ROOT / "training/novel").iterdir()]
    data += (ROOT / "training/recipes").glob("*.yaml")
    expected |= {f"transformers_titans/{path.relative_to(ROOT)}" for path in data}
    sources = [path for pattern in ("*.cpp", "*.h") for path in (ROOT / "modeling_titans").glob(pattern)]
    expected |= {f"transformers_titans/{path.name}" for path in sources}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_has_one_top_level_name(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"transformers_titans"}


def test_version_and_licence_of_the_wheel(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "transformers-titans"
    assert metadata["Version"] == transformers_titans.__version__
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["configuration_titans.py", "training/model_card.md"])
def test_symlinked_files_are_whole_in_the_wheel(wheel, name):
    assert wheel.read(f"transformers_titans/{name}") == (ROOT / Path(name).name).read_bytes()


def test_wheel_works_by_itself(installed, tmp_path):
    """Imported from the wheel's files alone, with the data that the demo and the model card read."""
    script = (
        "import json, transformers_titans; from transformers_titans.training.demo import read_chapters\n"
        "from transformers_titans.training import card, train; from transformers import AutoConfig\n"
        "from importlib.resources import files\n"
        "has_card = (files('transformers_titans.training') / 'model_card.md').is_file()\n"
        "variant = AutoConfig.for_model('titans').variant\n"
        "print(json.dumps([transformers_titans.__file__, len(read_chapters()), variant, has_card]))"
    )
    file, chapters, variant, has_card = json.loads(run_python(script, installed, cwd=tmp_path).splitlines()[-1])
    assert Path(file).is_relative_to(installed)
    assert (chapters, variant, has_card) == (61, "lmm", True)


def test_console_script_starts_the_training(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "titans-train = transformers_titans.training.train:main" in wheel.read(name).decode()
    assert callable(importlib.import_module("transformers_titans.training.train").main)


def test_folder_names_cannot_be_imported(tmp_path):
    script = f"import importlib.util; print([n for n in {FOLDER_NAMES} if importlib.util.find_spec(n)])"
    assert run_python(script, cwd=tmp_path).strip() == "[]"


@pytest.mark.parametrize("link", ["modeling_titans/configuration_titans.py", "training/model_card.md"])
def test_symlinks_lead_to_the_root_file(link):
    assert (ROOT / link).is_symlink()
    assert not os.path.isabs(os.readlink(ROOT / link))
    assert (ROOT / link).resolve() == ROOT / Path(link).name


@pytest.mark.parametrize("module", [transformers_titans, transformers_titans.tokenization], ids=lambda m: m.__name__)
def test_every_exported_name_is_there(module):
    assert module.__all__ == sorted(module.__all__)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def test_readme_examples_run(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example, caching = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(example, names)
    assert names["output"].shape[1] == names["text"].shape[1] + 20
    assert names["cache"].get_seq_length() == names["output"].shape[1] - 1
    names["model"].save_pretrained("trained-without")
    exec(caching, names)
    assert 0 < names["cache"].kept_nbytes < names["cache"].nbytes
    assert names["longer"].config.memory_caching == "average"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_in_documents_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in targets if not (ROOT / document).parent.joinpath(link).exists()] == []


def test_model_card_template_can_be_left_empty():
    card = ModelCard.from_template(ModelCardData(library_name="transformers"), template_path=ROOT / "model_card.md")
    assert card.data.library_name == "transformers"
    assert "{{" not in card.content and "{%" not in card.content
    assert card.content.count("[more information needed]") == 6


def test_model_card_template_shows_what_it_is_given():
    card = ModelCard.from_template(
        ModelCardData(library_name="transformers", license="mit"),
        template_path=ROOT / "model_card.md",
        model_name="novel-lmm",
        variant="lmm",
        num_parameters="1,234",
        context_length=256,
        carry_memory=False,
        datasets=["novel.txt"],
        metrics={"eval_loss": 1.25},
    )
    assert card.data.license == "mit"
    shown = ("# novel-lmm", "`lmm`", "1,234", "256", "next: no", "`novel.txt`", "| eval_loss | 1.25 |")
    assert [text for text in shown if text not in card.content] == []
    assert "[more information needed]" not in card.content
