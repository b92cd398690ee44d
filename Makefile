# make run    environment, then the demonstration on the embedded digits
# make reproduce   environment, then the paper's figures and tables at smoke scale, in runs/alpha_normec/smoke/figures
# make test   environment, then formatting, types and the quick tests: at most five minutes on two cores
# make test-all   the same with the slow tests, a federation over TLS and Triton's kernels; about 25 minutes
# make test-kernels   the kernels alone, without a GPU: interpreted, and compiled for one; a few minutes, Linux
# make docs   environment, then the documentation site in site/, from files of this machine alone
# make clean  remove the environment and the demonstration's runs

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests start hundreds of Python processes, which need not compile the same sources each.
TEST_ENV := PYTHONDONTWRITEBYTECODE=

# Where there is none, as with torch for CPUs: its interpreter works with the NumPy of constraints.txt.
TRITON := triton==3.8.0

.PHONY: run reproduce test test-quick test-all test-whole test-checks test-kernels check docs clean

run: .venv/.ready-run
	@echo "1. Private: 100 clients, (8, 1e-5) for each client against a server that sees sums; non-private for comparison;"
	@echo "   private settings chosen on validation data (benchmarks/privacy)"
	$(BIN)/normec compare --quiet --seed 0 --out runs/private \
		normec normec:decay=0.0,lr=0.028 clip21 dpsgd-norm dpsgd-clip normec:private=false gd:private=false
	@echo "2. Why error feedback: ten clients, one digit each, no noise; every method with its best step size"
	$(BIN)/normec compare --quiet --config examples/digits.toml --by grad_norm --lr 0.05,0.2,1 --out runs/digits \
		normec normec:server_norm=false clip21 ef21 dpsgd-norm dpsgd-clip gd

reproduce: .venv/.ready-run
	$(BIN)/python -m publications.alpha_normec figures all --scale smoke

# A file of tests stays in one process, because its tests share what they train; tests/conftest.py orders the files.
PYTEST := $(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# One core checks types while the other one tests.
test: .venv/.ready-test
	$(MAKE) --no-print-directory --jobs=2 check test-quick

test-quick: .venv/.ready-test
	$(PYTEST) -m "not slow"

# Processes that wait, for a network or for the end of another, leave a core to the checks and the kernels.
test-all: .venv/.ready-test
	$(MAKE) --no-print-directory --jobs=2 test-whole test-checks

test-whole: .venv/.ready-test
	$(PYTEST)

test-checks: check
	$(MAKE) --no-print-directory test-kernels

test-kernels: .venv/.ready-test .venv/.ready-kernels
	PYTHONPATH=.venv/kernels NORMEC_KERNELS=1 $(PYTEST) tests/kernels

check: .venv/.ready-test
	$(BIN)/ruff format --check src tests benchmarks publications
	$(BIN)/ruff check src tests benchmarks publications
	$(BIN)/mypy

# The variable silences an announcement of Material's; warnings about pages and links still end the build.
docs: .venv/.ready-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv runs/private runs/digits site

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/.ready-run: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) -e '.[all]'
	touch $@

.venv/.ready-test: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) -e '.[dev]'
	touch $@ .venv/.ready-run

.venv/.ready-kernels: Makefile | .venv/.ready-test
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/kernels $(TRITON)
	touch $@
