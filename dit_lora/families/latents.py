"""Latents: loading a VAE, encoding pixels, normalising and packing latents, and loss masks at latent size.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, S image tokens (H W / 4), P packed channels
(4 C).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from torch.nn import functional as F

from dit_lora.config.data import DataConfig
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.references import get_reference_latents
from dit_lora.numerics.streams import move_to_device

LOSS_MASK = "loss_mask"
"""Key of the mask in a batch, fp32 (B, H, W) from 0 to 1. Only data with masks has it."""
PACK_SIZE = 2
"""Side of the square of latents that becomes one token."""


@dataclass(frozen=True)
class VaeMemory:
    """Tiling and slicing of the VAE (`data.vae_tiling`, `data.vae_slicing`), for encoding and decoding."""

    tiling: bool = False
    slicing: bool = False

    @classmethod
    def from_config(cls, data: DataConfig) -> "VaeMemory":
        return cls(data.vae_tiling, data.vae_slicing)

    def load(self, vae_class: Any, path: Path, dtype: torch.dtype, device: torch.device) -> Any:
        """Load a checkpoint's VAE onto the device with tiling and slicing applied."""
        vae = load_pretrained(vae_class, path, subfolder="vae", dtype=dtype, use_safetensors=True)
        return self.apply(vae.to(device))

    def apply(self, vae: Any) -> Any:
        """Apply the tiling and slicing settings to a VAE and return it."""
        # VAEs without these methods are rejected earlier, by `require_tiling_support`.
        if self.tiling:
            vae.enable_tiling()
        if self.slicing:
            vae.enable_slicing()
        return vae

    def cache_key(self) -> dict[str, Any]:
        """The part of the VAE's memory settings that changes latents, for cache keys: overlapping tiles are blended.

        Slicing is not included, because samples are encoded one by one anyway.
        """
        return {"tiling": True} if self.tiling else {}

    def require_tiling_support(
        self, checkpoint: str, vae_config: Mapping[str, Any], sizes: Iterable[tuple[int, int]]
    ) -> None:
        """Raise `DitLoraError` if this VAE does not support tiling or slicing at these heights and widths.

        If the tile step is not a multiple of the pixels per latent, tiles give latents of another shape. This is
        tested on meta tensors, so no weights are loaded.
        """
        options = {"data.vae_tiling": self.tiling, "data.vae_slicing": self.slicing}
        if not any(options.values()):
            return
        name = vae_config["_class_name"]
        with torch.device("meta"):
            vae = getattr(diffusers, name).from_config(dict(vae_config))
        # Diffusers' VAEs name their switches use_tiling and use_slicing.
        flags = {option: option.replace("data.vae", "use") for option in options}
        unsupported = [o for o, is_set in options.items() if is_set and not hasattr(vae, flags[o])]
        if unsupported:
            raise DitLoraError(f"{', '.join(unsupported)}: {name}, the VAE of {checkpoint}, cannot; set it to false")
        misaligned = [f"{height}x{width}" for height, width in sizes if not self._is_aligned(vae, height, width)]
        if misaligned:
            raise DitLoraError(
                format_list(
                    f"data.vae_tiling: the tiles of {name}, the VAE of {checkpoint}, do not fit these heights and "
                    "widths; change them, or set it to false",
                    misaligned,
                )
            )

    def _is_aligned(self, vae: Any, height: int, width: int) -> bool:
        """True if a frame of this size gives latents of the same shape in tiles as it does whole."""
        # A video VAE takes (B, C, F, H, W), an image VAE no frames. Qwen-Image 2.1's has frames, though its
        # convolutions are of two dimensions, and takes RGBA.
        has_frames = "temperal_downsample" in vae.config or any(isinstance(m, nn.Conv3d) for m in vae.modules())
        channels = 4 if vae.config.get("in_channels") == 4 else 3
        frame = torch.empty((1, channels, *((1,) if has_frames else ()), height, width), device="meta")
        # Compare the latents' shape of the whole frame with that of its tiles.
        vae.disable_tiling()
        shapes = [_latent_shape(vae, frame)]
        if self.tiling:
            vae.enable_tiling()
            shapes.append(_latent_shape(vae, frame))
        # A shape is None if the frame cannot be encoded, whole or in tiles.
        return shapes[0] == shapes[-1] is not None


@torch.no_grad()
def _latent_shape(vae: Any, frame: torch.Tensor) -> torch.Size | None:
    """Shape of a frame's latents; None if the VAE cannot encode it."""
    try:
        (latent,) = vae.encode(frame, return_dict=False)
    except RuntimeError:
        # The last tile of a row or column may be smaller than a convolution's kernel.
        return None
    return latent.shape if isinstance(latent, torch.Tensor) else latent.mean.shape


# The default of all encoders: whole frames, whole batches.
PLAIN_VAE = VaeMemory()


def encode_video(vae: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Posterior of a clip, uint8 (frames, 3, height, width), as it is cached: mean and logvar, each (C, F, H, W)."""
    video = (pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)
    # (F, 3, H, W) -> (1, 3, F, H, W)
    posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def encode_picture(vae: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Posterior of an image, uint8 (1, 3, height, width), as it is cached: mean and logvar, each (C, H, W)."""
    # (1, 3, height, width), from -1 to 1.
    posterior = vae.encode((pixels.to(vae.device).float() / 127.5 - 1).to(vae.dtype)).latent_dist
    return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}


def normalize_latents(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """Normalise latents (B, C, ...): the inverse of what pipelines do before decoding.

    The VAE's config has a mean and a deviation for each channel, or a scale and for some VAEs a shift.
    """
    if vae_config.get("latents_mean") is None:
        shift = vae_config.get("shift_factor")
        return (latents if shift is None else latents - shift) * vae_config["scaling_factor"]
    # Each is (C,), as (1, C, 1, ...) to broadcast over batch, frames, height and width.
    mean, deviation = (
        move_to_device(torch.tensor(vae_config[name]), latents.device).view(1, -1, *[1] * (latents.ndim - 2))
        for name in ("latents_mean", "latents_std")
    )
    return (latents - mean) / deviation


def sample_posterior(mean: torch.Tensor, logvar: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample latents (B, ...) from a posterior in fp32, using standard normal `noise` of the same shape."""
    # logvar is the logarithm of the variance, so half of it is that of the standard deviation.
    return mean.float() + torch.exp(0.5 * logvar.float()) * noise


def compute_token_grid(latents: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the token grid of image latents (..., H, W)."""
    height, width = latents.shape[-2:]
    return height // PACK_SIZE, width // PACK_SIZE


def append_references(
    hidden_states: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    pack_latents: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Tokens (B, S, P), followed by those of each of the batch's references, clean."""
    # Packed in fp32 and rounded afterwards, like the noisy latents.
    references = [pack_latents(latents.float()).to(hidden_states.dtype) for latents in get_reference_latents(batch)]
    return torch.cat([hidden_states, *references], dim=1)


def downscale_mask(mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Downscale a pixel mask (height, width) to latent size by averaging, fp32 (H, W), on the CPU."""
    # (height, width) -> (1, 1, height, width) for interpolate; `area` averages the pixels of each latent.
    size = latents.shape[-2:]
    return F.interpolate(mask[None, None].float(), size=size, mode="area")[0, 0]


def compute_loss_weights(
    batch: Mapping[str, torch.Tensor], min_weight: float, latents: torch.Tensor
) -> torch.Tensor | None:
    """Loss weights (B, ..., H, W), broadcastable to `latents`: `min_weight` where the mask is 0, 1 where it is 1.

    None for data without masks.
    """
    mask = batch.get(LOSS_MASK)
    if mask is None:
        return None
    # Linear in the mask: `min_weight` at 0 (black) and 1 at 1 (white).
    weights = min_weight + (1 - min_weight) * mask
    # (B, H, W) -> (B, 1, ..., 1, H, W), with as many dimensions as `latents`.
    return weights.view(len(mask), *[1] * (latents.ndim - 3), *mask.shape[-2:])
