# The first command on a fresh machine is any of these; all they need is Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test check fmt clean

help:
	@echo "make demo   ask questions about a long document: cold, from the store, with a corrupted record"
	@echo "make test   lint, types and all tests"
	@echo "make check  lint and types only"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kvferry demo

check: $(STAMP)
	scripts/check

test: $(STAMP)
	scripts/check
	scripts/test

fmt: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet src tests scripts examples
	$(BIN)/ruff format --quiet src tests scripts examples

clean:
	rm -rf $(VENV) .demo
