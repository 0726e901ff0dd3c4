# Needs Python 3.11 or newer, a C++ compiler and make; the rest is installed into .venv. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test lint format docs build peers growth clean help
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors only, not a warning for each index folder that lacks a package.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

demo: $(VENV)/built ## generate for several prompts at once, and account for every page
	@$(BIN)/octavo pull smollm2-135m
	@$(BIN)/python examples/demo.py smollm2-135m

test: lint ## everything that a change must pass: lint, types, import contracts, tests
	@PATH="$(abspath $(BIN)):$$PATH" python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/built $(VENV)/dev ## style, types and import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/dev ## format the sources and mend what can be mended
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

docs: $(VENV)/built ## write the help texts into docs/cli.md
	@{ printf '# The command line\n\nWhat `--help` prints; `make docs` writes this page.\n'; \
	  for command in '' 'generate ' 'chat ' 'serve ' 'pull ' 'plan ' 'simulate ' 'advise ' 'bench ' 'bench throughput ' 'bench calibrate ' 'bench compare ' 'bench day ' 'bench quality '; do \
	    printf '\n```console\n$$ octavo %s--help\n' "$$command"; COLUMNS=80 $(BIN)/octavo $$command--help; printf '```\n'; \
	  done; } > docs/cli.md

build: $(VENV)/built ## install the package, editable, with its native kernels

peers: $(VENV)/built .venv-peers/installed ## run Octavo and OpenVINO GenAI in turn on the same workloads; table of ratios
	@$(BIN)/python bench/peers/compare.py --json peers.json

growth: $(VENV)/built ## plot the time of a step against context, running sequences and cached pages: docs/growth.png
	@$(INSTALL) --group bench
	@$(BIN)/python bench/growth.py --plot docs/growth.png --json growth.json

clean: ## remove everything that make made
	rm -rf $(VENV) .venv-peers build dist src/octavo/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'

# ── one stamp a step: a second run starts at once ─────────────────────────────────────────────────────────────────

$(VENV)/python:
	@python=$$(for name in $${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$name"; break; fi; done); \
	if [ -z "$$python" ]; then echo 'Octavo needs Python 3.11 or newer: install it, or name it with make PYTHON=…' >&2; exit 1; fi; \
	if ! command -v "$${CXX:-c++}" >/dev/null; then echo 'Octavo needs a C++20 compiler: install g++ or clang, or name it with CXX=…' >&2; exit 1; fi; \
	echo "Making $(VENV) with $$($$python --version)"; \
	"$$python" -m venv --clear $(VENV) || { echo 'Python lacks its venv module (on Debian: apt install python3-venv)' >&2; exit 1; }
	@$(INSTALL) --upgrade pip
	@touch $@

$(VENV)/base: $(VENV)/python pyproject.toml constraints.txt
	@echo 'Installing what Octavo builds with'
	@$(INSTALL) --group build
	@touch $@

$(VENV)/built: $(VENV)/base CMakeLists.txt $(shell find native -type f 2>/dev/null)
	@echo 'Building Octavo'
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(INSTALL) --no-build-isolation --editable .
	@touch $@

.venv-peers/installed: $(VENV)/base
	@$(BIN)/python -m venv --clear .venv-peers
	@$(BIN)/python -m pip --python .venv-peers/bin/python install -qq --no-input --constraint constraints.txt --group peers
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo 'Installing what the tests need'
	@$(INSTALL) --group dev
	@touch $@
