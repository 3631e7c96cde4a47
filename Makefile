# `make demo` runs the main job, `make test` the suite. Each sets up what it needs in .venv, and only once.
# `make targets` compiles every kernel for every GPU architecture, without a GPU, in a venv of its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SUDO   := $(if $(filter 0,$(shell id -u)),,sudo)
PYTEST ?= $(BIN)/python -m pytest
# XLA compiles for GPUs that are not there with jax 0.11.2, which needs Python 3.12; with an older one that is skipped.
TARGETS_VENV   ?= .venv-targets
TARGETS_PYTHON ?= $(firstword $(foreach v,3.12 3.13,$(shell python$(v) -c "print('python$(v)')" 2>/dev/null)) $(PYTHON))

.PHONY: demo test targets lint clean

demo: $(VENV)/.demo
	$(BIN)/dsa-jax demo

test: $(VENV)/.test lint
	$(PYTEST) -n 2 --dist worksteal $(ARGS)

targets: $(TARGETS_VENV)/.targets
	$(TARGETS_VENV)/bin/python -m bench targets $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# Debian keeps the part of venv that brings pip in a package of its own.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python3 cannot make virtual environments yet: installing python3-venv"; \
	  $(SUDO) apt-get update -q && $(SUDO) apt-get install -y -q python3-venv && $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "Please install python3's venv module, then run make again."; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .[test]
	touch $@ $(VENV)/.demo

$(TARGETS_VENV)/.targets: pyproject.toml
	$(TARGETS_PYTHON) -m venv $(TARGETS_VENV)
	$(TARGETS_VENV)/bin/python -m pip install --quiet --editable .[targets]
	touch $@

clean:
	rm -rf $(VENV) $(TARGETS_VENV) build dist *.egg-info
