"""Sound of an LTX-2 checkpoint: its format, its encoder and its training settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from dit_lora.data.media.sound import SoundFormat
from dit_lora.families.base import VideoEncoder
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.ltx2.sound import SOUND_TRANSFORM, AudioEncoder, build_audio_encoder
from dit_lora.families.sound import VideoSoundEncoder


@dataclass(frozen=True, kw_only=True)
class SoundCheckpoint(FlowCheckpoint):
    """A checkpoint that can train sound together with video."""

    audio_vae: Mapping[str, Any]
    """The audio VAE's config."""
    has_sound: bool = False
    """True if sound is trained with the video (`data.sound`)."""

    @property
    def sound_format(self) -> SoundFormat | None:
        """The audio VAE's sample rate and channels; None if sound is not trained."""
        config = self.audio_vae
        return SoundFormat(config["sample_rate"], config["in_channels"]) if self.has_sound else None

    def latent_cache_key(self) -> Mapping[str, Any]:
        # Without sound the key must stay as it is, so that cached clips are found again.
        key = super().latent_cache_key()
        if not self.has_sound:
            return key
        return {**key, "audio_vae": self.path / "audio_vae", "audio_transform": SOUND_TRANSFORM}

    def load_audio_encoder(self, dtype: torch.dtype, device: torch.device) -> AudioEncoder:
        """Load the audio VAE. It encodes in fp32 regardless of `dtype`."""
        return build_audio_encoder(self.path, device)

    def add_sound_encoder(self, encode: VideoEncoder, device: torch.device) -> VideoEncoder:
        """Extend an encoder of clips so that it also encodes their sound, if sound is trained."""
        # The audio VAE is only loaded if it is needed.
        return VideoSoundEncoder(encode, build_audio_encoder(self.path, device)) if self.has_sound else encode

    def training_metadata(self) -> dict[str, Any]:
        # Recorded only where it is on: adapters from before the option have no entry.
        return super().training_metadata() | ({"sound": True} if self.has_sound else {})

    def with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        return replace(super().with_training_metadata(metadata), has_sound=metadata.get("sound", self.has_sound))
