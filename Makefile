# make train   install into .venv and train GLA tensor-parallel on two CPU ranks
# make test    install into .venv and run the tests that a contributor needs: 9 minutes on 2 cores; ARGS="-k gla" picks some
# make test-all  all tests but the exhaustive ones, before a merge; 25 minutes
# make test-exhaustive  those, too: more cases of what the others prove; hours
# make test-kernels  FLA's own Triton kernels, interpreted on a CPU, against what stands in for them
# make survive N=1000   kill a training job as often, and compare its losses: docs/checkpoints.md
# make check   lint, formatting, types, and whether constraints.txt is what pyproject.toml asks for
# make lock    renew constraints.txt: the versions that all of these install, the newest that pyproject.toml allows, but of
#              torch the newest that $(LOCKED_TORCH) allows
# make test-newest   all tests in an environment of its own (.venv-newest) with the newest that pyproject.toml allows, and
#                    what differs from constraints.txt; make test-oldest: with the oldest that it allows for training
# make test-light    after test-oldest, in the same environment: all tests but the trainer's, with the oldest torch of all
# make bench   every benchmark, each printing a table
# make gpu     on a machine with CUDA: tests, proofs and benchmarks, written to docs/gpu; PARTS="verify float8", MODELS="gla"
#
# CONFIG=configs/x.toml trains another job; PYTHON=python3.12 takes another Python. On Linux, pip's torch brings
# CUDA's libraries (several GB): PIP_EXTRA_INDEX_URL, which pip reads itself, can name an index of CPU builds.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= configs/gla_debug.toml
N      ?= 1000
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# pip reads them; the second for what builds a package, which pip 25.3 and newer take from there alone.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --all-extras --python-version 3.11 \
	--fork-strategy fewest --no-annotate --custom-compile-command "make lock"
# --dist loadfile: the tests of a file share process groups. tests/conftest.py orders the files, longest first.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Generated pages and figures are made with the release that constraints.txt has.
LOCKED_TORCH := torch<2.14
# The lower end of the range for everything but training; a test compares it with pyproject.toml.
LIGHT_TORCH  := torch==2.11.0

.PHONY: train test test-all test-exhaustive test-kernels test-newest test-oldest test-light survive check lock bench gpu clean
.DEFAULT_GOAL := train

train: $(VENV)/installed
	$(BIN)/python train.py $(CONFIG)

test: $(VENV)/installed-dev
	$(PYTEST) -m "not thorough and not exhaustive" $(ARGS)

test-all: $(VENV)/installed-dev
	$(PYTEST) $(ARGS)

test-exhaustive: $(VENV)/installed-dev
	$(PYTEST) -m "exhaustive or not exhaustive" --timeout 3600 $(ARGS)
	$(BIN)/python -m tests.support.pages.combinations

test-kernels: $(VENV)/installed-dev
	TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal tests/kernels/interpreted $(ARGS)

survive: $(VENV)/installed-dev
	$(BIN)/python -m tests.support.survival --faults $(N)

test-newest test-oldest: test-%: $(BIN)/uv
	$(COMPILE) --resolution $(if $(filter newest,$*),highest,lowest-direct) --output-file .venv-$*.txt
	$(MAKE) test-all VENV=.venv-$* CONSTRAINTS=.venv-$*.txt; status=$$?; diff constraints.txt .venv-$*.txt; exit $$status

# pip would refuse the combination, since the extra "train" needs a newer torch.
test-light: $(BIN)/uv
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python '$(LIGHT_TORCH)'
	.venv-oldest/bin/$(subst $(BIN)/,,$(PYTEST)) $(ARGS)

lock: $(BIN)/uv
	echo '$(LOCKED_TORCH)' | $(COMPILE) --constraint /dev/stdin --output-file constraints.txt

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

bench: $(VENV)/installed
	for name in cpu_kernels tp_step parallelize step checkpoints; do $(BIN)/python -m benchmarks.$$name || exit 1; done

gpu: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.gpu_day $(if $(PARTS),--parts $(PARTS)) $(if $(MODELS),--models $(MODELS)) $(ARGS)

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: $(BIN)/pip
	$(BIN)/pip install --quiet uv
	touch $@

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(BIN)/pip install --quiet packaging
	$(BIN)/python tests/support/constraints.py $(CONSTRAINTS)
	$(BIN)/pip install --quiet --editable '.[all]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest* .venv-oldest* outputs
