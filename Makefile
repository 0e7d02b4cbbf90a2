# Two commands need nothing but Python 3.11 and pip:
#   make parity    PyTorch and JAX compute the same loss and gradients; report in build/parity
#   make test      a case of each test at least; `make test-rest` has the others
# The rest is for development; `make help` lists it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported, which is a part of them: pip would compile all, for 40 s, on one core.
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find xentlib torch_impl jax_impl -type f -not -name '*.pyc' 2>/dev/null)
# A test that hangs where no Python runs takes its process with it, and would have it in every new one.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 1
BENCH_ARGS ?=
BOUNDS_ARGS ?=
CONFORMANCE_ARGS ?=
MUTANTS_ARGS ?=
PARITY_ARGS ?=
GPU_ARGS ?=
FUZZ_ARGS ?=
PTX_ARGS ?=
FIGURES_ARGS ?=
PYTHON_OLDEST ?= python3.11
PYTHON_NEWEST ?= python3.13

# DeepSpeed compiles nothing at installation and runs on the CPU.
export DS_BUILD_OPS ?= 0
export DS_ACCELERATOR ?= cpu
# What it compiles at its first start is kept here, where tests/helpers/orphans.py removes the lock that a
# killed run has left; every later one would wait for it.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/build/torch_extensions
# What is compiled is kept, whatever the environment says: hundreds of processes import torch and JAX here.
unexport PYTHONDONTWRITEBYTECODE
# The suite and the examples end with this make, and with them all that they have started.
export XENTLIB_ENDS_WITH := $(shell echo $$PPID)
# mkdocs-material's notice about its own future is not about this documentation.
export NO_MKDOCS_2_WARNING ?= 1

.PHONY: help parity test test-rest test-full cases mutants bits quick public classes recipes figures cross-check conformance bounds routes fuzz fuzz-pairs gpu ptx hlo tpu tpu-steps test-oldest test-newest test-wheel check-wheel lint format typecheck docs bench examples env env-new env-all advisories clean

help:
	@echo 'parity      the main job: both backends side by side, report in build/parity'
	@echo 'test        a case of each test at least, in four processes; PYTEST_ARGS="-k nll -x" narrows it, in one'
	@echo 'test-rest   the other cases of the suite'
	@echo 'test-full   the suite with whole products of options and shapes, of which it has every pair'
	@echo 'mutants     forty changes of one node each, and the tests that notice; .ci/mutants.tsv'
	@echo 'bits        fixed calls at BASE=<commit> and here: bits and collectives that are not the same'
	@echo 'quick       the first case of each test, without the slow ones: about a minute'
	@echo 'ptx         Triton programs compiled for GPUs that are not here; PTX_ARGS="--table FILE" writes the table'
	@echo 'gpu         timings, then kernels, contract and tests on a CUDA device, nine minutes each, build/gpu/gpu.json;'
	@echo '            installs nothing'
	@echo 'tpu-steps   whole training steps, compiled for TPUs without one'
	@echo 'tpu         programs of JAX compiled for TPUs without one, and what is in them; downloads 213 MB once'
	@echo 'hlo         programs of JAX compiled for an H200 without one, and what is in them; downloads 130 MB once'
	@echo 'test-wheel  the suite against the built wheel, away from the sources'
	@echo 'test-oldest cases of "make test" on the oldest versions that pyproject.toml admits; downloads 3 GB once'
	@echo 'test-newest the same on the newest, PYTHON_NEWEST=python3.13; downloads 3 GB once'
	@echo 'fuzz        random calls against the oracle for a minute; FUZZ_ARGS="--seed 1 --cases 10000"'
	@echo 'fuzz-pairs  the same of class probabilities, kept sets, divergences'
	@echo 'lint        ruff, formatting, mypy strict'
	@echo 'format      let ruff fix and format'
	@echo 'public      copy signatures and docstrings from their definitions into both backends'
	@echo 'classes     what becomes of each causal LM class of transformers, for the documentation'
	@echo 'recipes     peak memory of each example with and without xentlib, for the documentation'
	@echo 'conformance which rows the losses of other libraries hold; CONFORMANCE_ARGS="--only NAME" renews one'
	@echo 'bounds      the worst of each bound over fifty seeds, two instruction sets and both libraries; BOUNDS_ARGS="--seeds 5"'
	@echo 'cross-check what a step costs that CrossCheck checks, for the documentation'
	@echo 'routes      what heads in pieces send and need, for the documentation'
	@echo 'figures     what the README and the site open with, from docs/data/tokens.json; FIGURES_ARGS=--measure measures first'
	@echo 'docs        the documentation, strict, in build/site'
	@echo 'bench       time and memory beside the bare GEMMs and other libraries: about ten minutes'
	@echo 'examples    every example on one process, and its first gradient on two ranks beside full logits'
	@echo 'advisories  known vulnerabilities of the pins; needs a database of advisories on the network'
	@echo 'env-all     the environment with every extra'
	@echo 'clean       remove what was built, the environment included'

# --- environment: one stamp a layer, redone when pyproject.toml or constraints.txt changes ----------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing xentlib with PyTorch and JAX into $(VENV) (a few minutes the first time)'
	@$(PIP) -e '.[torch,jax,flax,cli]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	@echo 'installing what the tests need'
	@$(PIP) -e '.[test,plot,deepspeed,trainers]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp
	@echo 'installing the libraries that the benchmark measures the head beside'
	@$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	@echo 'installing the linters and the documentation builder'
	@$(PIP) -e '.[lint,docs]'
	@touch $@

env: $(VENV)/dev.stamp

# All of it at once, where there is nothing yet: one resolution in place of three.
env-new: | $(BIN)/python
	@[ -e $(VENV)/run.stamp ] || { echo 'installing xentlib, its tests and linters into $(VENV)'; \
	  $(PIP) -e '.[torch,jax,flax,cli,test,plot,deepspeed,trainers,lint,docs]'; \
	  touch $(VENV)/run.stamp $(VENV)/test.stamp $(VENV)/dev.stamp; }
	@$(MAKE) --no-print-directory env

env-all: $(VENV)/dev.stamp
	@echo 'installing every extra'
	@$(PIP) -e '.[all,docs,lint,test]'

# --- the wheel, made of the source archive, twice to the same bytes, in an environment of its own, away from the sources --

WHEEL_ENV := build/wheel-env

# The installed packages of $(VENV) are borrowed by path; its editable xentlib is not, as a .pth is not read through a .pth.
$(WHEEL_ENV)/.stamp: $(SOURCES) pyproject.toml $(VENV)/test.stamp
	@rm -rf $(WHEEL_ENV)
	@$(BIN)/python .ci/build.py --check
	@$(BIN)/python -m venv --without-pip $(WHEEL_ENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(WHEEL_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@$(BIN)/python -m pip --python $(WHEEL_ENV)/bin/python install -qq --no-deps --ignore-installed dist/xentlib-*.whl
	@touch $@

# --- JAX's compiler for CUDA, which needs no device and none of NVIDIA's libraries: two wheels of 130 MB, 430 MB installed

HLO_ENV := .venv-hlo
JAXLIB := $(shell sed -n 's/^jaxlib==//p' constraints.txt)

# The rest is borrowed from $(VENV), with what it borrows itself.
$(HLO_ENV)/hlo.stamp: constraints.txt $(VENV)/test.stamp
	@echo 'installing the compiler of JAX $(JAXLIB) for CUDA into $(HLO_ENV)'
	@rm -rf $(HLO_ENV)
	@$(BIN)/python -m venv $(HLO_ENV)
	@$(HLO_ENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	  jax-cuda13-plugin==$(JAXLIB) jax-cuda13-pjrt==$(JAXLIB)
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$purelib")')" \
	  > "$$($(HLO_ENV)/bin/python -c "$$purelib")/borrowed.pth"
	@touch $@

# --- the ranges of pyproject.toml: their oldest and newest versions, each in an environment of its own ------------------

.venv-oldest/range.stamp: PYTHON_OF_RANGE = $(PYTHON_OLDEST)
.venv-newest/range.stamp: PYTHON_OF_RANGE = $(PYTHON_NEWEST)

.venv-%/range.stamp: constraints-%.txt pyproject.toml
	@$(PYTHON_OF_RANGE) -c '' 2>/dev/null || { echo '$(PYTHON_OF_RANGE) is needed on the path, or' \
	  'make test-$* PYTHON_$(shell echo $* | tr a-z A-Z)=/path/to/python' >&2; exit 1; }
	@echo 'installing the $* versions into .venv-$*: 3 GB to download, 6 GB installed, mostly CUDA' \
	  'libraries of PyTorch'
	@$(PYTHON_OF_RANGE) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check -c $< \
	  -e '.[torch,flax,deepspeed,hf,cli,test]'
	@touch $@

# NumPy 1.26 is admitted where jax is not installed.
.venv-oldest/numpy.stamp: pyproject.toml .venv-oldest/range.stamp
	@$(PYTHON_OLDEST) -m venv .venv-oldest/numpy
	@.venv-oldest/numpy/bin/python -m pip install -qq --disable-pip-version-check \
	  -e '.[test]' numpy==1.26.0 ml_dtypes==0.5.0
	@touch $@

# What no framework's version changes is left to `make test` and `make test-rest`. The cases are those of
# `make test`; PYTEST_ARGS="--cases all" has all, and takes more than an hour.
RANGE_TESTS := $(filter-out tests/docs/% $(patsubst %,\%/test_%.py,bench bench_command cli cli_resume parity_distillation \
  parity_text parity_training plan plan_command plan_routes plan_time processes progress report report_page), \
  $(wildcard tests/*/test_*.py))
NUMPY_TESTS := $(patsubst %,tests/definition/test_%.py,checks checks_options contract_checks plan public \
  reference) $(wildcard tests/numerics/test_interop*.py)
# DeepSpeed compiles for one PyTorch at a time.
RANGE_ENV = PATH="$(CURDIR)/.venv-$(1)/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/build/torch_extensions-$(1)"

# --- what is run --------------------------------------------------------------------------------------------------------

parity: $(VENV)/run.stamp
	$(BIN)/xentlib parity --out build/parity $(PARITY_ARGS)

# Of each function a case at least, in each backend, and the same cases at each commit.
test: $(VENV)/test.stamp
	$(BIN)/pytest --cases few $(PYTEST_ARGS)

# The cases that `make test` leaves out.
test-rest: $(VENV)/test.stamp
	$(BIN)/pytest --cases rest $(PYTEST_ARGS)

# Which cases those are, after a run of all of them on an idle machine, which takes half an hour or more.
cases: $(VENV)/test.stamp
	$(BIN)/pytest $(PYTEST_ARGS)
	$(BIN)/python .ci/cases.py

# While one works: what compiled programs build/jax_cache has are not compiled again.
quick: $(VENV)/test.stamp
	$(BIN)/pytest --quick $(PYTEST_ARGS)

# Whole products of options, shapes and routes; the suite has every pair of them.
test-full: $(VENV)/test.stamp
	$(BIN)/pytest --full $(PYTEST_ARGS)

# A run of the suite, then the tests that reach each changed node: an hour or more.
mutants: $(VENV)/test.stamp
	$(BIN)/python .ci/mutants.py $(MUTANTS_ARGS)

# Fixed calls at BASE and here: bits and collectives that are not the same.
BASE ?= HEAD
bits: $(VENV)/test.stamp
	$(BIN)/python .ci/bits.py $(BASE)

fuzz-pairs: $(VENV)/test.stamp
	$(BIN)/python tests/fuzz_pairs.py $(FUZZ_ARGS)

fuzz: $(VENV)/test.stamp
	$(BIN)/python tests/fuzz.py $(FUZZ_ARGS)

test-oldest: .venv-oldest/range.stamp .venv-oldest/numpy.stamp
	.venv-oldest/numpy/bin/pytest $(NUMPY_TESTS)
	$(call RANGE_ENV,oldest) .venv-oldest/bin/pytest $(RANGE_TESTS) --cases few $(PYTEST_ARGS)

test-newest: .venv-newest/range.stamp
	$(call RANGE_ENV,newest) .venv-newest/bin/pytest $(RANGE_TESTS) --cases few $(PYTEST_ARGS)

# Triton's programs for sm_80, sm_90 and sm_100, without a GPU: what docs/data/kernels.json says of their code.
ptx: $(VENV)/test.stamp
	$(BIN)/python .ci/ptx.py --against docs/data/kernels.json $(PTX_ARGS)

# For an image that has PyTorch and JAX already, and no network: whatever Python is there.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) .ci/gpu.py $(GPU_ARGS)

hlo: $(HLO_ENV)/hlo.stamp
	$(HLO_ENV)/bin/python -m pytest -m hlo tests/kernels/test_hlo_jax.py

# The compiler of JAX for TPUs, which needs none of them. Not the newest: a table holds for one compiler.
build/libtpu/.stamp: Makefile
	@mkdir -p build
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target build/libtpu 'libtpu==0.0.42.*'
	@touch $@

tpu: $(VENV)/test.stamp build/libtpu/.stamp
	$(BIN)/python .ci/tpu.py $(TPU_ARGS)

tpu-steps: $(VENV)/test.stamp build/libtpu/.stamp
	$(BIN)/python .ci/tpu_step.py $(TPU_ARGS)

test-wheel: $(WHEEL_ENV)/.stamp
	$(eval away := $(shell mktemp -d))
	@trap 'rm -rf $(away)' EXIT; cd $(away); \
	  "$(CURDIR)/$(WHEEL_ENV)/bin/python" "$(CURDIR)/.ci/check_wheel.py"; \
	  "$(CURDIR)/$(WHEEL_ENV)/bin/python" -m pytest -c "$(CURDIR)/pyproject.toml" "$(CURDIR)/tests" $(PYTEST_ARGS)

check-wheel: $(WHEEL_ENV)/.stamp
	$(eval away := $(shell mktemp -d))
	@trap 'rm -rf $(away)' EXIT; cd $(away); \
	  "$(CURDIR)/$(WHEEL_ENV)/bin/python" "$(CURDIR)/.ci/check_wheel.py"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lines.py --budget
	@$(MAKE) --no-print-directory typecheck

# Of the packages that `make` installs. Not part of .ci/run: what it finds changes without a change here.
advisories: $(BIN)/python
	@$(BIN)/python -m venv build/pip-audit
	@build/pip-audit/bin/python -m pip install -qq --disable-pip-version-check pip-audit
	build/pip-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# Signatures and docstrings where an editor finds them: copies of the definitions in xentlib/.
public:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) .ci/public.py

# Of the installed transformers, as the suite holds them.
classes: $(VENV)/test.stamp
	$(BIN)/python .ci/causal_lm.py

# Peak memory of each file of examples/, and the distance of its first gradient to full logits.
recipes: $(VENV)/test.stamp
	$(BIN)/python .ci/recipes.py $(RECIPES)

# Which rows of the contract the losses of other libraries hold, for docs/contract.md.
conformance: $(VENV)/bench.stamp
	$(BIN)/python .ci/conformance.py $(CONFORMANCE_ARGS)

# Of fifty seeds: what the bounds of the contract that are measured are made of.
bounds: $(VENV)/run.stamp
	$(BIN)/python .ci/bounds.py $(BOUNDS_ARGS)

# Time and memory of a checked step, for docs/check-a-run.md.
cross-check: $(VENV)/test.stamp
	$(BIN)/python .ci/cross_check.py

# Arithmetic alone, for docs/communication.md.
routes: $(VENV)/run.stamp
	$(BIN)/python .ci/routes.py

# Of docs/data/tokens.json and bench/results/*.json.
figures: $(VENV)/test.stamp
	$(BIN)/python .ci/figures.py $(FIGURES_ARGS)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: build/typecheck.stamp

build/typecheck.stamp: $(SOURCES) pyproject.toml $(VENV)/dev.stamp
	@$(BIN)/mypy
	@mkdir -p $(@D)
	@touch $@

docs: $(VENV)/dev.stamp
	$(BIN)/mkdocs build --strict --site-dir build/site

bench: $(VENV)/bench.stamp
	$(BIN)/xentlib bench --suite cpu --out build/bench $(BENCH_ARGS)

# DeepSpeed looks for ninja on the path. Its warnings of what is deprecated are for its authors.
GUARDED := $(BIN)/python -P tests/helpers/orphans.py
ALONE := PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 $(GUARDED)
EXAMPLES := $(wildcard examples/*.py)

# Each alone, as a reader runs it; then its first gradient, on ranks or devices, beside full logits.
examples: $(VENV)/test.stamp
	@printf '%s\n' $(patsubst %,'$(ALONE) %',$(EXAMPLES)) \
	  $(patsubst %,'$(BIN)/python .ci/recipes.py --compare %',$(basename $(notdir $(EXAMPLES)))) | \
	  xargs -d '\n' -P 2 -I COMMAND $(SHELL) -c \
	    'said=$$(COMMAND 2>&1) || failed=1; echo "== COMMAND" | sed "s/.* //;s/^/== /"; echo "$$said"; exit $${failed:-0}'

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(HLO_ENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
