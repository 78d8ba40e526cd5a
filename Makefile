# servebook. `make` alone prints what there is. Everything runs in .venv, which the first target that needs it makes.
PARAMS ?= params/demo.yaml
VENV ?= .venv
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu or cuda, by whether an NVIDIA GPU is here; `make KIND=cpu …` overrides
KIND ?= $(shell { [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q GPU; } && echo cuda || echo cpu)
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(KIND)
LOCK := requirements/$(KIND).lock
PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv installs the lock in a third of pip's time. It does not read pip's settings: where it fails, pip does it
UV := $(BIN)/uv pip install -q --no-deps --python $(BIN)/python
# Where pip's own index has no CPU build of torch, that one package comes from PyTorch's
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# The book's notebooks run in this venv's python, also where the user has another kernel of the same name
export JUPYTER_PREFER_ENV_PATH := 1
# Packages are installed without compiling them: half of pip's time, and most modules are never imported.
# Python compiles and keeps each at its first import, which this variable would forbid
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help report post plan check preflight test test-fast lint lab lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  with PARAMS=params/x.yaml for another run (now $(PARAMS)), KIND=cpu|cuda for another set of packages (now $(KIND))"

report: $(READY)  ## predict, serve, measure, explain: outputs/<run>/report.html
	@$(BIN)/servebook run $(PARAMS)

post: $(READY)  ## the post as Markdown and images for a blog: outputs/<run>/post
	@$(BIN)/servebook post $(PARAMS)

plan: $(READY)  ## every point of a run with its predicted time and cost
	@$(BIN)/servebook plan $(PARAMS)

check: $(READY)  ## validate a parameter file
	@$(BIN)/servebook check $(PARAMS)

preflight: $(READY)  ## is this machine fit to run it: driver, toolchain, disk, ports, GPU
	@$(BIN)/servebook preflight $(PARAMS)

# Two processes share the tests' files; one where engines would share a GPU
TESTERS ?= $(if $(filter cuda,$(KIND)),0,2)

# Engines, browsers and clocks meet a machine that others use too. A test that failed is run once more, by itself, after
# the others; what fails twice fails, and what passes then is named, to be mended
test: $(READY)  ## all tests
	@$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder || { [ $$? = 1 ] && \
		echo "make test: once more, by themselves, those that failed above; one that passes now is unsteady" && \
		$(BIN)/python -m pytest -rA --show-capture=no --last-failed --last-failed-no-failures none; }

test-fast: $(READY)  ## the quick tests of every package, under 90 s
	@$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile -m "not engine and not browser and not slow"

lint: $(READY)  ## ruff, mypy, mdformat
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mdformat --check *.md */README.md outputs/*/README.md docs/faults.md lib/servebook/report/glossary.md

audit: $(READY)  ## known vulnerabilities of the locked packages, where pip-audit can be had
	@[ -x $(VENV)/audit/bin/pip-audit ] || { $(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install -q pip-audit; } \
		2>/dev/null || { echo "audit: pip-audit cannot be installed here, nothing was audited" >&2; exit 1; }
	@$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(LOCK)

lab: $(READY)  ## JupyterLab on this machine, with a token; it opens at notebooks/README.md
	@$(BIN)/jupyter lab --ip=127.0.0.1 --ServerApp.root_dir='$(CURDIR)' --LabApp.default_url=/lab/tree/notebooks/README.md \
		--LabApp.app_settings_dir='$(CURDIR)/lib/servebook/lab/settings' $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(LAB)

lock: $(READY)  ## resolve requirements/*.in again into *.lock
	@$(BIN)/python requirements/lock.py cpu
	@$(BIN)/python requirements/lock.py cuda

clean:  ## remove the venv, caches and the demo's output; other runs stay
	rm -rf $(VENV) outputs/demo .pytest_cache .ruff_cache .mypy_cache lib/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Set up when the lock or the package's own metadata changed. The stamp comes last, so an interrupted one is done again.
$(READY): $(LOCK) pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "servebook needs Python 3.11, 3.12 or 3.13: install one, or name it with make PYTHON=…" >&2; exit 1; }
	@[ -z "$$(ls $(VENV)/.ready-* 2>/dev/null | grep -v '$@$$')" ] || { echo "set-up: another set of packages is in $(VENV), making it new"; rm -rf $(VENV); }
	@rm -f $@
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "servebook needs Python's venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "set-up: installing $$(grep -c == $(LOCK)) packages of $(LOCK) into $(VENV), a few minutes the first time"
ifeq ($(KIND),cpu)
	@torch=$$(grep '^torch==' $(LOCK)); $(PIP) install -q --no-deps --no-compile "$$torch" 2>/dev/null || \
		$(PIP) install -q --no-deps --no-compile --index-url $(TORCH_CPU_INDEX) "$$torch" || \
		{ echo "set-up: $$torch is neither at pip's index nor at $(TORCH_CPU_INDEX)" >&2; exit 1; }
	@$(PIP) uninstall -q -y $$(sed -n 's/^# without://p' requirements/cpu.in) 2>/dev/null
endif
	@$(PIP) install -q --no-deps --no-compile $$(grep '^uv==' $(LOCK)) && $(UV) -r $(LOCK) 2>/dev/null || \
		$(PIP) install -q --no-deps --no-compile -r $(LOCK)
	@$(PIP) install -q --no-deps --no-compile --no-build-isolation -e .
	@touch $@
