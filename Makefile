# The first command on a fresh machine is any of these; all they need is Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM's example connector, which tests run in the embedded engine.
CONNECTORS := .vllm-connectors/0.32.0/example_connector.py

# Release of vLLM that `make test-vllm` runs; each has an environment of its own.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM)

# Release of SGLang that `make test-sglang` runs, beside the packages of the tests.
SGLANG := 0.5.23
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(SGLANG)

# What `make bench` runs: a name, and options as `BENCH="--rounds 3 --json out.json"`.
NAME ?=
BENCH ?=

.PHONY: help demo test test-sweep test-mount test-vllm test-vllm-sweep test-sglang bench check fmt clean

help:
	@echo "make demo        ask questions about a long document: cold, from the store, with a corrupted record"
	@echo "make test        lint, types and all tests"
	@echo "make test-sweep  every architecture of Transformers, every pair of shapes, the largest sizes"
	@echo "make test-mount  the directory store on network file systems, mounted twice (needs FUSE)"
	@echo "make test-vllm   tests inside real vLLM, CPU build (VLLM=0.32.0, 0.28.0 or 0.14.0)"
	@echo "make test-vllm-sweep  the same for every store on a server and every pair of ranks"
	@echo "make test-sglang  SGLang's own cache controller and host pools over the back end, on a CPU"
	@echo "make bench       list the benchmarks; NAME=lookup runs one, BENCH=--quick in little"
	@echo "make check       lint and types only"

$(STAMP): pyproject.toml constraints/test.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints/test.txt --editable '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kvferry demo

check: $(STAMP)
	scripts/check

$(CONNECTORS): scripts/vllm-connectors
	$(PYTHON) scripts/vllm-connectors
	touch $@

test: $(STAMP) $(CONNECTORS)
	scripts/check
	scripts/test -m "not sweep and not mount"

test-sweep: $(STAMP)
	scripts/test -m sweep

test-mount: $(STAMP)
	scripts/test -m mount -n 0

$(VLLM_STAMP): pyproject.toml scripts/vllm-venv $(wildcard constraints/vllm-$(VLLM).txt)
	$(PYTHON) scripts/vllm-venv $(VLLM) $(VLLM_VENV)
	touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	scripts/test-vllm $(VLLM_VENV) $(VLLM) -m "not sweep"

test-vllm-sweep: $(VLLM_STAMP)
	scripts/test-vllm $(VLLM_VENV) $(VLLM) -m sweep

$(SGLANG_STAMP): $(STAMP) scripts/sglang-venv
	$(PYTHON) scripts/sglang-venv $(SGLANG) $(SGLANG_VENV)
	touch $@

test-sglang: $(SGLANG_STAMP)
	scripts/test-sglang $(SGLANG_VENV) $(SGLANG)

bench: $(if $(filter vllm,$(NAME)),$(VLLM_STAMP),$(STAMP))
	$(if $(filter vllm,$(NAME)),$(VLLM_VENV),$(VENV))/bin/python -m benchmarks $(NAME) $(BENCH)

fmt: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet src benchmarks tests scripts examples
	$(BIN)/ruff format --quiet src benchmarks tests scripts examples

clean:
	rm -rf $(VENV) .venv-vllm* $(SGLANG_VENV) .vllm-connectors .demo
