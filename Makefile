# `make demo` and `make test` need nothing but Python 3.11 and pip.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Processes of pytest: one more than two cores, as tests of real processes also wait for timeouts. `--dist worksteal` keeps
# most tests of a module in one process, so that what they share is made once.
TEST_PROCESSES ?= 3
SUDO ?= $(shell test $$(id -u) = 0 || echo sudo)

.PHONY: demo demo-short test test-all older-torch browser launchers neighbours lint docs picture library clean

demo: $(INSTALLED)         ## plan the worked example, train a small GPT with and without a failed worker
	$(BIN)/slipstream demo

demo-short: $(INSTALLED)   ## the same in seconds
	$(BIN)/slipstream demo --short

PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations=15

test: $(INSTALLED)         ## the tests of every change: what a change can break by itself
	$(PYTEST) -m "not slow"

test-all: test             ## these, and then the rest: long runs of real processes, launchers, browser, chaos
	$(PYTEST) -m slow --timeout=900

OLDER_TORCH := out/older-torch

# pip's usual index has torch for GPUs, with what that needs 4.6 GB; PIP_INDEX_URL=https://download.pytorch.org/whl/cpu has less.
$(OLDER_TORCH)/torch: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(OLDER_TORCH) torch==2.11.0

older-torch: $(OLDER_TORCH)/torch  ## tests of what uses torch's private parts, on the oldest torch that is supported
	PYTHONPATH=$(OLDER_TORCH) $(PYTEST) -m "not slow" tests/runtime/replay tests/runtime/ranks tests/runtime/models tests/runtime/state tests/runtime/computing

browser:                   ## Chromium for the tests of pages (Debian, Ubuntu)
	command -v chromium > /dev/null || { $(SUDO) apt-get update && $(SUDO) apt-get install --yes --no-install-recommends chromium; }

# The tests run daemons of their own. Where there is systemd, munge's package also starts its service.
launchers: $(INSTALLED)    ## tests of real launchers; installs SLURM and Open MPI (Debian, Ubuntu) and Kubernetes' schemas
	@for name in sbatch slurmctld slurmd munged mpirun; do \
	  PATH="$$PATH:/usr/sbin" command -v $$name > /dev/null || missing=1; \
	done; test -z "$$missing" || { $(SUDO) apt-get update && $(SUDO) apt-get install --yes --no-install-recommends \
	  munge openmpi-bin slurm-client slurmctld slurmd; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[launchers]'
	$(BIN)/python -m pytest tests/launchers

OLDER_TITAN := out/neighbours/torchtitan-0.2.2
NEMO := out/neighbours/nemo-automodel
MEGATRON := out/neighbours/megatron-core

neighbours: $(INSTALLED)   ## tests of plans in other libraries; installs torchtitan (a gigabyte), an older version, NeMo Automodel and Megatron Core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[torchtitan]'
	test -d $(OLDER_TITAN) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(OLDER_TITAN) torchtitan==0.2.2 'tomli>=2,<3'
	test -d $(NEMO) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(NEMO) nemo-automodel==0.7.0
	test -d $(MEGATRON) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(MEGATRON) megatron-core==0.16.1
	$(BIN)/python -m pytest tests/interop

lint: $(INSTALLED)         ## style, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)         ## the documentation, in out/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going --quiet -b html docs out/docs

picture: $(INSTALLED)      ## redraw the README's picture
	$(BIN)/slipstream plan cli/jobs/worked-example.toml --failed 1.2 --out out/worked-example.json
	$(BIN)/slipstream show out/worked-example.json --svg docs/worked-example.svg > /dev/null

LIBRARY := $(patsubst %/job.toml,%,$(wildcard schedules/library/*/job.toml))

library: $(INSTALLED)      ## plan the tables of schedules/library anew
	for job in $(LIBRARY); do \
	  rm -rf $$job/index.json $$job/parts && \
	  $(BIN)/slipstream table $$job/job.toml --max-failures 4 --time-limit 30 --out $$job || exit 1; \
	done

# torch first and by its exact version, so that no other package brings another build. The inner loops of the planner and of
# dealing are compiled here, so that neither the first plan nor the first iteration waits for them.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("slipstream needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m slipstream.planner.compiled
	$(BIN)/python -m slipstream.schedules.dealing.compiled
	touch $@

clean:                     ## remove the environment and everything generated
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
