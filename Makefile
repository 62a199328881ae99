# make setup | demo | test | lint | schema | docs | build | gpu-check | gpu-check-more. Each works alone from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two threads on busy cores can be a hundred times slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
# Where it is set, every process compiles all that it imports: pip compiles nothing (--no-compile).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all lint schema docs docs-serve build gpu-check gpu-check-more clean

setup: $(VENV)/.installed

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

# One installation, which resolves once: the package with what tests and docs need.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(VENV)/.base $@


# Needs the package alone, without what tests and docs need.
# Up to four threads: nothing else should run meanwhile.
demo: export OMP_NUM_THREADS = $(shell n=$$(nproc); echo $$((n > 4 ? 4 : n)))
demo: $(VENV)/.base
	rm -rf demo
	$(BIN)/dit-lora tiny moving-shapes demo/model
	$(BIN)/dit-lora tiny shapes demo/moons --shape moon --clips 48
	$(BIN)/dit-lora tiny shapes demo/known --shape known --clips 96
	$(BIN)/dit-lora audit demo/moons --html demo/audit.html
	$(BIN)/dit-lora train recipes/demo/moon.yaml
	@echo
	@echo 'A LoRA has taught a small trained CogVideoX what a moon is. The stock Diffusers pipeline samples with it and'
	@echo 'without it; open demo/run/report.html for curves and samples. Next: docs/first_lora.md.'
	$(BIN)/python -m benchmarks.world.quality demo/model --adapter demo/run

test: setup
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m 'not thorough'

# What takes minutes as well: every fault in every tiny model.
test-all: setup
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The JSON Schema of recipes, which editors and completion read. Run it after a change of the recipe's sections.
schema: setup
	$(BIN)/python -c 'import json; from dit_lora.config.load import build_recipe_schema; print(json.dumps(build_recipe_schema(), indent=2))' \
	  > recipes/schema.json

# The site, into build/site; any broken link, anchor or page without a place in the navigation is an error.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: setup
	$(BIN)/mkdocs build --quiet --strict
	@echo 'Open build/site/index.html.'

docs-serve: setup
	$(BIN)/mkdocs serve

# What a release is: an sdist, and the wheel that the sdist makes.
build: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Two calls of less than ten minutes on one GPU: docs/gpu.md. In the project's environment, or with
# `make gpu-check PYTHON=python3` in that interpreter's, where nothing is installed. OUT: the folder of results.
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(BIN)/python
gpu-check gpu-check-more: setup
else
GPU_PYTHON := $(PYTHON)
endif

gpu-check:
	@PYTHON=$(GPU_PYTHON) benchmarks/gpu_check.sh first
gpu-check-more:
	@PYTHON=$(GPU_PYTHON) benchmarks/gpu_check.sh second

clean:
	rm -rf $(VENV) demo build dist *.egg-info
