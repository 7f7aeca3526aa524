# Every task of the project. `make` alone lists them.
# Options: PYTHON=python3.12 (which Python to build .venv from), ARGS="…" (passed on), WORKERS=3 (tests at a time),
# SECONDS=60 (fuzz), AUDIT=--allow-unreachable (check, where OSV or npm cannot be asked).

PYTHON  ?= python3
ARGS    ?=
AUDIT   ?=
SECONDS ?= 60
WORKERS ?= 3
SEEDS   ?= 1 2 3

BIN    := .venv/bin
HOUSE  := .venv/.ready
NODE   := tests/interop/node_modules/.ready
CHROME := .venv/.browser
SPACES := .venv/.namespaces
FUZZER := .venv/.fuzz

# A .venv whose Python no longer runs (it was upgraded or taken away) is set up again.
BROKEN := $(shell $(BIN)/python -c '' 2>/dev/null || echo broken)

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow check bench fuzz mutate chaos soak clean broken

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(HOUSE) $(NODE) $(CHROME) $(SPACES) ## everything that the project needs, in .venv and node_modules

$(HOUSE): pyproject.toml requirements.lock Makefile tools/setup.py $(BROKEN)
	@$(PYTHON) tools/setup.py python
	@touch $@

$(NODE): tests/interop/package-lock.json tests/interop/swarm/package-lock.json Makefile tools/setup.py
	@$(PYTHON) tools/setup.py node
	@touch $@

$(CHROME): Makefile tools/setup.py | $(HOUSE)
	@$(PYTHON) tools/setup.py browser
	@touch $@

$(SPACES): Makefile tools/setup.py | $(HOUSE)
	@$(PYTHON) tools/setup.py namespaces
	@touch $@

$(FUZZER): Makefile tools/setup.py | $(HOUSE)
	@$(PYTHON) tools/setup.py fuzz
	@touch $@

demo: $(HOUSE) ## a whole swarm on this machine (ARGS="…")
	@$(BIN)/echo-node demo $(ARGS)

test: setup ## the tests (ARGS="-k name", WORKERS=3)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

slow: setup ## the long forms of the tests
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: setup ## the gate: format, lint, types, arrows, known vulnerabilities, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/audit.py $(AUDIT)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(HOUSE) ## every benchmark, and benchmarks/README.md (ARGS="wire delta")
	@$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(HOUSE) $(FUZZER) ## hostile bytes for every handler, led by coverage (SECONDS=60, ARGS="TARGET")
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

mutate: $(HOUSE) ## whether the tests notice changed operators (ARGS="--seed 2 echo_node/net/gossip/mesh.py")
	@$(BIN)/python tools/mutate.py $(ARGS)

chaos: $(HOUSE) $(SPACES) ## a swarm under fire, about a quarter of an hour (SEEDS="1 2 3", ARGS="--seconds 60")
	@failed=0; for seed in $(SEEDS); do $(BIN)/python -m tests.chaos --seed $$seed $(ARGS) || failed=1; done; exit $$failed

soak: $(HOUSE) $(SPACES) ## a swarm under fire until Ctrl-C, with slopes at the end (ARGS="--seed 7 --minutes 60")
	@$(BIN)/python -m tests.chaos --soak $(ARGS)

clean: ## take away everything that is built, .venv too
	@rm -rf .venv tests/interop/node_modules tests/interop/swarm/node_modules build dist *.egg-info \
	  .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
