# In a fresh checkout, every target installs what it needs first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
STAMP := $(VENV)/.installed
# An environment of its own: schemathesis brings forty packages.
SCHEMATHESIS := .cotenant/schemathesis
# Programs that are written for Slurm, with a hundred packages.
SLURM_CLIENTS := .cotenant/slurm-clients
# JupyterLab, its kernel and what drives it: notebooks run without them, too.
JUPYTER := .cotenant/jupyter
# torch is large, and only programs of jobs use it.
TORCH := .cotenant/torch
SOURCES := pyproject.toml hatch_build.py $(shell find protos -name "*.proto")
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export GRPC_VERBOSITY ?= ERROR
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile every module

ARGS ?=
# One run in several processes, scheduled by tests/support/scheduler.py.
RUN := python -m tests.support.compile && pytest -q -r fER --processes auto tests src

.PHONY: help setup test durations verify fuzz chaos test-vm test-images test-api test-slurm test-slurm-clients test-torch test-jupyter test-typescript operations tests lint bench docs site reproduce demo clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## install Cotenant and its development tools into .venv

$(STAMP): $(SOURCES) locks/dev.txt locks/build.txt
	@tools/setup $(VENV)
	@touch $@

test: $(STAMP) ## run lint and all tests (ARGS="-k store" selects tests)
	@printf '── lint\n'
	@python tools/lint.py $(MAKE) tests

tests: $(STAMP)
	@printf '\n── tests\n'
ifeq ($(strip $(ARGS)),)
	@$(RUN)
else
	@pytest -q $(ARGS)
endif

durations: $(STAMP) ## run all tests and record how long they take, for the schedule of `make test`
	@$(RUN) --record-durations

verify: $(STAMP) ## verify deeply, in hours, as root: all tests with many examples, long chaos, many seeds, mutants and inputs
	@printf '\n── tests\n'
	@$(RUN) --hypothesis-profile deep --timeout 3600
	@printf '\n── simulated control plane\n'
	@python -m tests.verification.control_plane --seeds 10000
	@printf '\n── decisions, live and simulated\n'
	@GRPC_VERBOSITY=NONE python -m tests.verification.decisions --worlds 1000
	@printf '\n── profiles\n'
	@python -m tests.verification.profiles
	@printf '\n── mutants\n'
	@python -m tests.verification.mutation --sample 400
	@$(MAKE) fuzz ARGS="--inputs 1000000"
	@$(MAKE) chaos ARGS="--steps 1000"
	@$(MAKE) test-vm

fuzz: $(STAMP) ## fuzz every decoder of external input (ARGS="--inputs 1000000", --only, --seed, --keep DIR)
	@printf '\n── fuzzing\n'
	@GRPC_VERBOSITY=NONE python -m tests.verification.fuzz $(ARGS)

chaos: $(STAMP) ## inject kills, partitions and other faults into a real mesh, as root (ARGS="--steps 1000 --seed 7 --keep DIR")
	@printf '\n── chaos\n'
	@python -m tests.verification.chaos $(ARGS)

test-vm: $(STAMP) ## run the node agent's tests in virtual machines, under QEMU (ARGS="-k numa" selects tests)
	@printf '\n── virtual machines\n'
	@python -m tools.vm $(ARGS)

test-api: $(STAMP) ## call a live mesh over HTTP as its OpenAPI document allows, with schemathesis
	@[ -x $(SCHEMATHESIS)/bin/schemathesis ] || { python -m venv $(SCHEMATHESIS) && \
	  $(SCHEMATHESIS)/bin/python -m pip install --quiet 'schemathesis>=4.32,<5'; }
	@COTENANT_API_EXAMPLES=$${COTENANT_API_EXAMPLES:-20} pytest -q --timeout 900 tests/end_to_end/test_gateway.py -k schemathesis

test-slurm: $(STAMP) ## install Slurm where apt can, as root, and test against a real one that the tests start
	@command -v slurmctld >/dev/null || tools/install_slurm
	@pytest -q --deep tests/end_to_end/test_pilots.py tests/end_to_end/test_slurm_bridge.py tests/end_to_end/test_slurm_acts.py \
	  tests/end_to_end/test_slurm_cpusets.py $(ARGS)

test-slurm-clients: $(STAMP) ## run dask-jobqueue, Snakemake and Parsl on a live mesh by Slurm's commands
	@[ -x $(SLURM_CLIENTS)/bin/snakemake ] || { python -m venv $(SLURM_CLIENTS) && \
	  $(SLURM_CLIENTS)/bin/python -m pip install --quiet 'dask-jobqueue>=0.9,<1' 'snakemake>=9,<10' \
	  'snakemake-executor-plugin-slurm>=2,<3' parsl; }
	@pytest -q --timeout 900 tests/end_to_end/test_slurm_clients.py

test-torch: $(STAMP) ## install torch and resize a real torchrun job on a live mesh
	@[ -x $(TORCH)/bin/torchrun ] || { python -m venv $(TORCH) && \
	  $(TORCH)/bin/python -m pip install --quiet torch==2.13.0 numpy; }
	@pytest -q --deep --timeout 900 tests/end_to_end/test_torchrun.py $(ARGS)

test-jupyter: $(STAMP) ## install JupyterLab, run a kernel of it through `cotenant notebook`, and notebooks in it
	@[ -x $(JUPYTER)/bin/jupyter-lab ] || { python -m venv $(JUPYTER) && \
	  $(JUPYTER)/bin/python -m pip install --quiet jupyterlab==4.6.6 websocket-client==1.9.2; }
	@pytest -q --deep --timeout 400 tests/end_to_end/test_jupyter.py tests/end_to_end/test_notebooks.py $(ARGS)

test-typescript: $(STAMP) ## build the client for Node with npm, pack it, and test it against a live mesh
	@cd clients/typescript && npm ci --ignore-scripts && npm run --silent build && npm pack --silent --ignore-scripts
	@pytest -q tests/end_to_end/test_gateway.py -k node

lint: $(STAMP) ## check style, types, package layers, protos and the documentation site
	@printf '── lint\n'
	@python tools/lint.py

bench: $(STAMP) ## run the benchmarks and compare with the committed results (ARGS="--only mesh,placement" selects some)
	@python -m tools.bench $(ARGS)

.PHONY: lock
lock: ## renew locks/ after a change of pyproject.toml (ARGS=--upgrade renews every version)
	@[ -x $(VENV)/bin/python ] || $(MAKE) setup  # not $(STAMP): what it builds may need the new locks
	@tools/lock $(ARGS)

docs: $(STAMP) ## regenerate the pages and figures of docs/ that come from the code
	@python tools/lifecycle.py
	@python tools/reasons.py
	@python tools/health.py
	@python tools/job_fields.py
	@python tools/failures.py
	@python tools/eliminator.py
	@python tools/metrics.py
	@python tools/replicas.py
	@python tools/dashboards.py
	@python tools/methods.py
	@python tools/quick_table.py
	@python tools/roles.py
	@python tools/api_reference.py
	@python tools/architecture.py

site: $(STAMP) ## build the documentation site into site/ and check every link
	@sphinx-build -q -W --keep-going -j auto -b dirhtml -d .cotenant/doctrees docs site && echo "   built site/index.html"

reproduce: $(STAMP) ## reproduce the results of five papers and update docs/reproduction (ARGS=--quick takes minutes)
	@mkdir -p docs/reproduction
	@for paper in coda genie aiturbo philly xiao; do \
	  printf '── %s\n' $$paper; \
	  cotenant reproduce $$paper --markdown --png docs/plots --keep report/kept $(ARGS) \
	    > docs/reproduction/$$paper.part || exit $$?; \
	  mv docs/reproduction/$$paper.part docs/reproduction/$$paper.md; \
	done
	@python tools/headlines.py

operations: $(STAMP) ## run the procedures of docs/operations.md with real processes and record the page (ARGS="--from REVISION")
	@python tools/operations.py $(ARGS)

test-images: $(STAMP) ## build the container images and run compose.yaml with Podman, as root on Debian
	@python -m tools.engine $(ARGS)

demo: $(STAMP) ## run the whole mesh on this machine with a mixed workload
	@cotenant demo $(ARGS)
	@printf '\n       . $(VENV)/bin/activate                  puts `cotenant` on your PATH\n'

clean: ## remove build outputs and caches; keep .venv
	@rm -rf dist build site report .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
