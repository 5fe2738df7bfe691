# make train   install into .venv and train GLA tensor-parallel on two CPU ranks
# make test    install into .venv and run the tests that a contributor needs: 9 minutes on 2 cores; ARGS="-k gla" picks some
# make test-all  all tests but the exhaustive ones, before a merge; 25 minutes
# make test-exhaustive  all tests, also the exhaustive ones, which are further cases of other tests; hours
# make test-kernels  compare FLA's own Triton kernels, interpreted on a CPU, with the stand-ins that replace them there
# make survive N=1000   inject N faults into a training job, and compare its losses with an undisturbed run: docs/checkpoints.md
# make check   lint, formatting, types, and whether constraints.txt fits pyproject.toml
# make lock    renew constraints.txt, which has the versions that all other targets install: the newest that pyproject.toml
#              allows, except for torch, where $(LOCKED_TORCH) decides
# make test-newest   all tests with the newest versions that pyproject.toml allows, in a separate environment (.venv-newest);
#                    prints what differs from constraints.txt
# make test-oldest   the same with the oldest versions that training supports
# make test-light    after test-oldest, in its environment: all tests but the trainer's, with the oldest torch of the light install
# make bench   run the benchmarks, each of which prints a table
# make gpu     on a machine with CUDA: tests, proofs and benchmarks, written to docs/gpu; PARTS="verify float8", MODELS="gla"
#
# CONFIG=configs/x.toml trains another job; PYTHON=python3.12 uses another Python. On Linux, pip's torch installs CUDA's
# libraries, too (several GB); set PIP_EXTRA_INDEX_URL, which pip reads, to an index of CPU builds to avoid this.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= configs/gla_debug.toml
N      ?= 1000
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# pip reads both. The second is for build dependencies: for these, pip 25.3 and newer ignore the first.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --all-extras --python-version 3.11 \
	--fork-strategy fewest --no-annotate --custom-compile-command "make lock"
# --dist loadfile: the tests of a file share process groups. tests/conftest.py orders the files, longest first.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The release in constraints.txt, with which generated pages and figures are made.
LOCKED_TORCH := torch<2.14
# The oldest torch that everything but training supports; a test compares it with pyproject.toml.
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

# With uv, since pip would refuse the combination: the extra "train" needs a newer torch.
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
