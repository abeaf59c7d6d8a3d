# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents name must exist."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
TABLES = {
    name: re.findall(
        r"^\| (.+?) \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", (ROOT / "modeling_titans" / name).read_text(), re.M
    )
    for name in ("MEMORY.md", "ARCHITECTURES.md")
}
SOURCES = "\n".join(path.read_text() for path in (ROOT / "modeling_titans").glob("*.py"))
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))


def test_the_tables_of_equations_are_read():
    assert {name: len(rows) for name, rows in TABLES.items()} == {"MEMORY.md": 22, "ARCHITECTURES.md": 12}


@pytest.mark.parametrize("row", [row for rows in TABLES.values() for row in rows], ids=lambda row: row[0])
def test_the_table_of_equations_names_what_exists(row):
    _, function, number, behaviour = row
    assert re.search(rf"^(def|class) {function}\b", SOURCES, re.M), function
    for test in (number, behaviour):
        assert re.search(rf"^def {test}\(", TESTS, re.M), test


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "modeling_titans/MEMORY.md", "modeling_titans/ARCHITECTURES.md"]
)
def test_files_that_a_document_names_exist(document):
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:benchmarks|tests|training|tokenization|modeling_titans)/[\w./-]+)`", text)
    named += [(ROOT / document).parent.relative_to(ROOT) / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    missing = [str(name) for name in named if not (ROOT / name).exists()]
    assert not missing
