# Everything here needs only a Python 3.11 or later: `make demo` on a fresh machine is meant to work.
PYTHON ?= python3
VENV ?= .venv
CALLS ?=
# Where no torch is installed yet; a build for the machine's own GPUs may be there before.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or later; make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/.train: $(VENV)/.dev
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train]'
	@touch $@

.PHONY: runtime
runtime: $(VENV)/.installed  ## the Python that runs the calls, made once
	@$(BIN)/rstar-sandbox runtime >/dev/null

demo: runtime  ## a server, a sample of calls through it, a table (CALLS=file.jsonl for your own)
	@$(BIN)/python -m bench.demo $(if $(CALLS),--calls '$(CALLS)')

test: $(VENV)/.train runtime  ## the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.dev  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=sandbox/guest $(BIN)/mypy --config-file= --strict --allow-any-generics --explicit-package-bases \
		$(wildcard sandbox/guest/[a-z]*.py)
	$(BIN)/lint-imports

clean:  ## remove what make made; the guest runtime stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
