# `make demo` runs the main job, `make test` the suite. Each sets up what it needs in .venv, and only once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SUDO   := $(if $(filter 0,$(shell id -u)),,sudo)
PYTEST ?= $(BIN)/python -m pytest

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/dsa-jax demo

test: $(VENV)/.test lint
	$(PYTEST) -n 2 --dist worksteal $(ARGS)

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

clean:
	rm -rf $(VENV) build dist *.egg-info
