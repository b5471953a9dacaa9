# Every target sets itself up: `make demo` or `make test` in a fresh clone is enough.
# The demo has an environment of its own, .demo, without the developers' tools.
# PYTHON=python3.12 chooses the interpreter; ARGS="…" is passed to demo and pytest; tests run
# in JOBS processes.

PYTHON ?= python3
ARGS ?=
# A folder of wheels, from which `make gpu-proof` installs without a network; `make gpu-wheels` fills it.
WHEELS ?=
JOBS ?= 2
BIN := .venv/bin
DEV := .venv/.dev
DEMO := .demo/.installed
PROOF := .gpu/.installed
PIP := bin/python -m pip install --quiet --constraint constraints.txt

# PyTorch's CPU build where there is no NVIDIA driver: PyPI's Linux build brings gigabytes of CUDA.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# torch_npu beside torch breaks every import of torch on a machine without CANN, so tests/ascend has
# it in a folder of its own. Only Linux x86_64 has a wheel; elsewhere those tests are skipped.
NPU := $(if $(filter Linux_x86_64,$(shell uname -sm | tr ' ' _)),.npu/.stamp)

PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --durations 10
# The oldest Lightning does what its own dependencies have since deprecated.
OLDEST := PYTHONPATH=.oldest $(PYTEST) --quiet -m "not deep" -W ignore::DeprecationWarning
STORE := tests/store

# One thread each: two threads on a busy machine make the same step up to eight times longer.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup npu demo test test-deep test-oldest test-gpu gpu-wheels gpu-proof check docs \
	docs-version bench release-check

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## create the virtual environment .venv with the developers' tools

.venv/.python .demo/.python .gpu/.python: %/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -m venv $* || \
		{ echo "could not create $*; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@test -n "$(WHEELS)" || test -z "$(TORCH_INDEX)" || \
		$*/$(PIP) --retries 1 --index-url $(TORCH_INDEX) --no-deps torch || \
		echo "PyTorch's CPU index is not reachable; taking torch from the default index" >&2
	@touch $@

$(DEMO): .demo/.python pyproject.toml constraints.txt
	.demo/$(PIP) --editable '.[demo]'
	@touch $@

$(DEV): .venv/.python pyproject.toml constraints.txt
	.venv/$(PIP) --editable '.[dev,docs]'
	@touch $@

npu: $(NPU) ## get torch_npu and msprof-analyze for tests/ascend (Linux x86_64, 500 MB in .npu)

.npu/.stamp: | $(DEV)
	@rm -rf .npu
	@$(BIN)/python -m pip install --quiet --retries 1 --no-deps --only-binary :all: --target .npu \
		torch-npu==2.13.0 && \
		$(PYTHON) -m venv .npu/tools && \
		.npu/tools/bin/python -m pip install --quiet --retries 1 msprof-analyze==26.2.0 && touch $@ || \
		echo "WARNING: NO TORCH_NPU: tests/ascend is skipped, in whole or in part" >&2

demo: $(DEMO) ## train a small policy with GRPO and show where each step went (ARGS="--steps 40")
	.demo/bin/rlprof demo $(ARGS)

test: $(DEV) ## run the quick tests: 7 minutes on two idle cores, 20 on busy ones (ARGS="-k stage" for some)
	$(PYTEST) -m "not deep" $(ARGS)

test-deep: $(DEV) $(NPU) ## run the slow tests: processes, DDP, Ray, torch_npu, fuzzing, browsers
	TEST_EFFORT=deep $(PYTEST) -m "deep or hypothesis" $(ARGS)

test-oldest: $(DEV) ## run some quick tests with the lowest versions that are supported (oldest.txt)
	@rm -rf .oldest
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --only-binary :all: --target .oldest \
		--requirement oldest.txt
	$(OLDEST) $(STORE) tests/integrations/lightning/test_profiler_actions.py \
		tests/integrations/lightning/test_fits.py tests/cli tests/loaders tests/report \
		tests/system/test_remote_files.py $(ARGS)
	@rm -rf .oldest  # then with the DuckDB that Python 3.10 gets
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --target .oldest duckdb==1.5.6
	$(OLDEST) $(STORE) $(ARGS)

test-gpu: $(DEV) ## run the tests that need an NVIDIA GPU; each says what it lacks if it is skipped
	$(BIN)/python -m pytest -m cuda $(ARGS)

# What the proof needs: not the developers' tools. Building an editable package needs the last two.
PROOF_NEEDS := hypothesis nvidia-ml-py pytest transformers hatchling editables

gpu-wheels: .gpu/.python ## fill the folder WHEELS with what `make gpu-proof` installs, for a machine without a network
	.gpu/bin/python -m pip download --quiet --constraint constraints.txt --dest $(WHEELS) \
		'.[lightning]' $(PROOF_NEEDS)

$(PROOF): .gpu/.python pyproject.toml constraints.txt
	.gpu/bin/python -m pip install --quiet --constraint constraints.txt \
		$(if $(WHEELS),--no-index --find-links $(WHEELS)) --editable '.[lightning]' $(PROOF_NEEDS)
	@touch $@

gpu-proof: $(PROOF) ## show what holds on this GPU: tests, device times, captures, cost (ARGS="--output DIR", WHEELS=DIR)
	.gpu/bin/python benchmarks/gpu_proof.py $(ARGS)

check: $(DEV) ## lint, format, types, import contracts, spelling, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python docs/generate_config.py --check
	$(BIN)/python docs/generate_cli.py --check
	$(BIN)/python docs/generate_schema.py --check
	$(BIN)/python docs/generate_problems.py --check
	$(BIN)/python docs/generate_methods.py --check
	$(BIN)/python docs/generate_examples.py --check

docs: $(DEV) ## build the pages into site/; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

DOCS_VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' lightning_rlprof/system/version.py)

docs-version: $(DEV) ## add the pages of this version to the local branch gh-pages, beside those of others
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases \
		--alias-type redirect $(DOCS_VERSION) latest
	$(BIN)/mike set-default latest

release-check: $(DEV) ## build, check and install what would be published, ask it, and build the pages of both languages
	@rm -rf dist .release
	$(BIN)/python -m hatchling build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv .release
	.release/$(PIP) dist/*.whl
	tar -xzf examples/runs.tar.gz -C .release
	.release/bin/rlprof findings .release/slow
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir .release/site
	test -f .release/site/index.html -a -f .release/site/zh/index.html -a -f .release/site/llms.txt

bench: $(DEV) ## run every benchmark; fails at the end if a bound did not hold
	@failed=; for file in benchmarks/[!_]*.py; do \
		echo "== $$file"; $(BIN)/python "$$file" || failed="$$failed $$file"; \
	done; \
	if [ -n "$$failed" ]; then echo "bounds did not hold in:$$failed" >&2; exit 1; fi
