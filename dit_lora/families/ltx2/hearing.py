"""Sound of an LTX-2 checkpoint: its format, its encoder and its training settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from dit_lora.data.media.sound import SoundFormat
from dit_lora.families.base import VideoEncoder
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.ltx2.sound import SOUND_TRANSFORM, AudioEncoder, audio_encoder
from dit_lora.families.sound import HearingEncoder


@dataclass(frozen=True, kw_only=True)
class HearingCheckpoint(FlowCheckpoint):
    """A checkpoint that can train sound together with video."""

    audio_vae: Mapping[str, Any]
    """The audio VAE's config."""
    sound: bool = False
    """True if sound is trained with the video (`data.sound`)."""

    @property
    def sound_format(self) -> SoundFormat | None:
        """The audio VAE's sample rate and channels; None if sound is not trained."""
        config = self.audio_vae
        return SoundFormat(config["sample_rate"], config["in_channels"]) if self.sound else None

    def video_facts(self) -> Mapping[str, Any]:
        # Without sound the key must stay as it is, so that cached clips are found again.
        key = super().video_facts()
        if not self.sound:
            return key
        return {**key, "audio_vae": self.path / "audio_vae", "audio_transform": SOUND_TRANSFORM}

    def load_audio_encoder(self, dtype: torch.dtype, device: torch.device) -> AudioEncoder:
        """Load the audio VAE. It encodes in fp32 regardless of `dtype`."""
        return audio_encoder(self.path, device)

    def hearing(self, encode: VideoEncoder, device: torch.device) -> VideoEncoder:
        """Extend an encoder of clips so that it also encodes their sound, if sound is trained."""
        # The audio VAE is only loaded if it is needed.
        return HearingEncoder(encode, audio_encoder(self.path, device)) if self.sound else encode

    def header(self) -> dict[str, Any]:
        # Recorded only where it is on: adapters from before the option have no entry.
        return super().header() | ({"sound": True} if self.sound else {})

    def with_header(self, made: Mapping[str, Any]) -> Self:
        return replace(super().with_header(made), sound=made.get("sound", self.sound))
