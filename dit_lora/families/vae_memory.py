"""Ways for a VAE to need less memory: the tiles of a picture, or the rows of a batch, one after the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from dit_lora.config.data import DataConfig
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, listed


@dataclass(frozen=True)
class VaeMemory:
    """Settings `data.vae_tiling` and `data.vae_slicing` of a recipe, for encoding and for decoding."""

    tiling: bool = False
    slicing: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> "VaeMemory":
        return cls(data.vae_tiling, data.vae_slicing)

    def load(self, vae_class: Any, path: Path, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the VAE of a checkpoint onto the device, with what is set switched on."""
        vae = load_pretrained(vae_class, path, subfolder="vae", dtype=dtype, use_safetensors=True)
        return self.set(vae.to(device))

    def set(self, vae: Any) -> Any:
        """Switch on what is set, and return the same VAE."""
        if self.tiling:
            vae.enable_tiling()
        if self.slicing:
            vae.enable_slicing()
        return vae

    def facts(self) -> dict[str, Any]:
        """Return what latents depend on: overlapping tiles are blended.

        Samples are encoded one by one, sliced or not.
        """
        return {"tiling": True} if self.tiling else {}

    def require(
        self, checkpoint: str, vae_config: Mapping[str, Any], sizes: Iterable[tuple[int, int]]
    ) -> None:
        """Raise `DitLoraError` if this VAE cannot do what is asked for at these heights and widths.

        Tiles whose step is no multiple of a latent's pixels give latents of another shape, of other places.
        This is tried on tensors without values; no weights are loaded.
        """
        asked = {"data.vae_tiling": self.tiling, "data.vae_slicing": self.slicing}
        if not any(asked.values()):
            return
        name = vae_config["_class_name"]
        with torch.device("meta"):
            vae = getattr(diffusers, name).from_config(dict(vae_config))
        # Diffusers' VAEs name their switches use_tiling and use_slicing.
        flags = {option: option.replace("data.vae", "use") for option in asked}
        cannot = [o for o, is_set in asked.items() if is_set and not hasattr(vae, flags[o])]
        if cannot:
            raise DitLoraError(
                f"{', '.join(cannot)}: {name}, the VAE of {checkpoint}, cannot; set it to false"
            )
        misaligned = [
            f"{height}x{width}" for height, width in sizes if not self._aligned(vae, height, width)
        ]
        if misaligned:
            raise DitLoraError(
                listed(
                    f"data.vae_tiling: the tiles of {name}, the VAE of {checkpoint}, do not fit these heights "
                    "and widths; choose others, or set it to false",
                    misaligned,
                )
            )

    def _aligned(self, vae: Any, height: int, width: int) -> bool:
        """Return True if a frame of this size has latents of the same shape in tiles as whole."""
        # A video VAE takes (B, C, F, H, W), an image VAE no frames.
        of_video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
        frame = torch.empty((1, 3, *((1,) if of_video else ()), height, width), device="meta")
        vae.disable_tiling()
        shapes = [_latent_shape(vae, frame)]
        if self.tiling:
            vae.enable_tiling()
            shapes.append(_latent_shape(vae, frame))
        # None stands for a frame that cannot be encoded, whole or in tiles.
        return shapes[0] == shapes[-1] is not None


@torch.no_grad()
def _latent_shape(vae: Any, frame: torch.Tensor) -> torch.Size | None:
    """Return the shape of a frame's latents; None where the VAE cannot encode it."""
    try:
        (latent,) = vae.encode(frame, return_dict=False)
    except RuntimeError:
        # A last tile may be smaller than a kernel.
        return None
    return latent.shape if isinstance(latent, torch.Tensor) else latent.mean.shape


PLAIN_VAE = VaeMemory()
