"""Diffusers' own `train_cogvideox_lora.py` on the demo's base and clips, judged as the demo is.

    python -m benchmarks.world.diffusers_script WORK --script train_cogvideox_lora.py [--seeds 0 1 2] [--poisoned]

The script is https://github.com/huggingface/diffusers/blob/main/examples/cogvideo/train_cogvideox_lora.py. Its copy
in WORK differs in two numbers: it computes rotary positions for 480x720 pixels whatever the model's size, which would
give this base other positions than it was trained with and than the pipeline uses. Rank, learning rate, batch, steps
and clips are those of the recipe `demo/moon`. Our run of the same LoRA is the setting "as the script" of
`benchmarks.world.settings`, and both write into the same table if they have the same WORK. Where torchvision or decord
is not installed, `benchmarks/stand_ins` takes its place. With `--poisoned` the pixels of one clip are NaN, and the
script runs twice: as it is, and under `dit-lora guard`.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.world.settings import (
    BASE,
    KNOWN_CLIPS,
    NEW_CLIPS,
    RECIPE,
    ROOT,
    has_record,
    judge,
    print_table,
    read_records,
    run_measured,
    write_clips,
    write_records,
)
from dit_lora.config.load import load_recipe

# Diffusers and Transformers look for torchvision when they are imported, and need more of it than the stand-in has.
_PRELUDE = f"""\
import sys
import diffusers, transformers.image_utils
sys.path.append({str(ROOT / "benchmarks" / "stand_ins")!r})
"""
_NAME = "Diffusers' script"
_LOG = "log.txt"
_ENCODING = "= encode_video(video)"  # of each clip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--script", type=Path, required=True, help="Diffusers' train_cogvideox_lora.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--per-group", type=int, default=48)
    parser.add_argument("--new-clips", type=int, default=NEW_CLIPS)
    parser.add_argument("--known-clips", type=int, default=KNOWN_CLIPS)
    parser.add_argument("--poisoned", action="store_true", help="one clip is NaN: the script bare and guarded")
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    results = args.work / "results.jsonl"
    records = read_records(results)
    script = write_script(args.script, args.work / "train_cogvideox_lora.py", poisoned=args.poisoned)
    names = [f"{_NAME}, one clip NaN", f"{_NAME}, one clip NaN, guarded"] if args.poisoned else [_NAME]
    recipe = load_recipe(RECIPE)
    # The script's file holds no alpha; the script itself gives this factor when it loads the file.
    scale = (recipe.lora.alpha or 1) / (recipe.lora.rank or 1)
    for seed in args.seeds:
        clips = write_clips(args.work, seed, args.new_clips, args.known_clips)
        for name in names:
            if has_record(records, name, seed):
                continue
            run_dir = args.work / f"{re.sub('[^a-zA-Z]+', '_', name)}_{seed}"
            costs = run_script(script, clips, run_dir, seed, args.steps, guarded=name.endswith("guarded"))
            shares = judge(run_dir, args.per_group, seed, scale)
            records.append({"setting": name, "seed": seed} | costs | find_nan_loss(run_dir / _LOG) | shares)
            write_records(results, records)
    print_table(records)


def find_nan_loss(log: Path) -> dict[str, int]:
    """The first step whose loss was NaN by the script's progress bar, as `nan_step`; empty if there is none."""
    match = re.search(r"(\d+)/\d+ \[[^\]]*loss=nan", log.read_text(encoding="utf-8"))
    return {"nan_step": int(match[1])} if match else {}


def write_script(source: Path, target: Path, *, poisoned: bool = False) -> Path:
    """Copy the script with the base's size in its rotary positions. Raises `ValueError` if it is another script.

    `poisoned`: the pixels of its first clip are NaN when the VAE gets them.
    """
    text = source.read_text(encoding="utf-8")
    for name, published in (("base_height", 480), ("base_width", 720)):
        default = f"{name}: int = {published},"
        if text.count(default) != 1:
            raise ValueError(f"{source} has no line {default!r}; is it Diffusers' train_cogvideox_lora.py?")
        text = text.replace(default, f"{name}: int = 64,")
    if poisoned:
        if text.count(_ENCODING) != 1:
            raise ValueError(f"{source} has no line {_ENCODING!r}")
        text = text.replace(_ENCODING, "= encode_video(video if i else video * float('nan'))")
    target.write_text(add_stand_ins(text), encoding="utf-8")
    return target


def add_stand_ins(script: str) -> str:
    """The script's text, with `benchmarks/stand_ins` on its path if torchvision or decord is not installed."""
    is_complete = all(importlib.util.find_spec(name) for name in ("torchvision", "decord"))
    return script if is_complete else _PRELUDE + script


def list_clips(folders: Sequence[Path], weights: Sequence[float]) -> list[tuple[Path, str]]:
    """Clips of folders with their captions, those of the smaller folders repeated for the shares of `weights`."""
    groups = [
        [
            (folder / record["file_name"], record["text"])
            for record in map(json.loads, (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines())
        ]
        for folder in folders
    ]
    # Clips of each folder in an epoch in which no folder has fewer than it has clips.
    epoch = max(len(group) / weight for group, weight in zip(groups, weights, strict=True))
    return [
        clip
        for group, weight in zip(groups, weights, strict=True)
        for clip in group * round(epoch * weight / len(group))
    ]


def run_script(
    script: Path, clips: Sequence[Path], run_dir: Path, seed: int, steps: int | None, *, guarded: bool = False
) -> dict[str, float]:
    """Train with the recipe's settings; returns what `run_measured` does."""
    recipe = load_recipe(RECIPE)
    lines = list_clips(clips, [source.weight or 1.0 for source in recipe.data.sources])
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "videos.txt").write_text("".join(f"{path.absolute()}\n" for path, _ in lines), encoding="utf-8")
    (run_dir / "captions.txt").write_text("".join(f"{text}\n" for _, text in lines), encoding="utf-8")
    options = {
        "pretrained_model_name_or_path": BASE,
        "instance_data_root": run_dir,
        "video_column": "videos.txt",
        "caption_column": "captions.txt",
        "output_dir": run_dir,
        "height": 64,
        "width": 64,
        "fps": 8,
        "max_num_frames": 9,
        "rank": recipe.lora.rank,
        "lora_alpha": recipe.lora.alpha,
        "learning_rate": recipe.optim.groups.adapter.lr,
        "lr_scheduler": recipe.optim.schedule,
        "lr_warmup_steps": recipe.optim.warmup_steps,
        "optimizer": "adamw",
        "train_batch_size": recipe.train.batch_size,
        "max_train_steps": steps or recipe.train.steps,
        "checkpointing_steps": 10**6,
        "mixed_precision": "no",
        "seed": seed,
    }
    option_words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    guard_words = ["-m", "dit_lora", "guard", "--folder", str(run_dir / "guard")] if guarded else []
    return run_measured([sys.executable, *guard_words, str(script), *option_words], run_dir / _LOG)


if __name__ == "__main__":
    main()
