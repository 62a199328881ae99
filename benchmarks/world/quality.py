"""How often a model's clips show what their captions say, judged by `benchmarks.world.judge`.

python -m benchmarks.world.quality MODEL [--adapter RUN] [--new moon] [--per-group 24] [--seed 0]
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import CogVideoXPipeline
from PIL import Image
from tqdm import tqdm

from benchmarks.world.judge import Judgement, judge_clip
from dit_lora.adapters.load import load_adapter
from dit_lora.data.synthetic.scenes import (
    BACKGROUNDS,
    KNOWN_SHAPES,
    MOTIONS,
    NEW_BACKGROUND,
    NEW_MOTION,
    NEW_SHAPE,
    Scene,
    draw_scene,
)
from dit_lora.export.export import find_adapter

_BATCH = 8
_COLUMNS = 6  # of a picture
GUIDANCE = 2.0
INFERENCE_STEPS = 12


def draw_scenes(new: str | None, count: int, seed: int) -> list[Scene]:
    """Draw scenes that the base knows, or with `new` ones that differ from them by this word."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [NEW_SHAPE] if new == NEW_SHAPE else KNOWN_SHAPES
    motions = [NEW_MOTION] if new == NEW_MOTION else MOTIONS[:-1]
    backgrounds = [NEW_BACKGROUND] if new == NEW_BACKGROUND else BACKGROUNDS[:-1]
    return [draw_scene(generator, shapes, motions, backgrounds) for _ in range(count)]


def open_pipeline(model: Path, adapter: Path | None) -> Any:
    """Open the stock pipeline in fp32, with the adapter of a run if one is given."""
    pipeline = CogVideoXPipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True)
    if adapter:
        load_adapter(pipeline, find_adapter(adapter).file)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample_clips(pipeline: Any, captions: Sequence[str], seed: int, guidance: float = GUIDANCE) -> np.ndarray:
    """Sample one clip per caption, uint8 (n, 9, 64, 64, 3). A caption's noise depends on its place and `seed`."""
    videos = []
    for start in tqdm(range(0, len(captions), _BATCH), desc="samples", mininterval=5):
        group = list(captions[start : start + _BATCH])
        generators = [torch.Generator().manual_seed(1000 * seed + start + index) for index in range(len(group))]
        frames = pipeline(
            group,
            num_frames=9,
            height=64,
            width=64,
            num_inference_steps=INFERENCE_STEPS,
            guidance_scale=guidance,
            generator=generators,
            max_sequence_length=pipeline.transformer.config.max_text_seq_length,
            output_type="np",
        ).frames
        videos.append((np.asarray(frames) * 255).round().astype(np.uint8))
    return np.concatenate(videos)


def compare(scenes: Sequence[Scene], videos: np.ndarray) -> dict[str, float]:
    """Shares of the clips whose shape, colour and motion are those of their scene, and of those with all three."""
    judgements = [judge_clip(video) for video in videos]
    expected = [Judgement(scene.shape, scene.colour, scene.motion) for scene in scenes]
    names = ("shape", "colour", "motion")
    shares = {
        name: float(np.mean([getattr(a, name) == getattr(b, name) for a, b in zip(judgements, expected, strict=True)]))
        for name in names
    }
    return {**shares, "all": float(np.mean([a == b for a, b in zip(judgements, expected, strict=True)]))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path, help="run folder or adapter; then the base alone is judged as well")
    parser.add_argument("--new", choices=(NEW_SHAPE, NEW_MOTION, NEW_BACKGROUND), default=NEW_SHAPE)
    parser.add_argument("--per-group", type=int, default=24, help="clips of the new concept, and as many others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--picture", type=Path, help="GIF: clips of the new concept before and, below them, after")
    args = parser.parse_args(arguments)
    adapters = {"before": None} | ({"after": args.adapter} if args.adapter else {})
    judge = partial(judge_adapter, args)
    threads = torch.get_num_threads()
    if len(adapters) == 1 or threads == 1:
        results = [judge(adapter) for adapter in adapters.values()]
    else:
        # Two processes with half of the threads each are faster than one with all: the tensors are small.
        with ProcessPoolExecutor(2, initializer=torch.set_num_threads, initargs=(threads // 2,)) as pool:
            results = list(pool.map(judge, adapters.values()))
    figures = {name: shares for name, (shares, _) in zip(adapters, results, strict=True)}
    rows = [clips for _, clips in results]
    for name, shares in figures.items():
        print(f"{name}:", json.dumps(shares))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.picture:
        save_picture(args.picture, rows)
    if args.adapter:
        print(format_line(figures))


def judge_adapter(args: argparse.Namespace, adapter: Path | None) -> tuple[dict[str, dict[str, float]], np.ndarray]:
    """Judge the base, or the base with an adapter.

    Returns the shares of each group of scenes, and the first clips of the new concept, uint8 (6, 9, 64, 64, 3).
    """
    pipeline = open_pipeline(args.model, adapter)
    groups = {
        "new": draw_scenes(args.new, args.per_group, args.seed),
        "others": draw_scenes(None, args.per_group, args.seed),
    }
    videos = {
        group: sample_clips(pipeline, [scene.caption for scene in scenes], args.seed, args.guidance)
        for group, scenes in groups.items()
    }
    return {group: compare(scenes, videos[group]) for group, scenes in groups.items()}, videos["new"][:_COLUMNS]


def save_picture(path: Path, rows: Sequence[np.ndarray]) -> None:
    """Save rows of clips, each (n, F, H, W, 3), as one animated GIF at twice their size."""
    # (F, rows * H, n * W, 3)
    grid = np.concatenate([np.concatenate(list(clips), axis=2) for clips in rows], axis=1)
    pictures = (Image.fromarray(frame).resize((frame.shape[1] * 2, frame.shape[0] * 2)) for frame in grid)
    # Few colours without dithering: half the size, and no visible difference in these clips.
    frames = [picture.quantize(48, dither=Image.Dither.NONE) for picture in pictures]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125, loop=0)


def format_line(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Format the demo's last line."""
    after, before = figures["after"], figures["before"]
    shares = [
        f"{label} {100 * after[group]['all']:.0f} % (before {100 * before[group]['all']:.0f} %)"
        for group, label in (("new", "new concept"), ("others", "other concepts"))
    ]
    return f"demo: {', '.join(shares)}"


if __name__ == "__main__":
    main()
