"""Quality of the demo's LoRA with other settings of its recipe, several seeds each, judged.

    python -m benchmarks.world.settings WORK [--settings dora lokr] [--seeds 0 1 2] [--steps N] [--per-group 48]

Each run adds one line to WORK/results.jsonl, and a run that has its line is not repeated, so that the whole can be
stopped and continued. At the end the table of all lines is printed.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.world.quality import GUIDANCE, compare, draw_scenes, open_pipeline, sample_clips
from dit_lora.config.load import load_recipe
from dit_lora.data.synthetic.scenes import KNOWN_SHAPES, NEW_SHAPE, draw_scene, list_balanced_scenes, write_scenes

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "demo" / "moon.yaml"
BASE = ROOT / "dit_lora" / "models" / "moving_shapes"
NEW_CLIPS, KNOWN_CLIPS = 48, 96
"""Clips of the new shape, and of known ones, as in the demo."""
BASE_ALONE = "base alone"
SETTINGS: dict[str, tuple[str, ...]] = {
    "as shipped": (),
    "rank 4": ("lora.rank=4", "lora.alpha=8"),
    "attention only": ("lora.targets=null",),
    "as the script": ("lora.targets=null", "train.ema=null"),
    "DoRA": ("lora.kind=dora",),
    "LoKr": ("lora.kind=lokr", "lora.factor=4"),
    "PiSSA": ("lora.init=pissa",),
    "bf16": ("model.dtype=bf16",),
    "int8 base": ("model.quantize=int8",),
    "nf4 base": ("model.quantize=nf4",),
    "output preservation": ("train.preserve.trigger=moon", "train.preserve.class_words=[disc, square, ring]"),
    "caption dropout 0.1": ("data.caption_dropout=0.1",),
    "last weights": ("train.ema=null",),
    "noise levels: logit-normal": ("train.timesteps={density: logit_normal}",),
    "noise levels: low": ("train.timesteps={density: logit_normal, mean: -1}",),
    "noise levels: high": ("train.timesteps={density: logit_normal, mean: 1}",),
    "fused operations": ("kernels.lora_linear=on", "kernels.qk_norm_rope=on", "kernels.ada_norm=on"),
}
"""Changes of the recipe `demo/moon`, by a name for the table."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [BASE_ALONE, *SETTINGS]
    parser.add_argument("work", type=Path)
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument(
        "--per-group", type=int, default=48, help="judged samples of the new shape, and as many others"
    )
    parser.add_argument("--new-clips", type=int, default=NEW_CLIPS, help="clips of the new shape")
    parser.add_argument("--known-clips", type=int, default=KNOWN_CLIPS, help="clips of shapes that the base knows")
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    results = args.work / "results.jsonl"
    records = read_records(results)
    for seed in args.seeds:
        clips = write_clips(args.work, seed, args.new_clips, args.known_clips)
        for name in args.settings:
            if has_record(records, name, seed):
                continue
            run_dir, costs = None, {}
            if name != BASE_ALONE:
                run_dir = args.work / f"{name.replace(' ', '_').replace(':', '')}_{seed}"
                shutil.rmtree(run_dir, ignore_errors=True)
                steps = [f"train.steps={args.steps}"] if args.steps else []
                costs = train(run_dir, clips, [*SETTINGS[name], f"train.seed={seed}", *steps])
            records.append({"setting": name, "seed": seed} | costs | judge(run_dir, args.per_group, seed))
            write_records(results, records)
    print_table(records)


def write_clips(
    work: Path, seed: int, new_clips: int = NEW_CLIPS, known_clips: int = KNOWN_CLIPS
) -> tuple[Path, Path]:
    """Write the demo's clips, drawn with `seed`: of the new shape, and of those that the base knows."""
    generator = torch.Generator().manual_seed(seed)
    folders = work / f"{NEW_SHAPE}s_{seed}", work / f"known_{seed}"
    known_scenes = [draw_scene(generator, KNOWN_SHAPES) for _ in range(known_clips)]
    for folder, scenes in zip(folders, (list_balanced_scenes(NEW_SHAPE, new_clips), known_scenes), strict=True):
        if not (folder / "metadata.jsonl").exists():
            folder.mkdir(exist_ok=True)
            write_scenes(folder, scenes, generator)
    return folders


def train(run_dir: Path, clips: Sequence[Path], overrides: Sequence[str], base: Path = BASE) -> dict[str, float]:
    """Train the recipe on `base` with `overrides`; returns what `run_measured` does."""
    weights = [source.weight for source in load_recipe(RECIPE).data.sources]
    sources = json.dumps(
        [{"path": str(folder), "weight": weight} for folder, weight in zip(clips, weights, strict=True)]
    )
    paths = [f"model.path={base}", f"data.sources={sources}", f"run.dir={run_dir}"]
    quiet = ["validation.prompts=[]", f"train.save_every={10**6}"]
    command = [sys.executable, str(ROOT / "recipes" / "lora.py"), str(RECIPE), *paths, *quiet, *overrides]
    return run_measured(command)


def run_measured(command: Sequence[str], log: Path | None = None) -> dict[str, float]:
    """Run a command, with its standard error in `log` if given.

    Returns its `seconds`, and its peak of resident memory, `peak_gib` (Linux only). Raises `CalledProcessError`.
    """
    began = time.perf_counter()
    peak_kib = 0
    with log.open("w", encoding="utf-8") if log else nullcontext() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        # The kernel's own account of a child, ru_maxrss, starts at the parent's memory.
        status = Path("/proc") / str(process.pid) / "status"
        while process.poll() is None:
            match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8") if status.exists() else "")
            peak_kib = int(match[1]) if match else peak_kib
            time.sleep(0.2)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.perf_counter() - began, "peak_gib": peak_kib / 2**20}


def judge(
    run_dir: Path | None,
    per_group: int,
    seed: int,
    scale: float = 1.0,
    base: Path = BASE,
    guidance: float = GUIDANCE,
) -> dict[str, float]:
    """Shares of judged samples that show their caption: of the new shape, and of what the base knows.

    The samples are kept in `judged.npz`. `scale` multiplies the adapter, for files that do not hold their alpha.
    """
    pipeline = open_pipeline(base, run_dir)
    if scale != 1:
        pipeline.set_adapters(pipeline.get_active_adapters(), scale)
    groups = {"new": draw_scenes(NEW_SHAPE, per_group, seed), "others": draw_scenes(None, per_group, seed)}
    videos = {
        name: sample_clips(pipeline, [scene.caption for scene in scenes], seed, guidance)
        for name, scenes in groups.items()
    }
    if run_dir:
        np.savez_compressed(run_dir / "judged.npz", **videos)
    return {name: compare(scenes, videos[name])["all"] for name, scenes in groups.items()}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of earlier runs, one per line; none if the file does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def has_record(records: Sequence[dict[str, Any]], setting: str, seed: int) -> bool:
    return any((record["setting"], record["seed"]) == (setting, seed) for record in records)


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """Print means over seeds, with the least and the largest, as a Markdown table."""
    print("| setting | seeds | new shape, % | others, % | seconds | peak GiB |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(record["setting"] for record in records):
        group = [record for record in records if record["setting"] == name]
        cells = [format_spread([100 * record[key] for record in group]) for key in ("new", "others")]
        for key, digits in (("seconds", 0), ("peak_gib", 2)):
            values = [record[key] for record in group if key in record]
            cells.append(f"{statistics.median(values):.{digits}f}" if values else "")
        print(f"| {name} | {len(group)} | {' | '.join(cells)} |")


def format_spread(values: Sequence[float]) -> str:
    """Such as "87 (81 to 92)"."""
    return f"{statistics.mean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    main()
