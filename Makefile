# make demo  a virtual environment, the package, and its main job on images made on the spot
# make test  the same environment with the test tools, and the tests of every change
# make test-all  every test: those marked nightly too, then those that measure time, alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUIET := --quiet --disable-pip-version-check
HELD := $(QUIET) -c constraints.txt

.PHONY: demo test test-all lint package format bench fuzz mutants coverage picture gpu constraints clean

demo: $(VENV)/.installed-demo
	$(BIN)/dataloaders demo

# One thread for torch: several test processes share the cores, and waiting threads would spin.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --junitxml .pytest_cache/report.xml

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not measures" --numprocesses auto --dist worksteal
	$(BIN)/python -m pytest -m measures

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

package: $(VENV)/.installed-dev
	$(BIN)/python .ci/package.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench

# Hostile caches, damaged at random, watched: make fuzz TRIES=100000
TRIES := 1000

fuzz: $(VENV)/.installed-dev
	FUZZ_TRIES=$(TRIES) $(BIN)/python -m pytest tests/test_fuzz.py -m nightly --timeout 0

# Small changes that tests should notice: make mutants MODULES=dataloaders/samplers ARGS="--sample 40", or
# ARGS=--renew; ARGS=--broken takes the versions broken by hand
MODULES :=
ARGS :=

mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants $(MODULES) $(ARGS)

# Lines and branches that the tests run, by room: make coverage RENEW=--renew TESTS=tests/test_pool.py
RENEW :=
TESTS :=

coverage: $(VENV)/.installed-dev
	$(BIN)/python .ci/covered.py $(RENEW) $(TESTS)

# README's picture: a check of the demo's script, its page in a headless Chromium
picture: $(VENV)/.installed-dev
	$(BIN)/python -m bench.picture docs/check.png

# pytest -m gpu, then the bench cases for a GPU, 8 minutes at most: bench/results/gpu.xml and gpu.json.
# Machines with a GPU come with a torch of their own: this takes the python that is there.
gpu:
	$(PYTHON) -m bench --gpu

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each purpose: a second call installs nothing unless the requirements changed.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(HELD) -e '.[check,vision,h5]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(HELD) -e '.[dev]'
	touch $@ $(VENV)/.installed-demo

# The newest versions of everything. On Python 3.10 no version is held: many of these need 3.11.
constraints:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(QUIET) -e '.[dev]'
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed 's/$$/; python_version >= "3.11"/' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
