# From a fresh checkout, `make demo` and `make test` do all the set-up themselves.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml hatch_build.py $(wildcard protos/cotenant/v1/*.proto)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export GRPC_VERBOSITY ?= ERROR
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

ARGS ?=
# Tests that leave each other alone run on all cores; those with real processes and control groups two at a time, for
# they wait a lot; those that measure real cores one after another.
APART := $(filter-out tests/unit/node_agent,$(wildcard tests/unit/*)) tests/contract tests/integration tests/repository src
APART += tests/verification/fuzz tests/verification/control_plane

.PHONY: help setup test fuzz chaos test-vm test-images operations tests lint bench docs site reproduce demo clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## install Cotenant and its tools into .venv

$(STAMP): $(SOURCES)
	@tools/setup $(VENV)
	@touch $@

test: lint tests ## lint, then all tests (ARGS="-k store" for some)

tests: $(STAMP)
	@printf '\n── tests\n'
ifeq ($(strip $(ARGS)),)
	@pytest -q -r fER -n auto --dist worksteal $(APART)
	@pytest -q -r fER -n 2 --dist loadfile -m "not calm" $(addprefix --ignore=,$(APART)) tests
	@pytest -q -r fER -m calm $(addprefix --ignore=,$(APART)) tests
else
	@pytest -q $(ARGS)
endif

fuzz: $(STAMP) ## bad inputs to everything that reads others' (ARGS="--inputs 1000000", --only, --seed, --keep DIR)
	@printf '\n── fuzzing\n'
	@GRPC_VERBOSITY=NONE python -m tests.verification.fuzz $(ARGS)

chaos: $(STAMP) ## kills, partitions and worse to a mesh of real processes, as root (ARGS="--steps 1000 --seed 7 --keep DIR")
	@printf '\n── chaos\n'
	@python -m tests.verification.chaos $(ARGS)

test-vm: $(STAMP) ## the node agent's tests on other machines, under QEMU (ARGS="-k numa" for some)
	@printf '\n── machines\n'
	@python -m tools.vm $(ARGS)

lint: $(STAMP) ## style, types, layers and the wire contract
	@printf '── lint\n'
	@python tools/lint.py

bench: $(STAMP) ## the benchmarks, beside the last committed result (ARGS="--only mesh,placement" for some)
	@python -m tools.bench $(ARGS)

docs: $(STAMP) ## draw the pages and pictures of docs/ that come from the code
	@python tools/lifecycle.py
	@python tools/reasons.py
	@python tools/health.py
	@python tools/failures.py
	@python tools/eliminator.py
	@python tools/metrics.py
	@python tools/replicas.py
	@python tools/dashboards.py
	@python tools/roles.py
	@python tools/architecture.py

site: $(STAMP) ## build the documentation site into site/, with every link checked
	@sphinx-build -q -W --keep-going -j auto -b dirhtml -d .cotenant/doctrees docs site && echo "   site/index.html is built"

reproduce: $(STAMP) ## what five papers report, measured again, and written down in docs (ARGS=--quick for minutes)
	@mkdir -p docs/reproduction
	@for paper in coda genie aiturbo philly xiao; do \
	  printf '── %s\n' $$paper; \
	  cotenant reproduce $$paper --markdown --png docs/plots --keep report/kept $(ARGS) \
	    > docs/reproduction/$$paper.part || exit $$?; \
	  mv docs/reproduction/$$paper.part docs/reproduction/$$paper.md; \
	done
	@python tools/headlines.py

operations: $(STAMP) ## do what docs/operations.md tells of, with real processes, and write the page (ARGS="--from REVISION")
	@python tools/operations.py $(ARGS)

test-images: $(STAMP) ## build the images and bring compose.yaml up, with Podman, as root on Debian
	@python -m tools.engine $(ARGS)

demo: $(STAMP) ## the whole mesh on this machine, with a real mixed workload
	@cotenant demo $(ARGS)
	@printf '\n       . $(VENV)/bin/activate                  puts cotenant on your PATH\n'

clean: ## remove what was built and cached; .venv stays
	@rm -rf dist build site report .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
