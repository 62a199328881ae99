# make setup | demo | test | lint | docs | build | gpu-check. Each works alone from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two threads on busy cores can be a hundred times slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1

.PHONY: setup demo test test-all lint docs docs-serve build gpu-check clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

LAUNCH := $(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml

demo: setup
	rm -rf demo
	$(BIN)/dit-lora tiny cogvideox-2b demo/model
	$(BIN)/dit-lora shapes demo/clips
	$(BIN)/dit-lora audit demo/clips --html demo/audit.html
	$(LAUNCH) recipes/lora.py recipes/smoke/cogvideox.yaml model.path=demo/model data.path=demo/clips \
	  data.frames=17 run.dir=demo/run train.steps=200 train.batch_size=4 train.save_every=100 validation.every=50 \
	  lora.rank=16 lora.alpha=16 optim.groups.adapter.lr=5e-3
	$(BIN)/dit-lora sample demo/run --prompt 'a blue square moves to the left over a dark background' \
	  --inference-steps 4
	@echo
	@echo 'Trained a LoRA on a random tiny CogVideoX, then loaded it into the stock Diffusers pipeline.'
	@echo 'The model knows nothing, so its videos are noise; the held-out loss above is what fell.'
	@echo 'Open demo/run/report.html for curves and samples. Next: docs/first_lora.md.'

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m 'not thorough'

# What takes minutes as well: every fault in every tiny model.
test-all: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

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

# Under ten minutes on one GPU; what there is no time for says so. In the project's environment, or with
# `make gpu-check PYTHON=python3` in that interpreter's, where nothing is installed. OUT: a folder for copies.
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(BIN)/python
gpu-check: setup
else
GPU_PYTHON := $(PYTHON)
endif
GPU_RESULTS := build/gpu-check
# Without tests/conftest.py, which needs Diffusers.
KERNEL_TESTS := -m pytest -q --confcutdir=tests/dit_lora_kernels tests/dit_lora_kernels

gpu-check: export PYTHONPATH := kernels:tests:.
gpu-check: export PYTHONUNBUFFERED := 1
gpu-check:
	@$(GPU_PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo 'gpu-check: $(GPU_PYTHON) has no torch that finds a CUDA device' >&2; exit 1; }
	@rm -rf $(GPU_RESULTS) && mkdir -p $(GPU_RESULTS)
	@status=0; \
	run() { \
	  name=$$1; shift; echo "== $$name"; \
	  { timeout --kill-after=5 "$$@" 2>&1; echo $$? > $(GPU_RESULTS)/code; } | tee $(GPU_RESULTS)/$$name.log; \
	  code=$$(cat $(GPU_RESULTS)/code); rm $(GPU_RESULTS)/code; \
	  if [ $$code -ne 0 ]; then status=1; echo "== $$name failed with $$code"; fi; \
	  if [ "$$OUT" ]; then cp $(GPU_RESULTS)/* "$$OUT"; fi; }; \
	needs() { \
	  name=$$1; shift; $(GPU_PYTHON) -c "import $$*" 2>/dev/null && return; \
	  status=1; echo "== $$name left out: it needs the packages of pyproject.toml"; return 1; }; \
	run kernel_tests 140 $(GPU_PYTHON) $(KERNEL_TESTS); \
	if needs gpu_tests dit_lora.families; then \
	  run gpu_tests 35 $(GPU_PYTHON) -m pytest -q -m gpu $$(grep -rl 'mark.gpu' tests/dit_lora); fi; \
	run bench 235 $(GPU_PYTHON) kernels/bench/bench.py --budget 200 --out $(GPU_RESULTS); \
	if needs steps benchmarks.step; then \
	  run steps 145 $(GPU_PYTHON) -m benchmarks.step --budget 110 --steps 3 --out $(GPU_RESULTS); fi; \
	exit $$status

clean:
	rm -rf $(VENV) demo build dist *.egg-info
