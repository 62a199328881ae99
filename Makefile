# make setup | demo | test | lint. Each works alone from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two threads on busy cores can be a hundred times slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1

.PHONY: setup demo test lint clean

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
	$(LAUNCH) recipes/lora.py recipes/smoke/cogvideox.yaml model.path=demo/model data.path=demo/clips \
	  data.frames=17 run.dir=demo/run train.steps=200 train.batch_size=4 train.save_every=100 validation.every=50 \
	  lora.rank=16 lora.alpha=16 optim.groups.adapter.lr=5e-3
	$(BIN)/dit-lora sample demo/run --prompt 'a blue square moves to the left over a dark background' \
	  --inference-steps 4
	@echo
	@echo 'Trained a LoRA on a random tiny CogVideoX, then loaded it into the stock Diffusers pipeline.'
	@echo 'The model knows nothing, so its videos are noise; the held-out loss above is what fell.'
	@echo 'Open demo/run/report.html for curves and samples. Next: README.md, "Your own clips".'

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo build dist *.egg-info
