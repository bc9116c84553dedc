# The first command on a fresh machine is any of these; all they need is Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

CHECK_VENV := .venv-check
CHECK_STAMP := $(CHECK_VENV)/.installed

# Files of vLLM that tests run: its example connector, and its proxy.
CONNECTORS := .vllm-connectors/0.32.0/example_connector.py

# Release of vLLM that `make test-vllm` runs; each has an environment of its own.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM)

# Where SGLang is, for `make proof-wrong-model`, beside .venv-vllm and .venv-sglang: `make .venv-vllm/.installed-0.32.0
# .venv-sglang/.installed-0.5.23 && .venv-vllm/bin/python -m pip install --target DIR --no-deps sglang==0.5.23 orjson
# pybase64 ipython traitlets`.
SGLANG ?=

# Whose engines `make demo-disaggregated` starts: `embedded` or `vllm`; the latter behind vLLM's own
# proxy, or with `PROXY=` behind none.
ENGINE ?= embedded
PROXY ?= $(if $(filter vllm,$(ENGINE)),.vllm-connectors/0.32.0/toy_proxy_server.py)

# Whose own tiers `make demo-tier` runs on this CPU, with kvferry behind them: `vllm` or `sglang`.
TIERS := $(ENGINE:embedded=vllm)
TIER_STORE := $(CURDIR)/.demo/tier-$(TIERS)
ifneq (,$(filter demo-tier,$(MAKECMDGOALS)))
$(if $(filter vllm sglang,$(TIERS)),,$(error ENGINE=$(ENGINE) has no tiers: set ENGINE=vllm or ENGINE=sglang))
endif
MODEL := .demo/SmolLM2-135M-Instruct

# Release of SGLang that `make test-sglang` runs, beside the packages of the tests.
SGLANG_VERSION := 0.5.23
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(SGLANG_VERSION)

# What `make bench` runs: a name, and options as `BENCH="--rounds 3 --json out.json"`.
NAME ?=
BENCH ?=

.PHONY: help demo demo-disaggregated demo-tier test test-more test-sweep test-mount test-vllm test-vllm-sweep test-sglang test-gpu proof-wrong-model bench check fmt clean

help:
	@echo "make demo        ask questions about a long document: cold, from the store, with a corrupted record"
	@echo "make demo-disaggregated  prefill in one engine, decode in another (ENGINE=vllm: two vLLM servers)"
	@echo "make demo-tier   two processes behind vLLM's own tiers on this CPU (ENGINE=sglang: behind SGLang's HiCache)"
	@echo "make test        lint, types and all tests that take seconds"
	@echo "make test-more   the tests of several processes, servers that fail, and many shapes; some minutes"
	@echo "make test-sweep  every architecture of Transformers, the largest sizes, other slow cases"
	@echo "make test-mount  the directory store on network file systems, mounted twice (needs FUSE)"
	@echo "make test-vllm   tests inside real vLLM, CPU build (VLLM=0.32.0, 0.28.0 or 0.14.0)"
	@echo "make test-vllm-sweep  the same for every store on a server, every pair of ranks, two benchmarks"
	@echo "make test-sglang  SGLang's own cache controller and host pools over the back end, on a CPU"
	@echo "make test-gpu    all that a GPU can show, offline, with the Python that has torch and Triton (PYTHON=...)"
	@echo "make proof-wrong-model  which stores hand one model the KV of another, inside real vLLM (SGLANG=dir)"
	@echo "make bench       list the benchmarks; NAME=lookup runs one, BENCH=--quick in little"
	@echo "make check       lint and types only"

$(STAMP): pyproject.toml constraints/test.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@echo "installing into $(VENV): about 3 GB of packages, for some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints/test.txt --editable '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kvferry demo

demo-disaggregated: $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP) $(CONNECTORS),$(STAMP))
	$(if $(filter vllm,$(ENGINE)),$(VLLM_VENV),$(VENV))/bin/python -m examples.cpu.disaggregated \
	  --engine $(ENGINE) $(if $(PROXY),--proxy $(PROXY))

$(MODEL): | $(STAMP)
	$(BIN)/python -c 'import pathlib, kvferry.demo.model as demo; demo.prepare_model(pathlib.Path(".demo"), report=print)'

demo-tier: $(MODEL) $(if $(filter sglang,$(TIERS)),$(SGLANG_STAMP),$(VLLM_STAMP))
	rm -rf "$(TIER_STORE)"
	$(if $(filter sglang,$(TIERS)),$(SGLANG_VENV),$(VLLM_VENV))/bin/python examples/cpu/$(TIERS)_tiers.py \
	  $(MODEL) "file://$(TIER_STORE)?max_bytes=1GiB"

# An environment of its own, without servers and browsers: a third of that of the tests.
$(CHECK_STAMP): pyproject.toml constraints/test.txt
	test -x $(CHECK_VENV)/bin/python || $(PYTHON) -m venv $(CHECK_VENV)
	$(CHECK_VENV)/bin/python -m pip install --quiet --constraint constraints/test.txt --editable '.[check]'
	touch $(CHECK_STAMP)

check: $(CHECK_STAMP)
	scripts/check $(CHECK_VENV)

$(CONNECTORS): scripts/vllm-connectors
	$(PYTHON) scripts/vllm-connectors
	touch $@

test: $(STAMP) $(CONNECTORS)
	scripts/check
	scripts/test -m "not slow and not sweep and not mount"

test-more: $(STAMP) $(CONNECTORS)
	scripts/test -m "slow and not sweep and not mount"

test-sweep: $(STAMP)
	scripts/test -m sweep

test-mount: $(STAMP)
	scripts/test -m mount -n 0

$(VLLM_STAMP): pyproject.toml scripts/vllm-venv $(wildcard constraints/vllm-$(VLLM).txt)
	$(PYTHON) scripts/vllm-venv $(VLLM) $(VLLM_VENV)
	touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) $(CONNECTORS)
	scripts/test-vllm $(VLLM_VENV) $(VLLM) -m "not sweep"

test-vllm-sweep: $(VLLM_STAMP) $(CONNECTORS)
	scripts/test-vllm $(VLLM_VENV) $(VLLM) -m sweep

$(SGLANG_STAMP): $(STAMP) scripts/sglang-venv
	$(PYTHON) scripts/sglang-venv $(SGLANG_VERSION) $(SGLANG_VENV)
	touch $@

test-sglang: $(SGLANG_STAMP)
	scripts/test-sglang $(SGLANG_VENV) $(SGLANG_VERSION)

# Installs nothing: a machine that is lent may have no network. The environment of the tests serves,
# if there is one and no other is named.
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(STAMP))),$(BIN)/python,$(PYTHON))

test-gpu:
	$(GPU_PYTHON) scripts/test-gpu --json gpu.json $(BENCH)

proof-wrong-model: $(VLLM_STAMP)
	HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m tests.real_vllm.wrong_model $(addprefix --sglang ,$(SGLANG))

bench: $(if $(filter tier vllm proxied,$(NAME)),$(VLLM_STAMP) $(CONNECTORS),$(STAMP))
	$(if $(filter tier vllm proxied,$(NAME)),$(VLLM_VENV),$(VENV))/bin/python -m benchmarks $(NAME) $(BENCH)

fmt: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet src benchmarks tests scripts examples
	$(BIN)/ruff format --quiet src benchmarks tests scripts examples

clean:
	rm -rf $(VENV) $(CHECK_VENV) .venv-vllm* $(SGLANG_VENV) .vllm-connectors .demo
