"""Folders as runs leave them, for what reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from html_page import Page

from dit_lora.data.media.video import write_video
from dit_lora.report.run.page import write_report

HOSTILE = '<script>alert("x")</script> & a cat'


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0 - 0.05 * step,
        "grad_norm": 0.4 + 0.01 * step,
        "lr": 1e-3,
        "seconds": 9.0 if step == 1 else 0.25,
        "data_seconds": 0.002,
        "peak_gib": 3.5 + 0.25 * (step == 7),
        "samples": 2 * step,
        "lr_groups": {"adapter": 1e-3, "backbone": 1e-5},
        "grad_norm_groups": {"adapter": 0.3, "backbone": 0.1},
        "loss_by_timestep": {"0-249": 1.0 + step, "750-999": 0.125} if step % 2 else {"250-499": 0.5},
        **changes,
    }


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(folder: Path) -> Path:
    """A run of 20 of 40 steps with one prompt, sampled at steps 0, 10 and 20."""
    folder.mkdir()
    config = {
        "model": {"family": "cogvideox", "path": "THUDM/CogVideoX-2b", "revision": None},
        "lora": {"rank": 12, "targets": ["to_q", "to_k"]},
        "train": {"steps": 40},
        "validation": {"prompts": [HOSTILE]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {"device": "one GPU", "future": {"key": 7}, "packages": {"torch": "2.13.1"}}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", [metrics_line(step) for step in range(1, 21)])
    write_lines(
        folder / "eval_loss.jsonl",
        [{"step": 0, "eval_loss": 2.5}, {"step": 20, "eval_loss": 2.0}],
    )
    (folder / "status.json").write_text('{"state": "interrupted", "recipe": "kitten.yaml"}')
    for step in (0, 10, 20):
        video = torch.full((3, 32, 48, 3), 10 * step, dtype=torch.uint8)
        write_video(folder / "samples" / f"step_{step:06d}" / "prompt_00.mp4", video, 8)
    return folder


def report(folder: Path) -> Page:
    page = Page(write_report(folder))
    assert page.open == [], "a tag is left open"
    return page
