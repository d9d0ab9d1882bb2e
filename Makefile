# `make demo` and `make test` are all a fresh machine needs: each sets everything up in .venv first.
# Needs: Rust (rustup.rs), Python 3.10 to 3.15 with venv, a C++ compiler, make.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# torch-sys asks the first `python3` on PATH where libtorch is.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each process of the tests imports torch, which takes twice as long if it must be compiled first.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Prints what a command took, and keeps it for `.ci/run`.
TIMED := .ci/timed

# What the extension is compiled with. The rest is installed while it compiles.
$(VENV)/torch: requirements-dev.txt
	$(PYTHON) _build.py check
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements-dev.txt uv || true # .ci/install does without
	$(TIMED) "install torch" .ci/install --constraint requirements-dev.txt torch maturin numpy
	touch $@

$(VENV)/installed: $(VENV)/torch requirements-dev.txt
	$(TIMED) "install the rest" .ci/install --requirement requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/torch Cargo.toml Cargo.lock pyproject.toml build.rs _build.py .cargo/config.toml $(shell find src -type f)
	$(TIMED) "compile the extension" $(BIN)/python3 -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# Compiled at installation: Python warns of fairseq's escape sequences when it compiles them, and tests take that for an
# error.
$(VENV)/fairseq: requirements-fairseq.txt | $(VENV)/installed
	UV_COMPILE_BYTECODE=1 $(TIMED) "install fairseq" .ci/install --no-deps --requirement requirements-fairseq.txt
	touch $@

# For these targets `build` also installs fairseq, while the extension compiles.
fairseq test test-python test-all test-long docs: BESIDE := $(VENV)/fairseq

.PHONY: build
build: ## the virtual environment with the package in it
	@$(MAKE) --silent $(if $(findstring jobserver,$(MAKEFLAGS)),,--jobs 2) $(VENV)/built $(VENV)/installed $(BESIDE)

.PHONY: fairseq
fairseq: build ## fairseq 0.12.2, for the plug-in and its tests

.PHONY: demo
demo: build ## train a Transformer to translate number words, and show what it learned
	$(BIN)/normformer-rs demo --output runs/demo

.PHONY: format
format: $(VENV)/installed ## format Rust and Python
	cargo fmt
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

# cargo as pip's build calls it: what either has compiled serves the other.
CARGO := $(BIN)/python3 _build.py

.PHONY: lint lint-rust lint-python
lint: lint-rust lint-python ## formatting, clippy, ruff, stubs, types

lint-rust: build
	cargo fmt --check
	$(TIMED) clippy $(CARGO) clippy --quiet --release --features python --all-targets -- --deny warnings

lint-python: build
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m normformer_rs._stubs --check
	$(TIMED) mypy $(BIN)/mypy --config-file pyproject.toml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

.PHONY: test-rust
test-rust: build ## Rust tests
	$(TIMED) "compile the Rust tests" $(RUST_TESTS) --no-run
	$(TIMED) "Rust tests" $(MAKE) --silent --jobs 2 --output-sync test-rust-loops test-rust-others

# Two processes of one thread each: libtorch's generator is the process's, and tests that seed it must not draw between
# each other.
RUST_TESTS := $(CARGO) test --quiet --release --lib
RUST_LOOPS := train:: search::

.PHONY: test-rust-loops test-rust-others
test-rust-loops:
	OMP_NUM_THREADS=1 $(RUST_TESTS) -- --test-threads=1 $(RUST_LOOPS)

test-rust-others:
	$(RUST_TESTS) -- --test-threads=1 $(RUST_LOOPS:%=--skip %)

# As many processes as cores, one thread each. A test that has not ended after LIMIT seconds ends its process, which
# prints where it stood; pytest names it and goes on.
LIMIT := 180
PYTEST = -m pytest --quiet --numprocesses auto --dist worksteal --timeout-method thread --timeout $(LIMIT)

.PHONY: test-python
test-python: build ## the sharp Python tests
	$(TIMED) "Python tests" $(BIN)/python $(PYTEST) -m "not full"

.PHONY: test
test: test-rust test-python ## Rust tests, and Python tests of every area

.PHONY: test-all
test-all: LIMIT := 900
test-all: build ## the longer Python tests, and the operators' on the emulated GPU
	$(TIMED) "longer Python tests" $(BIN)/python $(PYTEST) -m "full and not long"
	NORMFORMER_RS_TEST_DEVICE=emulated $(TIMED) "operators on the emulated GPU" $(BIN)/python $(PYTEST) -m "device and not cpu and not full" tests/operators tests/norms

# zensical has an environment of its own: it makes HTML of pages that the package's environment has written.
$(VENV)-docs/installed: requirements-docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --requirement requirements-docs.txt
	touch $@

.PHONY: docs
docs: build $(VENV)-docs/installed ## the documentation as a site, in site/html; notebooks run when they have changed
	$(TIMED) "pages and notebooks" $(BIN)/python -m docs.generate write
	$(TIMED) "site" $(VENV)-docs/bin/zensical build --clean --strict --config-file site/mkdocs.yml
	$(BIN)/python -m docs.generate check site/html

.PHONY: kill-test
kill-test: N ?= 20
kill-test: build ## kill training N times, resume, compare with an uninterrupted run
	$(BIN)/python tests/train/kill_test.py --kills $(N)

.PHONY: fuzz
fuzz: N ?= 10000
fuzz: build ## N random calls of all operators, valid and not, beside guard pages
	OMP_NUM_THREADS=1 $(BIN)/python tests/operators/fuzz.py --calls $(N)

.PHONY: test-long
test-long: LIMIT := 7200
test-long: kill-test ## what runs once per change of its subject: kill-test, planted faults, every CUDA variant for every architecture, all cases
	$(BIN)/python $(PYTEST) -m long
	NORMFORMER_RS_TEST_DEVICE=emulated $(BIN)/python $(PYTEST) -m "device and not cpu and full" tests/operators tests/norms
	cd tests && ../$(BIN)/python cuda/binaries.py --output ../benches/results/cuda-binaries.csv

# An environment of its own for each TORCH, deleted by `make clean`.
.PHONY: test-torch
test-torch: ## build and test against another torch, as in: make test-torch TORCH=2.15.0
	$(PYTHON) -m venv .venv-torch/$(TORCH)
	grep -v '^torch==' requirements-dev.txt > .venv-torch/$(TORCH)/requirements.txt
	.venv-torch/$(TORCH)/bin/pip install --quiet torch==$(TORCH) --requirement .venv-torch/$(TORCH)/requirements.txt
	PATH=$(CURDIR)/.venv-torch/$(TORCH)/bin:$$PATH $(TIMED) "build for torch $(TORCH)" \
		.venv-torch/$(TORCH)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	PATH=$(CURDIR)/.venv-torch/$(TORCH)/bin:$$PATH $(TIMED) "tests with torch $(TORCH)" \
		.venv-torch/$(TORCH)/bin/python $(PYTEST) -m "not full" \
		tests/operators tests/norms tests/nn tests/surgery tests/model tests/train

# torch 2.15 has no wheel for Python 3.10, and it alone has one for 3.15: name PYTHONS with TORCH.
TORCH ?= 2.11.0
PYTHONS ?= $(foreach v,3.10 3.11 3.12 3.13 3.14,$(shell python$(v) -c '' 2>/dev/null && echo python$(v)))
.PHONY: wheels
wheels: ## the sdist and a wheel per Python of PYTHONS with a core for each of TORCH="2.11 2.13", used beside each
	$(PYTHON) .ci/wheels.py $(PYTHONS) --torch $(TORCH)

# A machine with a GPU may have neither Rust nor a network: what it needs travels in dist/gpu.
GPU_PYTHON ?= python3.12
GPU_OUTPUT ?= bench-gpu
GPU_SECTIONS ?=
.PHONY: gpu-wheel
gpu-wheel: $(VENV)/installed ## a wheel for GPU_PYTHON and each of TORCH, as a machine with a GPU has them, and what its measurements need
	rm -rf dist/gpu
	$(GPU_PYTHON) .ci/wheels.py $(GPU_PYTHON) --torch $(TORCH) --output dist/gpu
	$(BIN)/pip download --quiet --no-deps --dest dist/gpu --requirement requirements-gpu.txt
	ls -lh dist/gpu

.PHONY: gpu-check
gpu-check: ## on the GPU machine: install dist/gpu, run the operators' tests and measure (or GPU_SECTIONS=training,reference)
	python3 -m pip install --quiet --no-index --no-deps --target .gpu-site --upgrade dist/gpu/*.whl
	PYTHONPATH=$(CURDIR)/.gpu-site python3 -m normformer_rs.bench gpu --output $(GPU_OUTPUT) $(if $(GPU_SECTIONS),--only $(GPU_SECTIONS))

.PHONY: clean
clean: ## remove what make made
	rm -rf $(VENV) $(VENV)-docs .venv-torch .gpu-site target runs dist site
