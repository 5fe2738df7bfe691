# make train   install into .venv and train GLA tensor-parallel on two CPU ranks
# make test    install into .venv and run every test
# make check   lint, formatting, types
# make bench   every benchmark, each printing a table
#
# CONFIG=configs/x.toml trains another job; PYTHON=python3.12 takes another Python. On Linux, pip's torch brings
# CUDA's libraries (several GB): PIP_EXTRA_INDEX_URL, which pip reads itself, can name an index of CPU builds.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= configs/gla_debug.toml
BIN    := $(VENV)/bin

.PHONY: train test check bench clean
.DEFAULT_GOAL := train

train: $(VENV)/installed
	$(BIN)/python train.py $(CONFIG)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

bench: $(VENV)/installed
	for name in cpu_kernels tp_step parallelize compile float8; do $(BIN)/python -m benchmarks.$$name || exit 1; done

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs
