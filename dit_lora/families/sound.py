"""Encoders for the sound of samples, for families that train it with the video."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from dit_lora.families.references import EncodePixels

Tensors = dict[str, torch.Tensor]


@runtime_checkable
class SoundEncoder(Protocol):
    """Protocol of a `VideoEncoder` that also encodes the sound of clips."""

    def encode_sound(self, waveform: torch.Tensor, rate: int) -> Tensors:
        """Encode a waveform, float32 (channels, N) from -1 to 1, at `rate` samples per second."""


@dataclass(frozen=True)
class VideoSoundEncoder:
    """VAE encoder of clips and their sound."""

    encode: EncodePixels
    audio_encoder: Callable[[torch.Tensor, int], Tensors]

    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        # Pixels and sound are encoded separately, and their tensors are cached together.
        return self.encode(pixels, image)

    def encode_sound(self, waveform: torch.Tensor, rate: int) -> Tensors:
        return self.audio_encoder(waveform, rate)
