# `make help` lists the targets. Nothing has to be installed first: `make dev` and all that need it
# make the environment in .venv, and do again only what changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# The build for CPUs where its index can be reached, else what PyPI has. Where there is a driver of
# NVIDIA's: PyPI's, which is for GPUs, unless the Python that .venv is made with has one itself.
DRIVER := $(wildcard /proc/driver/nvidia/version)
TORCH ?= torch==2.13.0
TORCH_INDEX ?= $(if $(DRIVER),https://pypi.org/simple,https://download.pytorch.org/whl/cpu)
FOR_GPUS := -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null
NP ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
CXX_FILES = $(shell find csrc tests/csrc benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu' 2>/dev/null)
BUILD_FILES = setup.py CMakeLists.txt $(wildcard cmake/*) bagua/version.py

# MPI's compiler wrapper prints its folders unquoted.
ifneq ($(words $(CURDIR)),1)
$(error the path of this clone, $(CURDIR), has a space, which MPI's compiler wrapper cannot cope with; move it)
endif

.PHONY: help dev demo test test-csrc test-python test-several-ranks test-rest test-four-ranks test-slow test-arm test-gpu test-nccl-releases sanitize-gpu test-hosts test-pretended test-parallel lint format sanitize bench bench-agreement bench-exchange clean googletest

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

dev: $(STAMP)/extension ## environment in .venv, the package editable in it, the extension built
	@$(BIN)/python setup.py --quiet build_ext --inplace >$(STAMP)/build.log 2>&1 || { cat $(STAMP)/build.log; exit 1; }

demo: dev ## train a small model with 2 ranks (NP=n for another number) by three algorithms
	@$(BIN)/bagua-run -np $(NP) $(BIN)/python examples/digits.py
	$(PIP) -e '.[bench]' --no-build-isolation
	$(BIN)/bagua-run -np $(NP) $(BIN)/python examples/compare.py

test: test-csrc test-python ## the tests: C++ over threads, Python over MPI processes

test-csrc: dev googletest
	@$(call build,build/csrc,$(BUILT))
	$(call ctest,build/csrc,3)  # of which some only wait

ifdef PYTEST_ARGS
test-python: dev
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
# Two halves at once, since ranks that wait for each other leave a core half idle: the frontend on several
# ranks, and the rest, which prints when it has ended.
test-python: dev
	@$(MAKE) --no-print-directory -j2 -k test-several-ranks test-rest && exit
	grep -HE '^(FAILED|ERROR) ' $(REST_LOG) || true  # which the other half's lines may have hidden
	exit 1
endif

EVERYDAY := -m pytest -m 'not slow'
SEVERAL_RANKS := np2 or np3
REST_LOG := build/test-rest.log
test-several-ranks:
	@$(BIN)/python $(EVERYDAY) tests/torch -k '$(SEVERAL_RANKS)'
test-rest:
	@mkdir -p build
	status=0
	{
	  $(BIN)/python $(EVERYDAY) -p no:cacheprovider --ignore=tests/parallel --ignore=tests/torch || status=1
	  $(BIN)/python $(EVERYDAY) -p no:cacheprovider tests/torch -k 'not ($(SEVERAL_RANKS) or np4)' || status=1
	} >$(REST_LOG) 2>&1
	cat $(REST_LOG)
	exit $$status

test-four-ranks: dev ## those of the frontend on 4 ranks, which take two cores long; all of them are on 3 ranks, too
	@$(BIN)/python $(EVERYDAY) tests/torch -k np4

test-slow: dev ## the tests that take long: they wait for time limits, start many processes or run what docs show
	@$(BIN)/python -m pytest --ignore=tests/parallel -m slow

# What is emulated is the processor: threads and memory are this machine's. Not the other layers' tests,
# of which two need MADV_REMOVE; QEMU accepts that and does nothing.
test-arm: $(STAMP)/tools googletest ## C++ tests of kernels, codecs and collectives, built for 64-bit Arm and run by QEMU
	@type aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null 2>&1 || {
	  echo "a compiler for Arm or its emulator is missing; on Debian: sudo apt-get install g++-aarch64-linux-gnu qemu-user"
	  exit 1
	}
	suites=$$(sed -nE 's/^TEST(_[FP])?\((\w+),.*/\2/p' tests/csrc/{kernel,codec,collective}/test_*.cc | sort -u | paste -sd '|')
	$(call build,build/arm,$(ARM))
	$(call ctest,build/arm,2,-R "(^|/)($$suites)\.")

# All but what rests on gradients being exchanged where they are, which those on a device are not, and on
# memory being given back before it is used again, which a device's is not.
test-pretended: dev ## tests of the frontend whose tensors are taken for those of a device
	@PRETEND_GPU=1 $(BIN)/python -m pytest tests/torch tests/gpu/test_every_operation.py tests/gpu/test_peers.py -m 'not slow' -k 'np2 and not late_contribution_elsewhere and not nobody_waits_for'

# All but what rests on a single machine: what is exact there, and large gradients, which are not
# exchanged where they are if ranks must show them to each other.
test-hosts: dev ## tests of the frontend whose ranks are on two hosts, which are network namespaces; needs root
	@$(BIN)/python -c 'import sys; from benchmarks.hosts import missing; sys.exit(missing() or 0)'
	$(BIN)/python -m pytest tests/torch --hosts 2 -k '(np2+1 or np2+2) and not one_machine and not late_contribution_elsewhere'

test-gpu: dev ## tests on a GPU, by one rank and by two that share it, without NCCL and with it, or that have one each; skipped where there is none
	@[ -z "$(DRIVER)" ] || $(BIN)/python $(FOR_GPUS) || {
	  echo "there is a GPU, but the torch in $(VENV) is one for CPUs: remove it with"
	  echo "  $(BIN)/python -m pip uninstall torch && rm $(STAMP)/tools"
	  echo "and make again, with TORCH_INDEX=... if this driver needs another build than PyPI's"
	  exit 1
	}
	BAGUA_NCCL=0 $(BIN)/python -m pytest tests/gpu
	[ -z "$(DRIVER)" ] || PYTHONPATH=tests $(BIN)/python -m gpu.sharing
	NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 $(BIN)/python -m pytest tests/gpu
	[ "$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ] || OWN_GPU=1 $(BIN)/python -m pytest tests/gpu
	[ -z "$(DRIVER)" ] || [ -z "$(SANITIZER)" ] || $(MAKE) sanitize-gpu

NCCL ?= 2.18.1 2.18.3 2.19.3 2.21.5 2.26.2 2.28.9 2.30.7 2.32.3
test-nccl-releases: dev ## what is taken for NCCL's interface, against releases of it (NCCL=...), of which each is a download of 200 MB
	@$(BIN)/python tests/csrc/device/nccl_releases.py $(NCCL)

# Of the toolkit, which may not be on PATH. Races are looked for where threads share memory.
SANITIZER ?= $(firstword $(shell command -v compute-sanitizer) $(wildcard $(CUDA_HOME)/bin/compute-sanitizer /usr/local/cuda/bin/compute-sanitizer))

sanitize-gpu: dev ## the tests of kernels under compute-sanitizer, on a GPU
	@[ -n "$(SANITIZER)" ] || { echo "compute-sanitizer is missing: it comes with the CUDA toolkit; SANITIZER= says where it is"; exit 1; }
	for tool in memcheck synccheck racecheck; do
	  $(SANITIZER) --tool $$tool --error-exitcode 99 $(BIN)/python -m pytest tests/gpu/test_codings.py -k 'adds_up or misplaced or scaled or halves or (encodes and 513 and not fresh)'
	done

test-parallel: dev ## tests of what runs tests over MPI processes
	@$(BIN)/python -m pytest tests/parallel

lint: $(STAMP)/extension ## ruff, mypy and clang-format, changing nothing
	@status=0
	$(BIN)/ruff check . || status=1
	$(BIN)/ruff format --check . || status=1
	$(BIN)/mypy || status=1
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES) || status=1
	exit $$status

format: $(STAMP)/extension ## let ruff and clang-format rewrite the sources
	@$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# A leak at exit counts; ThreadSanitizer needs an address space that is not shuffled too far. Numbers of
# ranks between others, and element types as wide as another, take a collective no other way; which loop
# a kernel is, ThreadSanitizer does not see.
BETWEEN_OTHERS := ^Collectives/.*/([256]_.*|.*_(bfloat16|int32|int64))$$
NOT_FOR_TSAN := $(BETWEEN_OTHERS)|_(bfloat16|float64|int32|int64)$$

sanitize: $(STAMP)/tools googletest ## the C++ tests under AddressSanitizer+UBSan and ThreadSanitizer
	@$(call build,build/asan,-DBAGUA_SANITIZE=address$(comma)undefined)
	$(call build,build/tsan,-DBAGUA_SANITIZE=thread)
	status=0
	$(call ctest,build/asan,2,-E '$(BETWEEN_OTHERS)') || status=1
	unshuffled="setarch $$(uname -m) -R"
	$$unshuffled true 2>/dev/null || unshuffled=
	export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
	$(call ctest,build/tsan,2,-E '$(NOT_FOR_TSAN)',$$unshuffled) || status=1
	exit $$status

bench: dev ## measure against the peers that are importable, and draw time against size
	@$(PIP) -e '.[bench]' --no-build-isolation
	$(BIN)/python -m benchmarks

bench-agreement: dev googletest ## measure how long rank 0 takes to agree with up to a thousand ranks
	@$(call build,build/csrc,$(BUILT),bench_agreement)
	build/csrc/bench_agreement

bench-exchange: dev googletest ## measure what the engine itself takes for an exchange on a GPU, also where there is none
	@$(call build,build/csrc,$(BUILT),bench_exchange)
	build/csrc/bench_exchange

clean: ## remove what was built, but not the environment
	rm -rf build dist *.egg-info bagua/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bagua tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f $(STAMP)/extension

ARM := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR='qemu-aarch64;-L;/usr/aarch64-linux-gnu'

# With the engine that Python loads, which is compiled once. UNITY=ON compiles several sources at a time:
# sooner in all, later for who changes one.
UNITY ?= OFF
BUILT := -DBAGUA_BUILT=$(abspath build/extension) -DCMAKE_UNITY_BUILD=$(UNITY)

# Configures and builds the C++ tests: (directory, more for cmake, another target).
comma := ,
define build
export PATH="$(abspath $(BIN)):$$PATH"
cmake -S . -B $(1) -GNinja -DBAGUA_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo $(2) >/dev/null
cmake --build $(1) $(if $(3),--target $(3))
endef

# Runs them: (directory, so many at a time, more for ctest, prefix).
define ctest
export PATH="$(abspath $(BIN)):$$PATH"
$(4) ctest --test-dir $(1) --output-on-failure --no-tests=error --parallel $(2) $(3)
endef

$(STAMP)/venv:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 9), "Python 3.9 or newer is needed"'
	missing() { # each line: a Debian package that this machine lacks
	  type c++ >/dev/null 2>&1 || echo g++
	  $(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
	  $(PYTHON) -c 'import ensurepip' 2>/dev/null || echo python3-venv
	}
	packages=$$(missing | xargs)
	if [ -n "$$packages" ]; then
	  if [ "$$(id -u)" = 0 ] && type apt-get >/dev/null 2>&1; then
	    export DEBIAN_FRONTEND=noninteractive
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends $$packages
	  fi
	  packages=$$(missing | xargs)
	  [ -z "$$packages" ] || { echo "This machine lacks: $$packages; try: sudo apt-get install $$packages"; exit 1; }
	fi
	[ -z "$(DRIVER)" ] || ! $(PYTHON) $(FOR_GPUS) || sees_own=--system-site-packages
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $${sees_own:-} $(VENV)
	mkdir -p $(STAMP) && touch $@

# The build requirements are read from pyproject.toml: the editable build does without isolation,
# so that its tools stay and a later build compiles only what changed.
$(STAMP)/tools: pyproject.toml cmake/cuda_toolkit.py $(STAMP)/venv
	@echo "installing the tools and torch into $(VENV)"
	$(PIP) --upgrade 'pip>=23'
	$(BIN)/python - <<-'END' >$(STAMP)/requirements.txt
	import ast, re
	text = open("pyproject.toml").read()
	print(*ast.literal_eval(re.search(r"^requires = (\[.*?\])", text, re.M | re.S)[1]), sep="\n")
	END
	$(BIN)/python cmake/cuda_toolkit.py >>$(STAMP)/requirements.txt
	$(PIP) -r $(STAMP)/requirements.txt
	$(BIN)/python -m pip show -q torch 2>/dev/null || $(PIP) $(if $(DRIVER),,--no-deps --retries 0) --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')
	[ -n "$(DRIVER)" ] || [[ $$version == *+cpu ]] || echo "torch $$version is the one for GPUs, and large: that for CPUs was not to be had"
	touch $@

$(STAMP)/extension: $(STAMP)/tools $(BUILD_FILES)
	@echo "compiling and installing bagua into $(VENV), editable: some minutes the first time"
	$(PIP) --no-build-isolation -e '.[torch,test,dev]'
	touch $@

# Debian's package holds GoogleTest's sources; it is unpacked into build/, not installed.
googletest:
	@if [ -e /usr/include/gtest/gtest.h ] || [ -e build/googletest/usr ] || [ -n "$${GTest_ROOT:-}" ]; then exit 0; fi
	mkdir -p build/googletest && cd build/googletest
	fetch() { apt-get download -qq googletest 2>apt.log; }
	fetch || { [ "$$(id -u)" = 0 ] && apt-get update -qq && fetch; } || {
	  cat apt.log
	  echo "GoogleTest could not be fetched: apt-get install libgtest-dev, or set GTest_ROOT to where it lies"
	  exit 1
	}
	dpkg -x googletest_*.deb .
