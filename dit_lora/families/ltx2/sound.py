"""LTX-2's sound: from a waveform to the latents that the transformer is trained on.

Diffusers has the audio VAE's encoder, but not the mel spectrogram that it takes, because its pipelines only decode.
The spectrogram follows Lightricks/LTX-2, ltx-core, model/audio_vae/ops.py (AudioProcessor: torchaudio's MelSpectrogram
with Slaney's scale and norm, of magnitudes, then the logarithm) and model_configurator.py (its 1,024 points).

Shapes: N samples, T columns of the spectrogram, M mel bins, L tokens of sound, W their width.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKLLTX2Audio, LTX2Pipeline
from transformers.audio_utils import mel_filter_bank

from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Tensors

_FFT_SIZE = 1024  # size of the Fourier transform and its window
_MIN_MAGNITUDE = 1e-5
SOUND_TRANSFORM = "ltx2-sound-1: log mel of 1,024 points, posterior mean, normalised by the VAE's own statistics, fp32"


class AudioEncoder(Protocol):
    """Protocol of an encoder that turns sound into the tensors that are cached for a sample."""

    def __call__(self, waveform: torch.Tensor, rate: int) -> Tensors:
        """Encode a floating point `waveform` (channels, N) from -1 to 1, at `rate` samples per second."""


def count_audio_tokens(config: Mapping[str, Any], seconds: float) -> int:
    """Number of sound tokens that the pipeline uses for a video of this length (pipeline_ltx2.py, __call__)."""
    # Columns of the spectrogram per second, four of which become one token.
    per_second = config["sample_rate"] / config["mel_hop_length"] / 4  # LATENT_DOWNSAMPLE_FACTOR
    return round(seconds * per_second)


def build_audio_encoder(path: Path, device: torch.device) -> AudioEncoder:
    """Load a checkpoint's audio VAE. Samples keep `audio_latent_mean`, normalised tokens (L, W).

    It encodes in fp32 and keeps the posterior's mean, like the vendor's trainer.
    """
    # The VAE takes (B, channels, T, M).
    vae: Any = load_pretrained(
        AutoencoderKLLTX2Audio, path, subfolder="audio_vae", dtype=torch.float32, use_safetensors=True
    ).to(device)
    config = vae.config

    @torch.no_grad()
    def encode_audio(waveform: torch.Tensor, rate: int) -> Tensors:
        _require_valid_waveform(waveform, rate, config)
        # The spectrogram has an extra column at either end: keep as many tokens as the pipeline uses.
        tokens = count_audio_tokens(config, waveform.shape[1] / rate)
        mel = compute_log_mel(waveform.to(device).float(), config)
        latents = vae.encode(mel[None]).latent_dist.mode()
        packed = LTX2Pipeline._pack_audio_latents(latents)
        normalised = LTX2Pipeline._normalize_audio_latents(packed, vae.latents_mean, vae.latents_std)
        return {"audio_latent_mean": normalised[0, :tokens]}

    return encode_audio


def compute_log_mel(waveform: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Logarithm of the mel spectrogram, (channels, T, M) with T = N // hop + 1, of a waveform (channels, N)."""
    rate, hop = config["sample_rate"], config["mel_hop_length"]
    window = torch.hann_window(_FFT_SIZE, device=waveform.device)
    spectrum = torch.stft(
        waveform, _FFT_SIZE, hop, window=window, center=True, pad_mode="reflect", return_complex=True
    ).abs()
    filters = mel_filter_bank(
        num_frequency_bins=_FFT_SIZE // 2 + 1,
        num_mel_filters=config["mel_bins"],
        min_frequency=0.0,
        max_frequency=rate / 2,
        sampling_rate=rate,
        norm="slaney",
        mel_scale="slaney",
    )
    # (channels, bins, T) -> (channels, T, bins), then the filters reduce bins to M.
    mel = spectrum.mT @ torch.from_numpy(filters).to(spectrum)
    return mel.clamp(min=_MIN_MAGNITUDE).log()


def _require_valid_waveform(waveform: torch.Tensor, rate: int, config: Mapping[str, Any]) -> None:
    channels, expected_rate = config["in_channels"], config["sample_rate"]
    is_valid = waveform.ndim == 2 and len(waveform) == channels and waveform.is_floating_point()
    if not is_valid or rate != expected_rate:
        raise DitLoraError(
            f"LTX-2's audio VAE takes a waveform ({channels}, samples) in floating point at {expected_rate} samples "
            f"a second; got {tuple(waveform.shape)} in {str(waveform.dtype).removeprefix('torch.')} at {rate}; "
            "resample it, and give one channel twice"
        )
    if waveform.shape[1] <= _FFT_SIZE // 2:
        raise DitLoraError(f"LTX-2's audio VAE takes more than {_FFT_SIZE // 2} samples; got {waveform.shape[1]}")
