# The everyday commands. Each sets up what it needs by itself; `make` alone lists them.

DEFAULT_PROMPT := Hello! In two sentences: who are you, and what can you help me with?
# As typed: a dollar sign in a question is not make's business. No question is the default one.
override PROMPT := $(if $(value PROMPT),$(value PROMPT),$(DEFAULT_PROMPT))
# A small model may talk for ever.
MAX_TOKENS ?= 400
VENV ?= .venv
BIN := $(VENV)/bin
# Tests of one file stay together, so that what they share (a model, two services) starts once.
PYTEST_ARGS ?= -n 2 --dist loadfile
export ISOBATCH_VENV := $(VENV)
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup run serve test check native format protos bench bench-peers simulate stress nightly requirements clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nTo ask something:  make run PROMPT="Why is the sky blue?"\n'

setup: ## Set up everything for development in $(VENV)
	@scripts/setup dev

run: ## Answer PROMPT="..." with a real model, from a standing start
	@scripts/setup run
	@$(BIN)/isobatch generate --serve --max-tokens $(MAX_TOKENS) --prompt "$$PROMPT"
	@printf '\nAnother question:   make run PROMPT="..."\n' >&2
	@printf 'A server that stays: make serve, then %s/isobatch chat\n' '$(BIN)' >&2

serve: ## Run scheduler and executor until Ctrl-C
	@scripts/setup run
	@$(BIN)/isobatch serve

test: ## Run the tests against the installed package
	@scripts/setup dev
	@$(BIN)/pytest $(PYTEST_ARGS)

check: ## Check format, lint, types, import rules, the contract and its generated code
	@scripts/setup dev
	@scripts/check

native: ## Check the native code alone: sanitizers, races, NEON in an emulator
	@scripts/setup packages
	@scripts/native-checks $(NATIVE_CHECKS)

format: ## Format the code and fix what can be fixed by itself
	@scripts/setup dev
	@$(BIN)/ruff check --quiet --fix --exit-zero .
	@$(BIN)/ruff format .

protos: ## Write the generated code of the contract anew
	@scripts/generate-protos

bench: ## Measure speed (writes bench-results/)
	@scripts/setup dev
	@$(BIN)/python tests/bench/bench_serving.py $(BENCH_ARGS)

bench-peers: ## Measure speed beside llama.cpp, which it builds in .venv-bench (minutes)
	@scripts/setup dev
	@$(BIN)/python tests/bench/bench_peers.py $(BENCH_ARGS)

simulate: ## Schedule thousands of simulated clients, beside simpler policies (minutes)
	@scripts/setup dev
	@$(BIN)/python tests/bench/simulate.py $(SIMULATE_ARGS)

stress: ## Ten minutes of load with 64 streams (writes stress-results/)
	@scripts/setup dev
	@$(BIN)/python tests/stress/run_stress.py $(STRESS_ARGS)

nightly: ## What takes hours: long random tests, Metal's kernels, all native checks, load
	@scripts/setup dev
	@HYPOTHESIS_PROFILE=nightly $(BIN)/pytest $(PYTEST_ARGS) --timeout 3600
	@$(BIN)/pytest -n 2 tests/metal_on_cpu
	@scripts/native-checks all
	@$(BIN)/python tests/stress/run_stress.py $(STRESS_ARGS)

requirements: ## Pin the requirement files anew (needs uv)
	@scripts/pin-requirements --upgrade

clean: ## Remove builds, caches and environments (not downloaded models)
	rm -rf build dist .venv .venv-uv .venv-protos .venv-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache
	find scheduler_service executor_service kernels protos tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
