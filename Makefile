# Two commands do everything on a fresh machine: `make fuzz` runs the main job, `make test` the tests.
# Each makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: fuzz test lint docs bench clean

fuzz: $(VENV)/.fuzz
	$(BIN)/kvstate fuzz --seconds 60 --workers 2

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check spec kvstate gpu tests
	$(BIN)/ruff format --check spec kvstate gpu tests
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/kvstate diagram --write docs/machines

bench: $(VENV)/.dev
	$(BIN)/python tests/bench/bookkeeping.py

$(VENV)/.fuzz: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
