# `make demo` and `make test` are all a fresh machine needs: each sets everything up in .venv first.
# Needs: Rust (rustup.rs), Python 3.10 to 3.13 with venv, a C++ compiler, make.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# torch-sys asks the first `python3` on PATH where libtorch is.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/installed: requirements-dev.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"normformer_rs needs Python 3.10 to 3.13, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/installed Cargo.toml Cargo.lock pyproject.toml build.rs _build.py $(shell find src -type f)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/fairseq: $(VENV)/installed requirements-fairseq.txt
	$(BIN)/pip install --quiet "pip<24.1"
	$(BIN)/pip install --quiet --no-deps --requirement requirements-fairseq.txt
	touch $@

.PHONY: fairseq
fairseq: $(VENV)/fairseq ## fairseq 0.12.2, for the plug-in and its tests

.PHONY: build
build: $(VENV)/built ## the virtual environment with the package in it

.PHONY: demo
demo: build ## train a Transformer to translate number words, and show what it learned
	$(BIN)/normformer-rs demo --output runs/demo

.PHONY: format
format: $(VENV)/installed ## format Rust and Python
	cargo fmt
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

.PHONY: lint
lint: build ## formatting, clippy, ruff, stubs
	cargo fmt --check
	cargo clippy --quiet --release --all-targets -- --deny warnings
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m normformer_rs._stubs --check
	$(BIN)/mypy --config-file pyproject.toml

.PHONY: test-rust
test-rust: $(VENV)/installed ## Rust tests
	cargo test --quiet --release

.PHONY: test-python
test-python: build $(VENV)/fairseq ## Python tests, README's and docstrings' examples
	$(BIN)/python -m pytest --quiet
	NORMFORMER_RS_TEST_DEVICE=emulated $(BIN)/python -m pytest --quiet -m "device and not cpu" tests/test_operators.py tests/test_norms.py tests/test_norm_modules.py

.PHONY: test
test: lint test-rust test-python ## everything

.PHONY: kill-test
N ?= 20
kill-test: build ## kill training N times, resume, compare with an uninterrupted run
	$(BIN)/python tests/kill_test.py --kills $(N)

# The GPU machine has Python 3.12 and torch, and neither Rust nor a network: everything else travels in dist/gpu.
GPU_PYTHON ?= python3.12
GPU_OUTPUT ?= bench-gpu
GPU_SECTIONS ?=
.PHONY: gpu-wheel
gpu-wheel: ## a wheel for a machine with a GPU and Python 3.12, and what its measurements need
	$(GPU_PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 12) else f"the GPU machine has Python 3.12, {sys.executable} is another: make gpu-wheel GPU_PYTHON=…")'
	$(GPU_PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/pip install --quiet --requirement requirements-gpu.txt
	rm -rf dist/gpu && mkdir -p dist/gpu
	$(VENV)-gpu/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist/gpu .
	$(VENV)-gpu/bin/pip download --quiet --no-deps --dest dist/gpu $$(sed -n 's/ # carried$$//p' requirements-gpu.txt)
	ls -lh dist/gpu

.PHONY: gpu-check
gpu-check: ## on the GPU machine: install dist/gpu, run the operators' tests and measure (or GPU_SECTIONS=training,reference)
	python3 -m pip install --quiet --no-index --no-deps --target .gpu-site --upgrade dist/gpu/*.whl
	PYTHONPATH=$(CURDIR)/.gpu-site python3 -m normformer_rs.bench gpu --output $(GPU_OUTPUT) $(if $(GPU_SECTIONS),--only $(GPU_SECTIONS))

.PHONY: clean
clean: ## remove what make made
	rm -rf $(VENV) $(VENV)-gpu .gpu-site target runs dist/gpu
