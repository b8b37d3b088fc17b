# make demo   a whole job on this machine; one learner is killed on the way
# make test   the test suite
# make help   everything else
#
# Each target sets itself up (tools/setup.sh). PYTHON=python3.12 chooses the
# interpreter, VENV=directory where its environment lives.

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_FLAGS ?=

.PHONY: help setup demo test test-matrix test-swaps test-benchmarks lint types \
  contracts check format docs proto bench clean
.DEFAULT_GOAL := help

help: ## what there is
	@sed -n 's/^\([a-z-]*%*\):.*## \(.*\)/  make \1\t\2/p' Makefile | \
	  expand -t 22

setup: ## the virtual environment (every target does this by itself)
	@PYTHON='$(PYTHON)' sh tools/setup.sh '$(VENV)'

demo: setup ## a job of three learners that loses one on the way
	@$(BIN)/python tools/fresh.py runs/demo
	$(BIN)/decoupled run configs/stdlib_tiny.gin --workdir runs/demo \
	  --learners 3 --rounds 600 --chaos 'kill learner/1 @200r'

test: setup ## the test suite
	$(BIN)/python -m pytest -n auto --dist loadgroup $(PYTEST_FLAGS)

test-matrix: setup ## every fault at every point, in real processes; 25 minutes
	$(BIN)/python -m pytest -m matrix tests/matrix $(PYTEST_FLAGS)

test-swaps: setup ## hosts swapped for standbys, in real processes; minutes
	$(BIN)/python -m pytest -m matrix tests/run $(PYTEST_FLAGS)

test-benchmarks: setup ## that each benchmark prints what it promises
	$(BIN)/python -m pytest -m benchmark tests/benchmarks $(PYTEST_FLAGS)

lint: setup ## style: ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## types: mypy, strict
	$(BIN)/mypy

contracts: setup ## layers: import-linter
	$(BIN)/lint-imports

check: lint types contracts ## style, types and layers

format: setup ## formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the pages of docs/ that are made from the code
	$(BIN)/python tools/reference.py

proto: setup ## the Python code of the protocol
	$(BIN)/python -m decoupled.wire.generate

bench-%: setup ## one benchmark: bench-exchange runs benchmarks/exchange.py
	$(BIN)/python benchmarks/$*.py $(BENCH_FLAGS)

clean: ## removes the environment and caches; runs/ stays
	rm -rf '$(VENV)' .mypy_cache .pytest_cache .ruff_cache \
	  .import_linter_cache .hypothesis build dist
