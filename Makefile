# Everything runs in one environment, .venv, which is made when it is missing and brought up to date when
# pyproject.toml or constraints.txt change. PYTHON chooses the interpreter it is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
READY := $(VENV)/.installed-$(KEY)
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -q install

.DEFAULT_GOAL := help
.PHONY: help venv demo test check soak format bench clean

help:
	@echo 'make demo    start the server with the bundled model and stream one answer (KEEP=1 leaves it running)'
	@echo 'make test    all checks and tests'
	@echo 'make check   style, types, architecture, unit tests'
	@echo 'make soak    the long tests: whole grids of which make test runs a part'
	@echo 'make format  rewrite the sources in the project'\''s style'
	@echo 'make bench   phalanx against mlx_lm.server, side by side'
	@echo 'make clean   remove caches and build output (not .venv)'

venv: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'phalanx needs Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1 || echo missing)." \
		'Install one and run: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo 'Could not make .venv. On Debian and Ubuntu: apt install python3-venv' >&2; rm -rf $(VENV); exit 1; }

$(READY): $(BIN)/python
	@echo 'Installing phalanx and its tools into $(VENV) ...'
	@$(INSTALL) -c constraints.txt -e '.[engine,mpi,dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(READY)
	@$(BIN)/phalanx demo $(if $(KEEP),--keep)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py tests/unit

test: check
	$(BIN)/pytest -q tests --ignore=tests/unit --ignore=tests/test_architecture.py

soak: $(READY)
	$(BIN)/pytest -q tests -m soak

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/ranks.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
