"""Check that edit pairs teach: a tiny FLUX.2 learns to move a shape as captioned and to keep the reference.

    python -m benchmarks.edit WORK [--steps 300] [--pairs 320]

Three runs of recipes/smoke/flux2_edit.yaml on synthetic pairs (`dit-lora tiny shapes --pairs`), from the same random
model and with the same draws: unchanged, with shuffled references, with shuffled captions. The eval loss of the
other two shows how much a model loses that cannot learn from references or captions.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux2Pipeline
from PIL import Image

from dit_lora.data.synthetic.pairs import write_edit_pairs
from dit_lora.families import get_family

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "smoke" / "flux2_edit.yaml"
SIZE = 64
RATE = 3e-3
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=320)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, pairs = args.work / "model", args.work / "pairs"
    pictures = write_edit_pairs(pairs, pairs=args.pairs, height=SIZE, width=SIZE)
    get_family("flux2").build_tiny_checkpoint("flux2-klein", model, 0)
    fit_statistics(model, pictures)
    arms: dict[str, Callable[[list[Row]], list[Row]]] = {
        "pairs as they are": lambda rows: rows,
        "references shuffled": lambda rows: shuffled(rows, "references"),
        "captions shuffled": lambda rows: shuffled(rows, "text"),
    }
    table = pairs / "metadata.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    print("| run | eval loss before | after | seconds |\n|---|---|---|---|")
    for name, changed in arms.items():
        table.write_text("".join(f"{json.dumps(row)}\n" for row in changed(rows)))
        began = time.perf_counter()
        before, after = trained(args.work, name.replace(" ", "_"), args.steps, min(16, args.pairs))
        print(f"| {name} | {before:.4f} | {after:.4f} | {time.perf_counter() - began:.0f} |")


def shuffled(rows: list[Row], column: str) -> list[Row]:
    """The rows, with the values of one column shuffled (seed 0)."""
    values = [row[column] for row in rows]
    random.Random(0).shuffle(values)
    return [{**row, column: value} for row, value in zip(rows, values, strict=True)]


def fit_statistics(model: Path, pictures: list[Path]) -> None:
    """Set the random autoencoder's latent statistics to those of its latents, as in a trained one."""
    vae: Any = AutoencoderKLFlux2.from_pretrained(model, subfolder="vae")
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in pictures])
    with torch.no_grad():
        latents = vae.encode(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist.mode()
        squares = Flux2Pipeline._patchify_latents(latents)
        vae.bn.running_mean.copy_(squares.mean((0, 2, 3)))
        vae.bn.running_var.copy_(squares.var((0, 2, 3)))
    vae.save_pretrained(model / "vae")


def trained(work: Path, name: str, steps: int, batch_size: int) -> tuple[float, float]:
    """Run the recipe; return its eval losses before and after."""
    run = work / "runs" / name
    groups = ", ".join(f"{group}: {{lr: {RATE}}}" for group in ("adapter", "connector", "backbone"))
    values = [
        f"model.path={work / 'model'}",
        f"data.path={work / 'pairs'}",
        f"data.cache={work / 'cache'}",
        f"data.width={SIZE}",
        "data.caption_dropout=0",
        # The upper half of noise levels, where a picture has to be told what it is of.
        "train.timesteps={density: uniform, shift: 1, t_min: 0.5}",
        f"train.steps={steps}",
        f"train.batch_size={batch_size}",
        f"train.save_every={steps}",
        "lora.rank=16",
        "lora.alpha=16",
        f"optim.groups={{{groups}}}",
        "validation.prompts=[]",
        "validation.references=[]",
        "validation.eval_clips=64",
        f"validation.every={steps}",
        f"run.dir={run}",
    ]
    script = [sys.executable, str(ROOT / "recipes" / "lora.py"), str(RECIPE), *values]
    process = subprocess.run(script, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr)
    losses = [json.loads(line) for line in (run / "eval_loss.jsonl").read_text().splitlines()]
    return losses[0]["eval_loss"], losses[-1]["eval_loss"]


if __name__ == "__main__":
    main()
