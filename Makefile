# Everything runs in one environment, .venv, which is made when it is missing and brought up to date when
# pyproject.toml or the locks change; `make demo` installs what running imports, the others also tests and checks. PYTHON
# chooses the interpreter it is made with, BACKEND (cpu, cuda12, cuda13) which MLX it gets on Linux; without it the machine
# decides (tools/mlx_backend.sh).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MLX := $(shell BACKEND=$(BACKEND) sh tools/mlx_backend.sh)
LOCKS := $(shell BACKEND=$(MLX) sh tools/mlx_backend.sh locks)
BACKEND_LOCK := $(filter-out requirements.lock,$(LOCKS))
KEY := $(MLX)-$(shell cat pyproject.toml requirements.lock requirements-build.lock $(BACKEND_LOCK) | cksum | cut -d' ' -f1)
# Wheels have it in their names, as the build tag.
NATIVE_KEY := $(shell cat $$(find native -type f ! -path '*/build/*' ! -path '*/__pycache__/*' | LC_ALL=C sort) | \
	cksum | cut -d' ' -f1)
BUILD := $(VENV)/.build-$(KEY)
RUN := $(VENV)/.run-$(KEY)
NATIVE := $(VENV)/.native-$(KEY)-$(NATIVE_KEY)
TOOLS := $(VENV)/.tools-$(KEY)-$(shell cksum < requirements-dev.lock | cut -d' ' -f1)
READY := $(NATIVE) $(TOOLS)
DIST := dist
# Another backend's libraries lie in the same directory, and go first; so does what was built for processors.
BACKENDS := mlx mlx-cpu mlx-cuda-12 mlx-cuda-13 phalanx-cpu
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -q install

.DEFAULT_GOAL := help
.PHONY: help venv demo wheels native-key check lint test test-rest test-full test-in-lanes rest-in-lanes \
	units-waiting units-computing test-mlx test-native test-e2e test-gateway test-ranks rest-native rest-e2e rest-ranks \
	test-hosts rig seconds clients check-native soak golden docs format bench bench-cpu bench-gateway clean

help:
	@echo 'make demo    ask a small model three things and kill a rank meanwhile (KEEP=1 leaves the server running)'
	@echo 'make wheels  what pip, pipx and uv install, into dist/, for each Python here (PYTHONS names others)'
	@echo 'make check   style, types, architecture, unit tests'
	@echo 'make test    the checks and tests that find nearly every fault; says what it leaves out'
	@echo 'make test-full  that, and all others but the long ones; make test-rest is those others alone'
	@echo 'make rig     as root on Debian and Ubuntu, install what tests of several hosts and of the page need'
	@echo 'make seconds  put what test files took, in the make test and test-rest that ran last, into tests/seconds.txt'
	@echo 'make clients  what other people'\''s clients make of the server; the first run installs them'
	@echo 'make check-native  the native kernels under sanitizers'
	@echo 'make soak    the long tests: whole grids of which the others run a part (hours)'
	@echo 'make golden  mlx-lm'\''s answers for this kind of processor, into tests/golden'
	@echo 'make docs    write the pages and pictures that are made from the code: docs/reference, docs/errors.md'
	@echo 'make format  rewrite the sources in the project'\''s style'
	@echo 'make bench   phalanx against mlx_lm.server, side by side'
	@echo 'make bench-cpu  the native kernels against llama.cpp (builds llama-cpp-python)'
	@echo 'make bench-gateway  the gateway beside other routers (those of make clients), and docs/reports/gateway.md'
	@echo 'make clean   remove caches and build output (not .venv)'

venv:
	@$(MAKE) --no-print-directory -j2 $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'phalanx needs Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1 || echo missing)." \
		'Install one and run: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo 'Could not make .venv. On Debian and Ubuntu: apt install python3-venv' >&2; rm -rf $(VENV); exit 1; }

LOCKED := --require-hashes --only-binary :all:
OWN := --no-deps --no-build-isolation

# What builds kernels, and the MLX that they are for: the kernels are compiled while the rest is installed.
$(BUILD): $(BIN)/python
	@test -n '$(MLX)'
	@ls $(VENV)/.build-$(MLX)-* >/dev/null 2>&1 || $(BIN)/python -m pip --disable-pip-version-check -qq uninstall -y $(BACKENDS)
	@$(INSTALL) $(LOCKED) --no-deps -r requirements-build.lock $(BACKEND_LOCK:%=-r %)
	@rm -f $(VENV)/.build-*
	@touch $@

$(RUN): $(BUILD)
	@echo 'Installing what phalanx imports, with MLX for $(MLX), into $(VENV) ...'
	@$(INSTALL) $(LOCKED) --no-deps -r requirements.lock
	@$(INSTALL) $(OWN) -e .
	@rm -f $(VENV)/.run-*
	@touch $@

# Here pip looks at the dependencies of all packages.
$(TOOLS): $(RUN)
	@echo 'Installing the tools of tests and checks ...'
	@$(INSTALL) $(LOCKED) -r requirements-dev.lock -r requirements-build.lock $(LOCKS:%=-r %)
	@rm -f $(VENV)/.tools-*
	@touch $@

HAS_KERNELS = [ $(MLX) = cpu ] && command -v $${CXX:-c++} >/dev/null
BUILT = ls $(DIST)/phalanx_cpu-*-$(NATIVE_KEY)-$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-* 2>/dev/null
# The native kernels are for processors under Linux; without a C++ compiler phalanx runs on MLX's own, much slower.
$(NATIVE): $(BUILD)
	@if [ $(MLX) = cpu ] && wheel=$$($(BUILT)); then \
		echo "Taking the native CPU kernels from $$wheel ..."; $(INSTALL) --no-deps --no-index --force-reinstall $$wheel; \
	elif $(HAS_KERNELS); then \
		echo 'Compiling the native CPU kernels ...'; PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) $(OWN) ./native; \
	elif [ $(MLX) = cpu ]; then \
		echo 'No C++ compiler: models will compute with the slow CPU kernels of MLX. On Debian and Ubuntu: apt install g++'; \
	fi
	@rm -f $(VENV)/.native-*
	@touch $@

demo:
	@[ -e $(RUN) ] && [ -e $(NATIVE) ] || \
		echo 'The first time, this downloads 95 MB and a model of 93 MB, and compiles the native kernels:' \
			'some two minutes on two cores.'
	@$(MAKE) --no-print-directory -j2 $(RUN) $(NATIVE)
	@$(BIN)/phalanx demo $(if $(KEEP),--keep)

# PYTHONS names other interpreters than those on PATH.
wheels:
	@SKBUILD_WHEEL_BUILD_TAG=$(NATIVE_KEY) $(PYTHON) tools/wheels.py $(DIST) $(PYTHONS)

native-key:
	@echo $(NATIVE_KEY)

check:
	@$(MAKE) --no-print-directory -j3 lint units-waiting units-computing

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# The suite runs in parts, of `make test` those not marked `full`. Parts that compute run in lanes, one for each core;
# parts that mostly wait, for connections and silences, run beside them. Ranks spin while they wait for each other, and
# take twice as long where they outnumber cores: their part comes last, beside the waiting ones only.
LANES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
IN_LANES := xargs -n 1 -P $(LANES)
PYTEST := $(BIN)/pytest -q -p no:cacheprovider
IN_TEST := FETCH=0 $(PYTEST) -m 'not full and not soak'
IN_REST := $(PYTEST) -m 'full and not soak'
SPENT := $(CURDIR)/$(VENV)/seconds
FAILED = $(BIN)/python tests/support/seconds.py failed $(SPENT).$@

test: $(READY)
	@rm -f $(SPENT).test
	@TEST_SECONDS=$(SPENT).test $(MAKE) --no-print-directory -j3 units-waiting test-gateway test-in-lanes || $(FAILED)
	@$(BIN)/python tests/support/seconds.py report $(SPENT).test
	@echo 'Left out: instruction sets of kernels but the best, most groups of ranks, clusters of hosts, most of the real'
	@echo 'model. These run them: make test-rest; both: make test-full.'

test-rest: $(READY)
	@rm -f $(SPENT).test-rest
	@TEST_SECONDS=$(SPENT).test-rest $(MAKE) --no-print-directory -j2 test-hosts rest-in-lanes || $(FAILED)
	@$(BIN)/python tests/support/seconds.py report $(SPENT).test-rest
	@sh tools/rig_packages.sh report $(HOSTS_XML)

test-full:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

test-in-lanes: $(READY)
	@echo test-mlx units-computing test-e2e test-native lint | $(IN_LANES) $(MAKE) --no-print-directory
	@$(MAKE) --no-print-directory test-ranks

rest-in-lanes: $(READY)
	@echo rest-e2e rest-native | $(IN_LANES) $(MAKE) --no-print-directory
	@$(MAKE) --no-print-directory rest-ranks

WAITING := tests/unit/channel tests/unit/server tests/unit/supervision
units-waiting: $(READY)
	$(IN_TEST) $(WAITING)

units-computing: $(READY)
	$(IN_TEST) tests/test_architecture.py tests/test_documents.py tests/unit $(WAITING:%=--ignore=%)

test-mlx: $(READY)
	$(IN_TEST) tests/mlx

# There are no native kernels where MLX computes on a GPU, or where there was no compiler.
test-native: $(READY)
	! { $(HAS_KERNELS); } || $(IN_TEST) tests/native

# Most of their replicas are stubs.
GATEWAY := $(wildcard tests/e2e/test_gateway*.py)
test-gateway: $(READY)
	$(IN_TEST) $(GATEWAY)

test-e2e: $(READY)
	$(IN_TEST) tests/e2e --ignore=tests/e2e/hosts $(GATEWAY:%=--ignore=%)

test-ranks: $(READY)
	$(IN_TEST) tests/ranks

# $(call each_isa,COMMAND): COMMAND with the kernels for each instruction set that runs here; $(call lesser_isas,COMMAND):
# for all but the best one, which is the first.
each_isa = $(call isas,,$(1))
lesser_isas = $(call isas,shift;,$(1))
isas = { $(HAS_KERNELS); } || exit 0; isas=$$($(BIN)/python -c 'from phalanx_cpu import ops; print(ops.isas())') || exit 1; \
	set -- $$isas; $(1) for isa; do echo "kernels: $$isa"; KERN_ISA=$$isa $(2) || exit 1; done

rest-native: $(READY)
	$(call lesser_isas,$(PYTEST) tests/native)

rest-e2e: $(READY)
	$(IN_REST) tests/e2e --ignore=tests/e2e/hosts

rest-ranks: $(READY)
	$(IN_REST) tests/ranks

HOSTS_XML := $(VENV)/hosts.xml
test-hosts: $(READY)
	@rm -f $(HOSTS_XML)
	$(IN_REST) --junitxml=$(HOSTS_XML) tests/e2e/hosts

rig:
	@sh tools/rig_packages.sh install
	@sh tools/browser.sh install

seconds:
	@$(BIN)/python tests/support/seconds.py write $(wildcard $(SPENT).*)

# Each client gets an environment of its own under .venv/clients; CLIENTS names another folder.
clients: $(READY)
	$(BIN)/pytest -q tests/clients

# The kernels under sanitizers: memory and undefined behaviour, then threads, where MLX must not be, which is built
# without. Needs cmake.
NATIVE_TESTS := $(filter-out %test_install.py,$(wildcard tests/native/test_*.py))
CHECK_MEMORY = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	KERN_LIBRARY=$(CURDIR)/native/build/asan/libkern.so $(BIN)/pytest -q -p no:cacheprovider $(NATIVE_TESTS)
CHECK_THREADS = LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1 \
	OPENBLAS_NUM_THREADS=1 \
	KERN_LIBRARY=$(CURDIR)/native/build/tsan/libkern.so $(BIN)/pytest -q -p no:cacheprovider \
	$(filter-out %_ops.py %/test_graph_cache.py %/test_packed.py,$(NATIVE_TESTS))
check-native: $(READY)
	cmake -S native -B native/build/asan -DKERN_EXTENSION=OFF -DKERN_SANITIZE=address,undefined
	cmake --build native/build/asan --parallel
	$(call each_isa,$(CHECK_MEMORY))
	cmake -S native -B native/build/tsan -DKERN_EXTENSION=OFF -DKERN_SANITIZE=thread
	cmake --build native/build/tsan --parallel
	$(call each_isa,$(CHECK_THREADS))

soak: $(READY)
	SOAK=1 $(BIN)/pytest -q tests --ignore=tests/native -m 'soak or grows'
	$(call each_isa,SOAK=1 $(BIN)/pytest -q tests/native)

golden: $(READY)
	cd tests && ../$(BIN)/python -m support.golden

docs: $(READY)
	$(BIN)/python -m tools.reference

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/checked_sums.py
	$(BIN)/python benchmarks/speculation.py

bench-cpu: $(READY)
	@CMAKE_ARGS=-DGGML_NATIVE=ON $(INSTALL) -e '.[bench-cpu]'
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/cpu.py

# Routers that make clients has not installed are left out.
bench-gateway: $(READY)
	@$(INSTALL) -e '.[bench-gateway]'
	$(BIN)/python benchmarks/gateway_report.py --routers $(or $(CLIENTS),$(VENV)/clients)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
