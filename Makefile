# Everything works from a clean clone: the first target that needs it makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench venv clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or set PYTHON=..." >&2; exit 1; }
	@echo 'making $(VENV): torch, keepstep, development tools (about a minute)'
	@$(PYTHON) -m venv $(VENV) || { echo "make: could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -q --disable-pip-version-check '$(TORCH)' numpy
	@$(BIN)/python -m pip install -q --disable-pip-version-check --group dev --group integrations -e '.[all]' '$(TORCH)'
	@touch $@

venv: $(VENV)/.installed ## make .venv with keepstep, torch and the development tools

demo: $(VENV)/.installed ## train, break it four ways, prove nothing was lost (about a minute)
	@$(BIN)/keepstep demo -o table

test: $(VENV)/.installed ## the test suite (under 10 minutes on two cores)
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(VENV)/.installed ## tests that take long or need system packages (under 30 minutes)
	$(BIN)/python -m pytest -m slow --timeout 600

lint: $(VENV)/.installed ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed ## run every benchmark, each beside its peer or control
	@ls bench/*.py
	@for b in bench/*.py; do case $$b in */_*) continue;; esac; echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
