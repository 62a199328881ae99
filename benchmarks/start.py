"""Time from a recipe to its first batch, with everything cached: what a restart costs.

    python -m benchmarks.start [--samples 100000] [--work FOLDER]

Images of one kilobyte or less, in folders of classes; their cache entries are random, written under the keys that
a run asks for. The row of 100 samples has the imports in it; neither has the loading of the model.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.cache import TensorCache, encode_entry
from dit_lora.data.loading.batch import DataReadingSettings, PositionSampler
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.files import write_folder_atomically
from dit_lora.training.session.session import start_run_session
from dit_lora.training.tasks.diffusion.cache_plan import make_cache_plan
from dit_lora.training.tasks.diffusion.precompute import precompute

_CLASSES = [f"class {number}" for number in range(2, 12)]
_SHARD = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--work", type=Path, help="Kept; by default a temporary folder.")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.work or Path(folder), arguments.samples)


def run(work: Path, samples: int) -> None:
    model = work / "model"
    if not model.exists():
        with write_folder_atomically(model) as staged:
            get_family("dit").build_tiny_checkpoint("dit-tiny", staged, 0)
    print("| samples | sources and classes | keys and cache | order and first batch | in all |")
    print("|---:|---:|---:|---:|---:|")
    for count in (100, samples):  # the first pays for imports
        data = work / f"images_{count}"
        if not data.exists():
            with write_folder_atomically(data) as staged:
                write_images(staged, count)
        values = {
            "model": {"family": "dit", "path": str(model)},
            "data": {"path": str(data), "height": 32, "width": 32, "workers": 0},
            "train": {"steps": 1},
            "run": {"dir": str(work / f"run_{count}")},
        }
        recipe = parse_recipe(values, "benchmark")
        fill(recipe, get_family("dit").open(recipe.model, recipe))
        parts = restart(recipe)
        cells = " | ".join(f"{part:.1f} s" for part in (*parts, sum(parts)))
        print(f"| {count:,} | {cells} |", flush=True)


def restart(recipe: Recipe) -> tuple[float, float, float]:
    """Seconds of what a restarted run does before its first batch, but for the model."""
    began = time.perf_counter()
    checkpoint = get_family("dit").open(recipe.model, recipe)
    opened_at = time.perf_counter()
    AcceleratorState._reset_state(reset_partial_state=True)
    with start_run_session(recipe) as session:
        clips = precompute(session, checkpoint).training_set
        planned = time.perf_counter()
        quarantine = Quarantine(Path(recipe.run.dir) / "quarantine.jsonl")
        topology = {"batch_size": 4, "accumulate": 1, "rank": 0, "num_ranks": 1}
        sampler = PositionSampler(start_step=0, steps=1, **topology)
        config = DataReadingSettings(
            sampler,
            seed=0,
            caption_dropout=0.1,
            quarantine=quarantine,
            workers=0,
            prefetch=2,
            pin_memory=False,
        )
        batch = next(iter(clips.make_loader(config)))
        end = time.perf_counter()
    assert len(batch.ids) == 4
    assert not batch.faults
    return opened_at - began, planned - opened_at, end - planned


def write_images(folder: Path, samples: int) -> None:
    """Write PNG files, no two with the same bytes."""
    draws = np.random.default_rng(0)
    for number in range(samples):
        path = folder / _CLASSES[number % len(_CLASSES)] / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (16, 16, 3), np.uint8)).save(path)


def fill(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Random latents and the classes' entries, as shards."""
    plan = make_cache_plan(recipe, checkpoint.encoders, torch.float32, samples_per_step=4, quiet=False)
    latents = {name: torch.randn(4, 4, 4) for name in ("latent_mean", "latent_logvar")}
    videos = TensorCache(recipe.cache_dir / "videos")
    missing = [entry for entry in plan.planned_samples if not videos.is_complete(entry.video.key)]
    for start in range(0, len(missing), _SHARD):
        jobs = [entry.video for entry in missing[start : start + _SHARD]]
        videos.write_entries([encode_entry(j.key, latents, sample=j.sample, facts=j.facts) for j in jobs])


if __name__ == "__main__":
    main()
