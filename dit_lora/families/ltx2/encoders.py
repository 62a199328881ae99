"""LTX-2's encoders: Gemma with the connectors, the video's VAE, and the sound's if it is trained.

Prompts and normalisation call the stock pipeline's own code (diffusers/pipelines/ltx2/pipeline_ltx2.py).

Shapes: T text tokens, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2TextConnectors

from dit_lora.data.media.sound import SoundFormat
from dit_lora.families.base import Encoders, Tensors, TensorSpec, TextEncoder, VideoEncoder
from dit_lora.families.latents import PLAIN_VAE, VaeMemory, encode_video
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.families.ltx2.sound import SOUND_TRANSFORM, build_audio_encoder
from dit_lora.families.ltx2.text import make_text_encoder
from dit_lora.families.sound import VideoSoundEncoder


@dataclass(frozen=True, kw_only=True)
class LTX2Encoders(Encoders):
    """Text encoder and VAEs of an LTX-2 checkpoint for text-to-video."""

    info: LTX2Info
    text_postprocessors: ClassVar[Mapping[str, Any]] = {"connectors": LTX2TextConnectors}
    vae_class = AutoencoderKLLTX2Video
    transform = "ltx2-1: pixels / 127.5 - 1, posterior mean, normalised by the VAE's own statistics, fp32"

    @property
    def sound_format(self) -> SoundFormat | None:
        """Format of the sound that is trained: the audio VAE's sample rate and channels.

        None if sound is not trained.
        """
        config = self.info.audio_vae
        return SoundFormat(config["sample_rate"], config["in_channels"]) if self.info.has_sound else None

    def latent_cache_key(self) -> Mapping[str, Any]:
        # Without sound the key must stay as it is, so that cached clips are found again.
        key = super().latent_cache_key()
        if not self.info.has_sound:
            return key
        return {**key, "audio_vae": self.info.path / "audio_vae", "audio_transform": SOUND_TRANSFORM}

    def text_cache_key(self) -> Mapping[str, Any]:
        # The cached tensors come from the connectors, which differ between 2.0 and 2.3 although the text encoder is
        # the same.
        folder = self.info.path / "connectors"
        return {**super().text_cache_key(), "connectors": folder, "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        tokens, audio_width = self.info.text_tokens, self.info.caption_tensor_width("audio")
        # The cache keeps the connectors' output, whose widths differ by modality.
        return {
            "prompt_embeds": (torch.Size((tokens, self.info.caption_tensor_width("video"))), dtype),
            "audio_prompt_embeds": (torch.Size((tokens, audio_width)), dtype),
            "prompt_attention_mask": (torch.Size((tokens,)), torch.int64),
        }

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load LTX-2's pipeline with only its text encoder and connectors."""
        # The connectors stay, because captions pass through them.
        return self._load_text_pipeline(dtype, device, audio_vae=None, vocoder=None)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Gemma and the connectors as LTX-2's pipeline uses them."""
        return make_text_encoder(self.load_text_pipeline(dtype, device), self.info.text_tokens, device)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        return self.add_sound_encoder(super().load_video_encoder(dtype, device, memory), device)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """The posterior's mean (C, F, H, W), normalised with the statistics in the VAE's weights.

        The vendor's trainer uses the same.
        """
        mean = encode_video(vae, pixels)["latent_mean"]
        factor = vae.config.scaling_factor
        latents = self.info.pipeline_class._normalize_latents(mean[None], vae.latents_mean, vae.latents_std, factor)
        return {"latent_mean": latents[0]}

    def add_sound_encoder(self, encode: VideoEncoder, device: torch.device) -> VideoEncoder:
        """Extend an encoder of clips so that it also encodes their sound, if sound is trained."""
        # The audio VAE is only loaded if it is needed.
        if not self.info.has_sound:
            return encode
        return VideoSoundEncoder(encode, build_audio_encoder(self.info.path, device))
