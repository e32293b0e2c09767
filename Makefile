# Every target makes its own virtual environment: nothing but make and Python 3.11-3.13 is needed.
#
#   make train                              trains gpt3-nano in two pipeline stages on this machine
#   make train ARGS="--steps 100"           the same, with fields of the recipe overridden
#   make test | test-all | lint | types     what CI runs; test leaves out tests marked slow
#   make PYTHON=python3.12 VENV=.venv312 test

PYTHON ?= python3
VENV ?= .venv
RECIPE ?= gpt3-nano
ARGS ?=
TEST_JOBS ?= 2

# Bytecode is left to the first import, which compiles only what is used: half a minute less.
PIP_INSTALL = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint format types install install-dev clean

help:
	@sed -n 's/^#   //p' Makefile

train: $(VENV)/.installed
	@$(VENV)/bin/stagewright train $(RECIPE) $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -q -n $(TEST_JOBS) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev
	$(VENV)/bin/pytest -q -n $(TEST_JOBS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

types: $(VENV)/.installed-dev
	$(VENV)/bin/mypy

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

# The check runs on any Python, however old, and says what was found and what is needed.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no '$(PYTHON)' on PATH; Stagewright needs Python 3.11, 3.12 or 3.13." \
	    "Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(0 if (3, 11) <= v < (3, 14) else "make: $(PYTHON) is Python %d.%d (%s); Stagewright " \
	  "needs 3.11, 3.12 or 3.13. Name one: make PYTHON=/path/to/python3.11" % (v + (sys.executable,)))'
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "make: '$(PYTHON) -m venv $(VENV)' failed (on Debian: apt install python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing Stagewright into $(VENV), once (about a minute) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing Stagewright and its test tools into $(VENV), once (about a minute) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find nn pipelining recipes stagewright trainer tests -name __pycache__ -prune -exec rm -rf {} +
