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

.PHONY: test
test: lint test-rust test-python ## everything

.PHONY: kill-test
N ?= 20
kill-test: build ## kill training N times, resume, compare with an uninterrupted run
	$(BIN)/python tests/kill_test.py --kills $(N)

.PHONY: clean
clean: ## remove what make made
	rm -rf $(VENV) target runs
