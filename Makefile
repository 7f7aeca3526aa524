# Every task of the project. `make` alone lists them.
# Options: PYTHON=python3.12 (which Python to build .venv from), ARGS="…" (passed on), WORKERS=2 (tests at a time),
# SECONDS=60 (fuzz).

PYTHON  ?= python3
ARGS    ?=
SECONDS ?= 60
WORKERS ?= 2

BIN    := .venv/bin
HOUSE  := .venv/.ready
NODE   := tests/interop/node_modules/.ready
CHROME := .venv/.browser

# A .venv whose Python no longer runs (it was upgraded or taken away) is set up again.
BROKEN := $(shell $(BIN)/python -c '' 2>/dev/null || echo broken)

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow check bench fuzz clean broken

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(HOUSE) $(NODE) $(CHROME) ## everything that the project needs, in .venv and node_modules

$(HOUSE): pyproject.toml Makefile tools/setup.py $(BROKEN)
	@$(PYTHON) tools/setup.py python
	@touch $@

$(NODE): tests/interop/package-lock.json tests/interop/swarm/package-lock.json Makefile tools/setup.py
	@$(PYTHON) tools/setup.py node
	@touch $@

$(CHROME): Makefile tools/setup.py | $(HOUSE)
	@$(PYTHON) tools/setup.py browser
	@touch $@

demo: $(HOUSE) ## a whole swarm on this machine (ARGS="…")
	@$(BIN)/echo-node demo $(ARGS)

test: setup ## the tests (ARGS="-k name", WORKERS=2)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

slow: setup ## the long forms of the tests
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: setup ## the gate: format, lint, types, arrows, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

bench: $(HOUSE) ## every benchmark, one after the other
	@set -e; for file in $$(grep -l '__main__' benchmarks/*.py); do \
	  echo "== $$file"; $(BIN)/python -m "benchmarks.$$(basename "$$file" .py)"; done

fuzz: $(HOUSE) ## hostile bytes for every decoder (SECONDS=60)
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

clean: ## take away everything that is built, .venv too
	@rm -rf .venv tests/interop/node_modules tests/interop/swarm/node_modules build dist *.egg-info \
	  .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
