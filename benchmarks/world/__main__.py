"""Train the base of the demo from nothing, as it is shipped in dit_lora/models/moving_shapes.

    python -m benchmarks.world WORK [--vae-steps 2200] [--decoder-steps 2500] [--steps 20500] [--clips 6000]
        [--overrides validation.every=5000]

WORK gets the clips, the VAE, the run and, in WORK/moving_shapes, the checkpoint in fp16. On one core the VAE took 41
minutes and a step of the denoiser 0.43 s: 93 minutes for 13,000 steps, which are too few (docs/benchmarks/world.md).
The denoiser is trained by the project's own recipe script with `train.mode: full`; the text encoder stays
random, because it only has to tell words apart.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from benchmarks.world.checkpoint import write_fp16, write_untrained
from benchmarks.world.quality import compare, draw_scenes, open_pipeline, sample_clips
from benchmarks.world.vae import train_vae
from dit_lora.data.synthetic.scenes import KNOWN_SHAPES, draw_scene, write_scenes
from dit_lora.files import write_folder_atomically

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "a red disc moves to the right over a dark background",
    "a blue ring grows over a striped background",
    "a yellow cross moves down over a dotted background",
    "a green triangle shrinks over a pale background",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--vae-steps", type=int, default=2200)
    parser.add_argument("--vae-clips", type=int, default=1200)
    parser.add_argument("--decoder-steps", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=20500)
    parser.add_argument("--clips", type=int, default=6000)
    parser.add_argument("--judged", type=int, default=64, help="samples that are judged at the end")
    parser.add_argument("--overrides", nargs="*", default=[], help="changes of the run's recipe")
    args = parser.parse_args(arguments)
    work = args.work
    # The last files that are written: folders without them are those of an earlier version that was interrupted.
    if not (work / "clips" / "metadata.jsonl").exists():
        generator = torch.Generator().manual_seed(11)
        scenes = [draw_scene(generator, KNOWN_SHAPES) for _ in range(args.clips)]
        with write_folder_atomically(work / "clips", replace=True) as staged:
            write_scenes(staged, scenes, generator)
    if not (work / "untrained" / "model_index.json").exists():
        vae = train_vae(work / "vae", args.vae_steps, args.decoder_steps, args.vae_clips)
        with write_folder_atomically(work / "untrained", replace=True) as staged:
            write_untrained(staged, vae)
    recipe = work / "base.yaml"
    recipe.write_text(yaml.safe_dump(build_recipe(work, args.steps), sort_keys=False), encoding="utf-8")
    command = [sys.executable, str(ROOT / "recipes" / "lora.py"), str(recipe), "train.resume=auto", *args.overrides]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    write_fp16(work / "run" / "model", work / "moving_shapes")
    scenes = draw_scenes(None, args.judged, 0)
    videos = sample_clips(open_pipeline(work / "moving_shapes", None), [scene.caption for scene in scenes], 0)
    print({name: round(share, 3) for name, share in compare(scenes, videos).items()})


def build_recipe(work: Path, steps: int) -> dict[str, object]:
    """Build the recipe that trains the denoiser from random weights."""
    return {
        "model": {"family": "cogvideox", "path": str(work / "untrained"), "dtype": "bf16", "from_scratch": {}},
        "data": {
            "path": str(work / "clips"),
            "frames": 9,
            "height": 64,
            "width": 64,
            "fps": 8,
            "caption_dropout": 0.1,
            "workers": 1,
        },
        "optim": {
            "groups": {"backbone": {"lr": 1e-3}},
            "betas": [0.9, 0.99],
            "weight_decay": 0.0,
            "schedule": "cosine",
            "warmup_steps": min(200, steps // 10),
        },
        "train": {
            "mode": "full",
            "steps": steps,
            "batch_size": 12,
            "save_every": max(1, steps // 10),
            "checkpointing": "none",
            "ema": 0.999,
        },
        "validation": {
            "prompts": PROMPTS,
            "inference_steps": 20,
            "guidance_scale": 3.0,
            "eval_draws": 2,
            "every": max(1, steps // 10),
        },
        "guard": {"snapshot_every": 1000, "monitor_every": 500},
        "run": {"dir": str(work / "run")},
    }


if __name__ == "__main__":
    main()
