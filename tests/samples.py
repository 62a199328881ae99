"""Samples compared as pictures: another machine rounds products of two shapes otherwise, which changes bytes."""

from pathlib import Path

import torch

from dit_lora.data.media.video import read_frames, read_header


def frames(path: Path) -> torch.Tensor:
    """Return every frame of a video, fp32 (F, 3, H, W)."""
    header = read_header(path)
    count = header.frames or 1
    return read_frames(path, frames=count, fps=header.fps, height=header.height, width=header.width).float()


def apart(one: Path, other: Path) -> float:
    """Return the mean difference of two videos, in levels of 255."""
    return (frames(one) - frames(other)).abs().mean().item()
