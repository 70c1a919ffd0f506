# Two commands do everything on a fresh machine: `make fuzz` runs the main job, `make test` the
# tests. Each makes its own virtual environment. `make hunt` are the tests that search for minutes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: fuzz test hunt lint docs bench clean

fuzz: $(VENV)/.core
	$(BIN)/kvstate fuzz --seconds 120 --workers 2 --known tests/known

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not hunt'

hunt: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m hunt

lint: $(VENV)/.dev
	$(BIN)/ruff check spec kvstate gpu tests
	$(BIN)/ruff format --check spec kvstate gpu tests
	$(BIN)/mypy

docs: $(VENV)/.core
	$(BIN)/kvstate diagram --write docs/machines
	PYTHONPATH=. $(BIN)/python -m tests.corpus

bench: $(VENV)/.core
	PYTHONPATH=. $(BIN)/python tests/bench/bookkeeping.py

$(VENV)/.core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
