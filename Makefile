PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
# Modules are compiled when they are first imported: all of them at once would take longer than the rest.
INSTALL = $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e

.PHONY: demo test style venv clean

# Trains a small model on the novel that comes with the package, and shows what the memory is worth.
demo: $(STAMP)
	$(BIN)/python -m transformers_titans.training.demo

# The command pytest, not `python -m pytest`: that would put this folder on the import path, hiding packaging mistakes.
# One process per core with one thread each: the tests' models are too small for more threads.
test: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

style: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_model_structure.py

venv: $(DEV_STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed, and none was found" >&2; exit 1; }
	@echo "Installing into .venv, nothing outside is changed"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(INSTALL) ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
