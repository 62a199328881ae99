"""Tiny random LTX-Video pipelines: 0.9, and 0.9.1, whose decoder takes a timestep and draws noise."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel

from dit_lora.families.tiny.text import TEXT_WIDTH, build_t5_encoder, build_t5_tokenizer

_LATENTS, _WIDTH = 8, 8
# Decoder options of the published models (diffusers: scripts/convert_ltx_to_diffusers.py), with one layer per block.
_DECODER_CONFIGS: dict[str, dict[str, Any]] = {
    "ltx-video": {"decoder_block_out_channels": (_WIDTH,) * 4, "decoder_layers_per_block": (1,) * 5},
    "ltx-video-0.9.1": {
        "decoder_block_out_channels": (2 * _WIDTH, 4 * _WIDTH, 8 * _WIDTH),
        "decoder_layers_per_block": (1,) * 4,
        "decoder_spatio_temporal_scaling": (True, True, True),
        "decoder_inject_noise": (False, True, True, True),
        "upsample_residual": (True, True, True),
        "upsample_factor": (2, 2, 2),
        "timestep_conditioning": True,
    },
}


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny LTX-Video pipeline with weights from torch's default generator."""
    tokenizer = build_t5_tokenizer()
    pipeline: Any = LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5_encoder(len(tokenizer)),
        vae=_build_vae(_DECODER_CONFIGS[variant]),
        transformer=LTXVideoTransformer3DModel(
            in_channels=_LATENTS,
            out_channels=_LATENTS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=TEXT_WIDTH,
        ),
        # The options of the published scheduler.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_vae(decoder_config: dict[str, Any]) -> AutoencoderKLLTXVideo:
    vae: Any = AutoencoderKLLTXVideo(
        latent_channels=_LATENTS, block_out_channels=(_WIDTH,) * 4, layers_per_block=(1,) * 5, **decoder_config
    )
    head = vae.encoder.conv_out.conv
    with torch.no_grad():
        # The last channel is the log variance of all latents. Make the posterior narrow, as a trained one is: a random
        # one would leave nothing to learn.
        head.weight[:-1] *= 3.0
        head.weight[-1] *= 0.1
        head.bias[-1] = -6.0
        vae.latents_mean.normal_(std=0.3)
        vae.latents_std.uniform_(0.5, 2.0)
        for name, scale in vae.named_parameters():
            if "per_channel_scale" in name:  # the initial zeros would hide the noise
                scale.normal_(std=0.3)
    return vae.eval()
