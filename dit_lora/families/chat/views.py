"""Decoded frames as the tensors that vision towers take: normalised, tiled, cut into patches.

Shapes: B batch, F frames, V views of one picture, H and W pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from dit_lora.config.records import read_typed
from dit_lora.errors import DitLoraError


@dataclass(frozen=True)
class Normalisation:
    """`(pixel / 255 - mean) / std`, a value for each of the three colours."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(
        cls, processor: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]
    ) -> "Normalisation":
        """A checkpoint's own, or these."""
        own_mean, own_std = processor.get("image_mean") or mean, processor.get("image_std") or std
        return cls(tuple(own_mean), tuple(own_std))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """fp32 of uint8 (..., 3, H, W)."""
        mean = sent(self.mean, pixels.device)[:, None, None]
        std = sent(self.std, pixels.device)[:, None, None]
        # Transformers' video processors fold the division by 255 into both.
        return (pixels.float() - mean * 255) / (std * 255)


def sent(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return values of the host on a device; `torch.tensor(values, device=...)` waits for all that is queued there."""
    return torch.tensor(values).to(device, non_blocking=True)


def processor_config(path: Path, kind: str) -> dict[str, Any]:
    """Return what a checkpoint's files say of how an `image` or a `video` is prepared; {} if nothing.

    As Transformers looks for it (video_processing_utils.py, get_video_processor_dict): nested in
    processor_config.json, else in a file of its own, and a video's else in the image's.
    """
    nested = _read(path / "processor_config.json").get(f"{kind}_processor")
    own = "preprocessor_config.json" if kind == "image" else "video_preprocessor_config.json"
    if nested or (path / own).is_file():
        return nested or _read(path / own)
    return {} if kind == "image" else processor_config(path, "image")


def resized(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 (B, 3, H, W) in another size: bicubic, antialiased, rounded, as Pillow and torchvision do it."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    made = F.interpolate(pixels.float(), (height, width), mode="bicubic", antialias=True)
    return made.round().clamp(0, 255).to(torch.uint8)


def tiles(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(B, 3, H, W) cut into tiles of that size, row by row: (B, V, 3, height, width)."""
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    cut = pixels.reshape(len(pixels), 3, rows, height, columns, width)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def tiled_with_whole(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """(B, 3, H, W) as square tiles and, after them, the whole picture as one tile; (B, V, 3, side, side).

    A picture of one tile is that tile alone.
    """
    cut = tiles(pixels, side, side)
    if cut.shape[1] == 1:
        return cut
    return torch.cat([cut, resized(pixels, side, side)[:, None]], dim=1)


def patches(frames: torch.Tensor, *, side: int, merge: int, frames_per_patch: int) -> torch.Tensor:
    """(B, F, 3, H, W) as patches of several frames each, (B, patches, 3 * frames_per_patch * side**2).

    Neighbours that the model merges, `merge` x `merge`, follow each other. Repeats the last frame where F is no
    multiple. As Transformers' Qwen2VLVideoProcessor.patchify, and for one frame as its image processor's.
    """
    missing = -frames.shape[1] % frames_per_patch
    if missing:
        frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
    batch, count, colours, height, width = frames.shape
    grid = frames.reshape(
        batch,
        count // frames_per_patch,
        frames_per_patch,
        colours,
        height // side // merge,
        merge,
        side,
        width // side // merge,
        merge,
        side,
    )
    return grid.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).flatten(6).flatten(1, 5)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_typed(file, dict[str, Any])
    except (OSError, ValueError) as error:
        raise DitLoraError(f"cannot read {file}: {error}") from error
