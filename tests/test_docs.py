# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents name must exist."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
TABLE = re.findall(
    r"^\| (.+?) \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", (ROOT / "modeling_titans" / "MEMORY.md").read_text(), re.M
)
SOURCES = "\n".join(path.read_text() for path in (ROOT / "modeling_titans").glob("*.py"))
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))


def test_the_table_of_equations_is_read():
    assert len(TABLE) == 10


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_table_of_equations_names_what_exists(row):
    _, function, number, behaviour = row
    assert re.search(rf"^(def|class) {function}\b", SOURCES, re.M), function
    for test in (number, behaviour):
        assert re.search(rf"^def {test}\(", TESTS, re.M), test


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "modeling_titans/MEMORY.md"])
def test_files_that_a_document_names_exist(document):
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:benchmarks|tests|training|tokenization|modeling_titans)/[\w./-]+)`", text)
    named += [(ROOT / document).parent.relative_to(ROOT) / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    missing = [str(name) for name in named if not (ROOT / name).exists()]
    assert not missing
