# Needs make and Python 3.11 or newer; everything else is installed into .venv from requirements.lock.
# `make PYTHON=/path/to/python3.11 demo` chooses the interpreter.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
MANIFEST := pyproject.toml requirements.lock
# Small models gain nothing from torch's thread pool and lose much on a busy machine: one thread per process.
export OMP_NUM_THREADS ?= 1
# Compiled files are kept, also where the environment says otherwise: workers and the programs that tests start share them.
export PYTHONDONTWRITEBYTECODE :=
# Each worker begins with a contiguous share, so that what a file sets up once is set up by one worker, and steals at the end.
# One process more than cores: many tests wait for programs that they start.
PYTEST := $(BIN)/pytest -n $(shell expr $$(nproc 2>/dev/null || echo 2) + 1) --maxprocesses=4 --dist worksteal --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-faults test-integrations screenshots lint types bench bench-quick docs docs-archive lock hashes sbom dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-18s %s\n", $$1, $$2 }'

demo: .venv/core ## Train on scikit-learn's digits at epsilon 3
	$(BIN)/sordino demo

# mypy works on one core while the tests begin on the others.
test: lint ## Lint, types and every test that is not slow
	@$(BIN)/mypy & types=$$!; $(PYTEST) -m "not slow"; tests=$$?; wait $$types && exit $$tests

test-slow: .venv/dev ## The tests that take minutes
	$(PYTEST) -m slow

test-faults: .venv/dev ## 500 kills, 2,000 mutations, 5,000 hostile requests, 200 interrupted loops
	$(BIN)/python -m tests.faults

test-integrations: .venv/integrations ## transformers, TRL, PEFT, Accelerate and Lightning, against the real packages
	$(BIN)/pytest tests/integrations tests/finetuning/test_losses.py tests/finetuning/test_low_precision.py 'tests/test_docs.py::test_the_code_of_every_page_runs[docs/integrations.md]' 'tests/test_docs.py::test_the_code_of_every_page_runs[docs/finetuning.md]'

screenshots: .venv/dev ## Take the documentation's pictures of real reports anew (needs chromium)
	SORDINO_SCREENSHOTS=docs/img $(BIN)/pytest -m slow tests/report/test_screenshots.py

lint: .venv/dev ## ruff, style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev ## mypy in strict mode
	$(BIN)/mypy

bench: .venv/dev ## Speed and memory against peers, for docs/performance.md (an interrupted run goes on)
	$(BIN)/python -m benchmarks.speed

bench-quick: .venv/dev ## A few networks and methods within five minutes
	$(BIN)/python -m benchmarks.speed --quick

docs: .venv/dev ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-archive: docs ## Put the documentation of this version beside those of others, into docs-archive/
	$(BIN)/python scripts/versions.py site docs-archive

lock: .venv/base ## Resolve all dependencies anew and write requirements.lock
	$(BIN)/python scripts/lock.py

hashes: .venv/base ## Write requirements.hashes: the locked files of this platform, with their SHA-256
	$(BIN)/python scripts/hashes.py

sbom: .venv/base ## Write sbom.cdx.json, the bill of materials, from the locks
	$(BIN)/python scripts/sbom.py

dist: .venv/build sbom ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m hatchling build -d dist

clean: ## Remove .venv, caches and what the build wrote
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv when it is there, pip otherwise. uv does not read pip's settings, so where a CPU build of torch comes from them
# uv asks the official CPU source, and where that is out of reach pip takes over.
define install
	@echo "Installing $(1) into .venv from requirements.lock ..."
	@{ command -v uv >/dev/null && uv pip install --quiet --python $(BIN)/python --torch-backend cpu -c requirements.lock $(2) 2>/dev/null; } \
		|| $(BIN)/python -m pip install -qq --disable-pip-version-check -c requirements.lock $(2)
	@touch $@
endef

.venv/base:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# Without build isolation, so that the build tools too are the locked ones.
.venv/build: .venv/base $(MANIFEST)
	$(call install,build tools,hatchling editables)

.venv/core: .venv/build
	$(call install,sordino,--no-build-isolation -e .)

.venv/dev: .venv/build
	$(call install,sordino with every extra,--no-build-isolation -e '.[dev$(comma)bench$(comma)export$(comma)excel$(comma)vault$(comma)features$(comma)federated]')

.venv/integrations: .venv/dev
	$(call install,the packages of other people's loops,--no-build-isolation -e '.[finetuning$(comma)integrations]')

comma := ,
