"""Decoded frames as tensors for vision towers: normalised, tiled, cut into patches.

Shapes: B batch, F frames, V views of one picture, H and W pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from dit_lora.config.records import read_typed_json
from dit_lora.errors import DitLoraError


@dataclass(frozen=True)
class PixelNormalization:
    """Normalization of pixels with one mean and std per color channel: `(pixel / 255 - mean) / std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_processor_config(
        cls, processor: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]
    ) -> "PixelNormalization":
        """Read mean and std from a checkpoint's processor config; values it lacks are these defaults."""
        # Values that are missing or null fall back to the defaults.
        own_mean, own_std = processor.get("image_mean") or mean, processor.get("image_std") or std
        return cls(tuple(own_mean), tuple(own_std))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels, uint8 (..., 3, H, W), to fp32."""
        mean = copy_to_device(self.mean, pixels.device)[:, None, None]
        std = copy_to_device(self.std, pixels.device)[:, None, None]
        # Like Transformers' video processors, fold the division by 255 into mean and std.
        return (pixels.float() - mean * 255) / (std * 255)


def copy_to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy host values to a device without waiting for queued work, unlike `torch.tensor(values, device=...)`."""
    return torch.tensor(values).to(device, non_blocking=True)


def read_processor_config(path: Path, kind: str) -> dict[str, Any]:
    """The checkpoint's config of how an `image` or a `video` is preprocessed; {} if it has none.

    Searched as Transformers does (video_processing_utils.py, get_video_processor_dict): nested in
    processor_config.json, then in a separate file, and for videos finally in the image config.
    """
    nested = _read_json(path / "processor_config.json").get(f"{kind}_processor")
    name = "preprocessor_config.json" if kind == "image" else "video_preprocessor_config.json"
    if nested or (path / name).is_file():
        return nested or _read_json(path / name)
    return {} if kind == "image" else read_processor_config(path, "image")


def resize_pixels(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 (B, 3, H, W): bicubic, antialiased and rounded, as Pillow and torchvision do."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    # Bicubic values overshoot 0 and 255, so clamp before the cast to uint8.
    scaled = F.interpolate(pixels.float(), (height, width), mode="bicubic", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8)


def split_tiles(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut (B, 3, H, W) into tiles of this size, row by row: (B, V, 3, height, width)."""
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    # (B, 3, rows, height, columns, width) -> (B, rows, columns, 3, height, width) -> (B, V, 3, height, width)
    grid = pixels.reshape(len(pixels), 3, rows, height, columns, width)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def split_tiles_with_whole(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Cut (B, 3, H, W) into square tiles and append the whole picture as one tile: (B, V, 3, side, side).

    A picture with a single tile gives only that tile.
    """
    tile_views = split_tiles(pixels, side, side)
    if tile_views.shape[1] == 1:
        return tile_views
    # (B, 1, 3, side, side) is the whole picture, as the last view.
    return torch.cat([tile_views, resize_pixels(pixels, side, side)[:, None]], dim=1)


def split_patches(frames: torch.Tensor, *, side: int, merge: int, frames_per_patch: int) -> torch.Tensor:
    """Cut (B, F, 3, H, W) into patches of several frames: (B, patches, 3 * frames_per_patch * side**2).

    Neighbours that the model merges, `merge` x `merge`, follow each other. The last frame is repeated if F is not a
    multiple of `frames_per_patch`. Equal to Transformers' Qwen2VLVideoProcessor.patchify, and for one frame to its
    image processor.
    """
    # Frames to add until the number is a multiple of `frames_per_patch`.
    num_missing = -frames.shape[1] % frames_per_patch
    if num_missing:
        frames = torch.cat([frames, frames[:, -1:].expand(-1, num_missing, -1, -1, -1)], dim=1)
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
    # Order: group of frames, rows and columns of merged squares, then row and column inside the square. Each patch is
    # flattened as (colours, frames, side, side).
    return grid.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).flatten(6).flatten(1, 5)


def _read_json(file: Path) -> dict[str, Any]:
    # All of these files are optional.
    if not file.is_file():
        return {}
    try:
        return read_typed_json(file, dict[str, Any])
    except OSError as error:
        raise DitLoraError(f"cannot read {file}: {error.strerror or error}") from error
