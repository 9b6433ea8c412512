# Two commands do all the set-up: `make quickstart` runs the shipped sample, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: quickstart test bench lint type gpu-test wheel clean

quickstart: $(VENV)/.base
	$(BIN)/simctl run experiments/quickstart.yaml -o out/quickstart

test: $(VENV)/.dev lint type
	$(BIN)/python -m pytest -n 2

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --write docs/speed.md

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.dev
	$(BIN)/mypy

gpu-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -n 0

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel && $(BIN)/check-wheel-contents dist/*.whl

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[fast]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[fast,dev]'
	@touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) out build dist *.egg-info
