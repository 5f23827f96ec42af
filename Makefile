VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test test-slow test-vllm lint types bench docs wheel install clean

run: $(STAMP)  ## the main job: scheduler, three agents and a trainer learn arithmetic here
	$(BIN)/farflow up examples/arithmetic.toml

test: $(STAMP)  ## the default suite, without torch training
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(STAMP)  ## torch, real constants, real processes
	$(BIN)/python -m pytest -m slow --timeout 600

test-vllm:  ## the vLLM engine is not part of farflow yet
	@echo "farflow has no vLLM engine yet: nothing to test"

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)  ## writes bench/results/
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt -e ".[bench]"
	$(BIN)/python -m bench

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

wheel: $(STAMP)
	rm -rf build dist && $(BIN)/python -m build --wheel --outdir dist . && $(BIN)/check-wheel-contents dist

install: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements/constraints.txt -e ".[torch,tasks,plots,fast,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
