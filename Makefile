# Every target sets up what it needs: a virtual environment in .venv with the versions of deploy/constraints.txt.
.PHONY: serve test test-gpu lint format clean
PYTHON ?= python3
BIN := .venv/bin

serve: .venv/.serve
	$(BIN)/vision-sidecar serve $(ARGS)

test: lint
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(ARGS)

test-gpu: .venv/.dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.serve: pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv .
	touch $@

.venv/.dev: pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv '.[dev]'
	touch $@ .venv/.serve

clean:
	rm -rf .venv build dist *.egg-info
