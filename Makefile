# The project's chores, one word each: "make" lists them.
#
# All of them run in .venv, which the first one makes and fills from requirements.lock. Needed
# beforehand: Python 3.11 or newer with pip and venv, and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements.lock
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
ARGS   :=
JSON   := build/bench.json

# What has been done in .venv, or is under way.
READY   := $(VENV)/.ready
PARTIAL := $(VENV)/.partial
MODEL   := $(VENV)/.smollm2

.DEFAULT_GOAL := help
.PHONY: help venv serve test pressure proof soak lint format bench peers lock clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="..."        is passed on by serve, test, pressure, proof, soak, bench, peers and lock'
	@echo '  PYTHON=python3.x  picks the Python that .venv is made with'

venv: $(READY)  ## make .venv and install Layby and the tools in it
	@:

# Runs when .venv is missing or older than what it was filled from. .partial stands in .venv for as
# long as others' packages go in: a .venv left half-filled is made afresh, not trusted.
$(READY): $(LOCK) pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@command -v $(PYTHON) >/dev/null || \
	    { echo "error: no '$(PYTHON)' here; install Python 3.11 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: Layby needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1); name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "error: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@if [ -e $(PARTIAL) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "Making $(VENV) with $$($(PYTHON) -V)"; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(PARTIAL) && $(PYTHON) -m venv $(VENV); \
	else \
	    rm -f $(READY) && touch $(PARTIAL); \
	fi
	@echo "Installing what $(LOCK) lists (the first time, this takes a minute or more)"
	@$(PIP) install -qq --requirement $(LOCK)
	@rm $(PARTIAL)
	@echo "Installing Layby itself, editable"
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Asked once only, so that later runs start at once. Should the model go missing after that, Layby
# fetches it again when it loads it.
$(MODEL): | $(READY)
	@$(BIN)/layby model pull smollm2
	@touch $@

serve: venv $(MODEL)  ## serve the default model on http://127.0.0.1:8000
	@exec $(BIN)/layby serve $(ARGS)

test: venv $(MODEL)  ## run all tests
	@$(BIN)/pytest $(ARGS)

pressure: venv $(MODEL)  ## the long form of the memory-pressure tests (64 requests, 19,200 tokens a run)
	@LAYBY_PRESSURE=long $(BIN)/pytest tests/e2e/test_pressure.py --timeout 3600 $(ARGS)

proof: venv  ## a thousand random cases of parking: not one bit of an answer may change
	@LAYBY_PROOF=1000 $(BIN)/pytest -s tests/e2e/test_parking_proof.py --timeout 3600 $(ARGS)

soak: venv  ## 20,000 short requests on a small pool: nothing may be left behind (one to five minutes)
	@$(BIN)/python -m bench.soak $(ARGS)

lint: venv  ## check style, types, layers and the installed packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PIP) check

format: venv  ## put the code into the house style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: venv $(MODEL)  ## Layby's own figures, against the stored baseline; also as JSON in build/
	@mkdir -p $(dir $(JSON))
	@$(BIN)/python -m bench.own --json $(JSON) $(ARGS)

peers: venv $(MODEL)  ## Layby beside other engines, each in an environment of its own (see bench/)
	@$(BIN)/python -m bench.peers $(ARGS)

define LOCK_HEADER
# Exact versions of everything that Layby and its tools run on. Written by "make lock" from
# pyproject.toml; "make lock ARGS=--upgrade" moves it to the newest versions.
#
# It serves as a constraints file too, for an installation without the tools:
#     pip install --constraint requirements.lock .
#
# torch is pinned to a version, not to a build: "torch==2.13.0" is met by 2.13.0+cpu and by every
# CUDA build of 2.13.0. Which one comes depends on where pip is set to look. With a GPU, choose your
# own: install that build into .venv after "make venv"; later set-ups leave it in place.

endef
export LOCK_HEADER

lock: venv  ## work out requirements.lock anew from pyproject.toml
	@echo "Resolving pyproject.toml into $(LOCK)"
	@cp $(LOCK) $(VENV)/$(LOCK)
	@$(BIN)/pip-compile --quiet --extra dev --output-file $(VENV)/$(LOCK) \
	    --no-header --annotation-style line --strip-extras --no-build-isolation \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	    --no-allow-unsafe --unsafe-package pip $(ARGS) pyproject.toml
	@! grep -qE '^(nvidia|triton)' $(VENV)/$(LOCK) || \
	    { echo "error: pip took a CUDA build of torch; make the lock where it finds the CPU build" >&2; exit 1; }
	@{ printf '%s\n' "$$LOCK_HEADER"; sed 's/+cpu/    /; /^$$/d; /^#/d' $(VENV)/$(LOCK); } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)

clean:  ## back to a fresh clone (downloaded models stay)
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf src/*.egg-info
	find $(wildcard src tests bench) -name __pycache__ -type d -prune -exec rm -rf {} +
