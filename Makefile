# Esper: `make demo` to see a network grow, `make test` before every change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# One thread per process: the networks are small, and results do not depend on the machine's cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Some CPUs advertise AMX but trap on its first instruction; oneDNN stops below it.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-portable test-slow test-browser test-integrations test-minimum audit docs pages \
	fmt bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | \
		awk -F ':.*## ' '{ printf "  make %-17s %s\n", $$1, $$2 }'

setup: $(STAMP) ## create .venv with everything for development

# setuptools is installed first and the package built without isolation, so that a repeated
# installation finds everything in place and needs no network.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
		command -v $(PYTHON) >/dev/null 2>&1 || { \
			echo "error: $(PYTHON) was not found; name a Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; \
			exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo "error: Esper needs Python 3.11 or newer, but $(PYTHON) is older; name another: make PYTHON=python3.12 ..." >&2; \
			exit 1; }; \
		echo "creating $(VENV)"; \
		$(PYTHON) -m venv $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## two minutes: a small GPT that grows, against static ones at equal compute
	$(BIN)/esper demo

check: setup ## lint, format, types, import contracts, the shape of the tree and its size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_tree.py
	$(BIN)/python tools/tree_totals.py

# Tests start a hundred Pythons: compiled code is kept, also where the environment forbids it.
test test-portable test-slow: export PYTHONDONTWRITEBYTECODE =

# A file's tests run in one process, so that what they share is made once.
test: check ## all that a change needs: the checks above, then the CPU test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not integrations"

# Each setting limits PyTorch, oneDNN and MKL by itself.
test-portable: setup ## all tests that train, under every instruction set here, one and two threads
	$(BIN)/python -m tools.portable

test-slow: setup ## full counts and long soaks, then the harness: hostile inputs, kills, full disks
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m tests.harness

test-browser: setup ## the live page and the site in a real browser: chromium, Debian's where it can be had
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[browser]'
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
		{ [ "$$(id -u)" = 0 ] && apt-get install -y -qq --no-install-recommends chromium; } || \
		$(BIN)/python -m playwright install chromium
	$(BIN)/python -m pytest tests/browser

test-integrations: setup ## Lightning, Hugging Face, 46 architectures, environments, Ray; installs them
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev,integrations]'
	$(BIN)/python -m pytest -n 2 -m integrations

# PyTorch is the installed one (an older one by TORCH=2.11.0): it is large, and nothing else decides.
test-minimum: setup ## what the declared minimums of our dependencies break, in .venv-minimum
	$(PYTHON) -m venv --clear .venv-minimum
	$(BIN)/python -m tools.minimum_pins $(TORCH) > .venv-minimum/constraints.txt
	.venv-minimum/bin/python -m pip install --quiet -c constraints.txt \
		setuptools pytest pytest-timeout pytest-xdist hypothesis
	.venv-minimum/bin/python -m pip install --quiet --no-build-isolation -c .venv-minimum/constraints.txt -e .
	.venv-minimum/bin/python -m pytest -n 2 -m "not slow and not gpu" \
		tests/leyline tests/nissa tests/lab/tasks tests/scripts/cli

audit: setup ## known faults of what is installed, and pins that were withdrawn (needs the network)
	$(PYTHON) -m venv --clear .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python -m tools.check_pins
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

docs: setup ## the documentation site in build/site; a warning is an error
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[docs]'
	$(BIN)/python -m tools.site

pages: setup ## the reference pages that are made from the code, as Markdown in build/pages
	$(BIN)/python -m tools.pages

fmt: setup ## put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run the benchmarks
	$(BIN)/python -m benchmarks

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) .venv-minimum .venv-audit build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
