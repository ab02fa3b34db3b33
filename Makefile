# `make serve` and `make test` need nothing but Debian 12 (or newer) with python3, python3-venv and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install serve test test-quick quick-tests test-gpu lint format lock bench bench-gpu clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Create .venv with pinned packages.

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "deepinfer needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); } || \
		{ echo "no virtual environment could be made: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "installing pinned packages into $(VENV) (a minute or two; torch is the large one)"
	@$(BIN)/python -m pip install --quiet -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

serve: $(STAMP)  ## Talk to a small chat model on http://127.0.0.1:8888 (more flags: ARGS="--dp 2").
	@exec $(BIN)/deepinfer serve $(ARGS)

# Three processes for two cores: those that start instances often wait (doc/testing.md).
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --durations=30

test: $(STAMP)  ## Run all checks and tests.
	@$(MAKE) --no-print-directory lint
	$(PYTEST) $(ARGS)

test-quick: $(STAMP)  ## Run all checks, and the tests that are not marked slow.
	@$(MAKE) --no-print-directory --jobs=2 lint quick-tests

quick-tests: $(STAMP)
	$(PYTEST) -m 'not slow' --hypothesis-profile=quick --cpu-limit=30 $(ARGS)

test-gpu:  ## Run GPU tests and the page-copy benchmark with the active Python (torch with CUDA, the extra gpu).
	$(PYTHON) -m pytest -m gpu $(ARGS)
	$(PYTHON) -m daemon.cli.main bench page-copy

lint: $(STAMP)  ## Style, types, and the direction of imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## Put the code in shape.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Measure the pipeline without a model.
	$(BIN)/python -m benchmarks.pipeline $(ARGS)

bench-gpu:  ## Measure page copies and prefix hits on a GPU with the active Python, some ten minutes.
	$(PYTHON) -m benchmarks.gpu $(ARGS)

lock:  ## Pin what is installed in .venv now.
	@{ echo "# Every package that running and testing needs, pinned. Made by \`make lock\`."; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//'; } > requirements.lock

clean:  ## Remove .venv and caches; the fetched model stays in ~/.cache/deepinfer.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
