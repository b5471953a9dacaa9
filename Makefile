# Every target sets itself up: `make demo` in a fresh clone is enough.
# PYTHON=python3.12 chooses the interpreter of .venv; ARGS="…" is handed on by demo and test; all
# tests run in JOBS processes.

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.stamp

# For tests/ascend, each in a place of its own: torch_npu beside torch breaks every import of torch on
# a machine without CANN. Other platforms have no wheel, and there those tests say so.
NPU := $(if $(filter Linux_x86_64,$(shell uname -sm | tr ' ' _)),.npu/.stamp)
PIP := -m pip install --quiet --retries 1

# What must be tested to the last line: cellar, ground, and the session with its parts.
COVERED := $(addprefix lightning_rlprof/,model.py errors.py calls.py config/*.py tracefile.py \
	nodes.py marking.py timed.py timings.py buffer.py window.py capture.py finish.py \
	session.py step_totals.py heap.py files.py address.py exchange.py token_window.py)

# Lightning's oldest does itself what its dependencies have since advised against.
OLDEST := PYTHONPATH=.oldest $(BIN)/python -m pytest --quiet --numprocesses $(JOBS) --dist loadfile \
	-W ignore::DeprecationWarning
STORE := tests/store tests/store/test_cached_run.py tests/store/ingest/test_heal.py tests/store/ingest/test_real.py

# One thread each: two threads on a busy machine make the same step up to eight times longer.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup npu demo test test-oldest test-gpu check docs bench

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make the virtual environment .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "python 3.10 or newer is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo "could not make .venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

npu: $(NPU) ## get torch_npu and msprof-analyze for tests/ascend (Linux x86_64, 500 MB in .npu)

.npu/.stamp: | $(STAMP)
	@rm -rf .npu
	@$(BIN)/python $(PIP) --no-deps --only-binary :all: --target .npu torch-npu==2.13.0 && \
		$(PYTHON) -m venv .npu/tools && \
		.npu/tools/bin/python $(PIP) msprof-analyze==26.2.0 && touch $@ || \
		echo "WARNING: NO TORCH_NPU: tests/ascend is skipped, in whole or in part" >&2

demo: $(STAMP) ## train a small policy with GRPO and show where each step went (ARGS="--steps 40")
	$(BIN)/rlprof demo $(ARGS)

test: $(STAMP) $(NPU) ## run the tests, doctests included (ARGS="-k stage" runs some of them)
ifeq ($(strip $(ARGS)),)
	@rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest --numprocesses $(JOBS) --dist loadfile
	@$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report \
		--include="$$(echo $(COVERED) | tr ' ' ,)" --show-missing --fail-under=100
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-oldest: $(STAMP) ## run some tests with the lowest versions that are supported (oldest.txt)
	@rm -rf .oldest
	$(BIN)/python $(PIP) --no-deps --only-binary :all: --target .oldest --requirement oldest.txt
	$(OLDEST) $(STORE) tests/integrations/lightning/test_profiler_actions.py tests/integrations/lightning/test_fits.py tests/cli \
		tests/loaders tests/report tests/system/test_remote_files.py $(ARGS)
	@rm -rf .oldest  # then with the DuckDB that Python 3.10 gets
	$(BIN)/python $(PIP) --no-deps --target .oldest duckdb==1.5.6
	$(OLDEST) $(STORE) $(ARGS)

test-gpu: $(STAMP) ## run the tests that need an NVIDIA GPU; each says what it lacks where it is skipped
	$(BIN)/python -m pytest -m cuda $(ARGS)

check: $(STAMP) ## lint, format, types, import contracts, spelling, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python docs/generate_config.py --check

docs: $(STAMP) ## build the pages into site/, broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) ## run every benchmark; fails at the end when a bound did not hold
	@failed=; for file in benchmarks/[!_]*.py; do \
		echo "== $$file"; $(BIN)/python "$$file" || failed="$$failed $$file"; \
	done; \
	if [ -n "$$failed" ]; then echo "bounds did not hold in:$$failed" >&2; exit 1; fi
