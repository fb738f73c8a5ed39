# Every check is defined once, here; .ci/run calls `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# grpcio-tools of the oldest protobuf that we admit cannot share a venv with the newest runtime
PROTO_VENV  := .venv-proto
PROTO_TOOLS := grpcio-tools==1.71.2

.DEFAULT_GOAL := help
.PHONY: help setup run test lint types layers unit proto proto-check bench docs format system constraints clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | column -t -s "$$(printf '\t')"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Paceline needs Python 3.11 or newer; found $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

setup: $(VENV)/.dev  ## make .venv with everything that the checks need

run: $(VENV)/.demo  ## train the example on this computer: one trainer, two rollout engines
	$(BIN)/paceline up examples/arithmetic/local.yaml --yes

test: setup system lint types layers proto-check unit  ## every check

lint: setup  ## style, formatting, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

types: setup  ## mypy, strict
	$(BIN)/mypy

layers: setup  ## which way imports point
	$(BIN)/lint-imports importlinter.toml

unit: setup  ## the tests
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not gpu and not slow'

system:  ## Debian packages that tests need, when we may install them
	@.ci/system-packages

$(PROTO_VENV)/bin/python:
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check '$(PROTO_TOOLS)'

proto: $(PROTO_VENV)/bin/python  ## write the protobuf modules again
	PYTHONPATH=src $(PROTO_VENV)/bin/python src/paceline/refit/wire/generate.py

proto-check: $(PROTO_VENV)/bin/python  ## the protobuf modules are what the .proto files say
	PYTHONPATH=src $(PROTO_VENV)/bin/python src/paceline/refit/wire/generate.py --check

bench: setup  ## every benchmark, as JSON
	@for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b --json || exit 1; done

docs: $(BIN)/python  ## build the documentation, strictly
	$(PIP) --editable '.[docs]'
	$(BIN)/mkdocs build --strict

format: setup  ## put the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

constraints: setup  ## pin what is installed now
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --exclude-editable | sed -E 's/\+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove what the targets made
	rm -rf $(VENV) $(PROTO_VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
