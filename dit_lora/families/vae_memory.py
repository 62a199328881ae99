"""VAE memory savings: encode and decode in tiles of a picture, or one row of the batch at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from dit_lora.config.data import DataConfig
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list


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
        # VAEs without these methods are rejected earlier, by `require_supported`.
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

    def require_supported(
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
        # A video VAE takes (B, C, F, H, W), an image VAE no frames.
        is_video_vae = any(isinstance(module, nn.Conv3d) for module in vae.modules())
        frame = torch.empty((1, 3, *((1,) if is_video_vae else ()), height, width), device="meta")
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
