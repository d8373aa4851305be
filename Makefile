# Everything a newcomer needs; each target sets up .venv first when needed.
#   make train   plan, train on local ranks, sample text, write a report (runs/quickstart/)
#   make fuzz N=100 SEED=1   random strategies against one device; a failing one is made as small as possible
#   make test    formatting, types, import layers, and the whole test suite

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

bin := .venv/bin
out := runs/quickstart

.PHONY: help setup train test check fuzz bench clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@./tools/setup.sh

train: setup
	$(bin)/hyper-parallel train recipes/quickstart.yaml output_dir=$(out) checkpoint.resume=never

check: setup
	$(bin)/ruff format --check src tests benchmarks examples tools
	$(bin)/ruff check src tests benchmarks examples tools
	$(bin)/mypy
	$(bin)/lint-imports --no-cache
	$(bin)/codespell src tests docs recipes benchmarks examples tools README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md
	$(bin)/python tools/size_report.py

test: check
	$(bin)/pytest

fuzz: setup
	FUZZ_CASES=$(or $(N),100) FUZZ_SEED=$(or $(SEED),1) $(bin)/pytest tests/parity/test_fuzz.py -s -q

bench: setup
	@for script in benchmarks/[!_]*.py; do echo "== $$script"; $(bin)/python $$script --json || exit 1; done

clean:
	rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
