# Everything a newcomer needs; each target sets up .venv first when needed.
#   make train   plan, train on local ranks, sample text, write a report (runs/quickstart/)
#   make fuzz N=100 SEED=1   random strategies against one device; a failing one is made as small as possible
#   make attack N=2000  hostile and damaged files of every kind: each is read, or refused with a code, at little cost
#   make targets  trained tokens of record forms and of templates of 54 families, beside an independent decoder (a minute)
#   make chaos N=20 SEED=1   faults in small runs (killed, frozen, damaged checkpoints): nothing may be lost
#   make resume-changes   one change each between a checkpoint and its resume: equal curve, refused or named (minutes)
#   make test    formatting, types, import layers, and the test suite in two processes
#   make oracles   error codes, census, parity, plans and figures against their record; UPDATE=1 REASON="..." records
#   make test-slow   further cells of its matrices, on up to sixteen ranks, and long faults (minutes)
#   make test-accelerator   the same training and generation on an emulated accelerator (needs g++ and ninja)
#   make sweeps  checks of properties over all model types of transformers, recorded in docs/results (an hour)
#   make test-cluster   ranks started by Slurm, Ray and on two hosts, as far as one machine can be them (minutes)
#   make test-llamafactory   unmodified LlamaFactory with and without us, in an environment of its own (minutes)
#   make setup-mindspore   an environment for `backend: mindspore` in build/mindspore (minutes)
#   make test-mindspore   training steps on MindSpore beside torch, in that environment (minutes)
#   make llamafactory-demo  LlamaFactory's own command on our layouts, losses beside its own (minutes the first time)
#   make peers   runs beside those of TRL on the same tokens, in an environment of its own, recorded in docs/results (minutes)
#   make docs    the pages of docs/ as a site in build/site
#   make bench   every benchmark, one after the other, as JSON (hours on 2 cores; each is a script of its own)

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

bin := .venv/bin
out := runs/quickstart

.PHONY: help setup setup-mindspore train test test-slow test-accelerator test-cluster test-llamafactory test-mindspore check oracles fuzz attack targets chaos resume-changes sweeps peers docs bench clean llamafactory-demo

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@./tools/setup.sh

train: setup
	$(bin)/hyper-parallel train recipes/quickstart.yaml output_dir=$(out) checkpoint.resume=never

check: setup
	$(bin)/ruff format --check src tests integration_tests benchmarks examples tools
	$(bin)/ruff check src tests integration_tests benchmarks examples tools
	$(bin)/mypy
	$(bin)/lint-imports --no-cache
	$(bin)/codespell src tests integration_tests docs recipes benchmarks examples tools README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md
	$(bin)/python tools/size_report.py

test: check
	$(bin)/python tools/test_in_parallel.py

oracles: setup
	$(bin)/python tools/oracles.py $(if $(ONLY),--only $(ONLY)) $(if $(UPDATE),--update --reason "$(REASON)")

test-slow: setup
	$(bin)/python tools/test_in_parallel.py -m slow
	$(bin)/pytest tests/config tests/cli tests/received -q --paste-commands

test-accelerator: setup
	$(bin)/pytest tests/accelerator -m accelerator -q

test-cluster: setup
	$(bin)/python -m pip install --quiet -e '.[ray]'
	$(bin)/pytest tests -m cluster -q --timeout 300

test-llamafactory:
	@./tools/llamafactory_env.sh
	build/llamafactory/bin/python -m pytest integration_tests/llamafactory -q --timeout 600

setup-mindspore:
	@./tools/mindspore_env.sh

test-mindspore: setup-mindspore
	build/mindspore/bin/python -m pytest integration_tests/mindspore -q --timeout 600

llamafactory-demo:
	@./tools/llamafactory_env.sh
	build/llamafactory/bin/python examples/llamafactory/demo.py

fuzz: setup
	FUZZ_CASES=$(or $(N),100) FUZZ_SEED=$(or $(SEED),1) $(bin)/pytest tests/parity/test_fuzz.py -m slow -s -q

attack: setup
	$(bin)/python tools/attack.py --inputs $(or $(N),2000) --seed $(or $(SEED),1)

targets: setup
	$(bin)/python tools/targets.py

chaos: setup
	$(bin)/python tools/chaos.py --faults $(or $(N),20) --seed $(or $(SEED),1)

resume-changes: setup
	$(bin)/python tools/resume_changes.py

sweeps: setup
	@failed=; for name in $$($(bin)/python tools/sweep.py --list); do echo "== $$name"; $(bin)/python tools/sweep.py $$name || failed="$$failed $$name"; done; \
	$(bin)/python tools/sweep.py --page; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

peers:
	@./tools/peers_env.sh
	build/peers/bin/python tools/peers.py; status=$$?; build/peers/bin/python tools/peers.py --page; exit $$status

docs: setup
	$(bin)/python -m pip install --quiet -e '.[docs]'
	$(bin)/mkdocs build --quiet

bench: setup
	@failed=; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(bin)/python $$script --json || failed="$$failed $$script"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

clean:
	rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
