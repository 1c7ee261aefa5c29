# Every target sets up what it needs: a virtual environment in .venv with the versions of deploy/constraints.txt.
.PHONY: serve test test-gpu soak lint format clean
PYTHON ?= python3
BIN := .venv/bin
# One mark for each build of torch that was asked for, so that another one is installed when it is asked for.
SERVE := .venv/.serve$(TORCH)
DEV := .venv/.dev$(TORCH)

serve: $(SERVE)
	$(BIN)/vision-sidecar serve $(ARGS)

test: lint
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(ARGS)

test-gpu: $(DEV)
	$(BIN)/python -m pytest -m gpu $(ARGS)

soak: $(DEV)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m soak -s tests/test_soak.py $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(SERVE): pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv .
	rm -f .venv/.serve* .venv/.dev*
	touch $@

$(DEV): pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv '.[dev]'
	rm -f .venv/.serve* .venv/.dev*
	touch $@ $(SERVE)

clean:
	rm -rf .venv build dist *.egg-info
