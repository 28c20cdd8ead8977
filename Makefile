# Everything from nothing: each target makes what it needs first, so a fresh clone can start anywhere.
# Another interpreter: make test PYTHON=python3.12. More arguments: make test ARGS="-k decoder".

PYTHON ?= python3
ARGS ?=
BENCH ?= kvcache --device cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CLIENTS := .venv-clients
CLIENTS_INSTALLED := $(CLIENTS)/.installed
DEMO := .venv-demo
DEMO_INSTALLED := $(DEMO)/.installed
SOURCES := pyproject.toml setup.py $(wildcard src/nanoserve/kernels/cpu/*.cpp src/nanoserve/kernels/cpu/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup fmt lint type test native clients check bench report demo

help: ## List the targets, so that nobody has to read this file.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv with the tested versions, so that every run here is a run you can have too.

fmt: $(INSTALLED) ## Rewrite the code in the one format, so that a diff shows only what was meant.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: $(INSTALLED) ## Check format and rules without touching a file, because a reader trips over both.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(INSTALLED) ## Prove the annotations of src/ (mypy strict), because seams are only as firm as their types.
	$(BIN)/mypy

test: $(INSTALLED) ## Run the tests, a few minutes: same tokens whatever the way, and the floors of the house.
	$(BIN)/python -m pytest $(ARGS)

clients: $(CLIENTS_INSTALLED) ## Drive a real server with other people's clients, whose word on an API is the last.
	SERVER_PYTHON=$(BIN)/python $(CLIENTS)/bin/python -m pytest -m clients $(ARGS)

native: $(INSTALLED) ## Run the C++ tests on every instruction set here, then under sanitizers, which tests in Python cannot see.
	$(BIN)/python tests/native/run.py
	$(BIN)/python tests/native/run.py --sanitize address,undefined
	$(BIN)/python tests/native/run.py --sanitize thread core step

check: lint type test ## Do what must be green before a commit, in the order that fails soonest.

bench: $(INSTALLED) ## Measure on this machine and record it, because nothing is claimed that was not measured.
	$(BIN)/python -m nanoserve.bench $(BENCH)

report: $(INSTALLED) ## Render tables, plots and README numbers from the records, so that nobody types a number.
	$(BIN)/nanoserve report $(ARGS)

demo: $(DEMO_INSTALLED) ## See it work in minutes, without PyTorch: text from the embedded model, then naive against cached.
	@echo 'The embedded model goes on from "Once upon a time":'
	@$(DEMO)/bin/nanoserve generate "Once upon a time" --max-tokens 96 --temperature 0.8 --seed 7
	@echo
	@echo 'Now the main job: what does the cache buy on this machine?'
	@$(DEMO)/bin/python -m nanoserve.bench kvcache --device cpu --quick || { \
	    code=$$?; [ $$code -eq 3 ] || exit $$code; \
	    echo 'Such a machine needs the whole measurement: make bench (minutes, more repetitions).'; }

# $(call make_venv,FOLDER): a virtual environment, or one line that says what is missing.
define make_venv
	@command -v $(PYTHON) >/dev/null || { \
	    echo 'nanoserve needs Python 3.11 or newer and found no "$(PYTHON)";' \
	         'name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "nanoserve needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	         'name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m venv $(1) || { \
	    echo 'could not make $(1): Debian and Ubuntu keep the module in the package python3-venv' >&2; \
	    exit 1; }
endef

# Remade only when what is to be installed has changed. The stamp comes last, so an install that was
# interrupted is taken up again by the next call.
$(INSTALLED): requirements.txt $(SOURCES)
	$(call make_venv,$(VENV))
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.txt
	@touch $@

# The clients want versions of their own, so they lie in an environment above .venv: what they lack
# they find there. Theirs are listed to the last one (--no-deps), for some name gigabytes that are
# not needed here.
$(CLIENTS_INSTALLED): $(INSTALLED) requirements-clients.txt tests/clients/node/package-lock.json
	@command -v npm >/dev/null || { \
	    echo 'make clients needs Node.js (20 or newer) with npm, for the client that is written in it' >&2; \
	    exit 1; }
	$(BIN)/python -m venv --without-pip $(CLIENTS)
	$(BIN)/python -m pip --python $(CLIENTS)/bin/python install --disable-pip-version-check \
	    --no-deps --no-compile --requirement requirements-clients.txt
	@for python in $(BIN)/python $(CLIENTS)/bin/python; do \
	    $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done | { \
	    read -r below; read -r own; printf '%s\n' "$$below" '$(CURDIR)/src' >"$$own/nanoserve.pth"; }
	cd tests/clients/node && npm ci --no-audit --no-fund
	@touch $@

# The core install alone, in the same versions. Only where the native core could not be compiled does
# PyTorch have to come as well, because something must compute.
$(DEMO_INSTALLED): requirements.txt $(SOURCES)
	$(call make_venv,$(DEMO))
	@grep '==' requirements.txt > $(DEMO)/pins.txt
	$(DEMO)/bin/python -m pip install --disable-pip-version-check --constraint $(DEMO)/pins.txt --editable .
	@$(DEMO)/bin/python -c 'from nanoserve.kernels.cpu import library; library.choose()' 2>/dev/null || { \
	    echo 'The native core was not compiled here (is there a C++ compiler?): installing PyTorch instead.'; \
	    $(DEMO)/bin/python -m pip install --disable-pip-version-check --constraint $(DEMO)/pins.txt \
	        --editable '.[torch]'; }
	@touch $@
