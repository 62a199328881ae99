"""A tiny random SANA-Video pipeline."""

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel

from dit_lora.families.sana.tiny import build_flow_scheduler
from dit_lora.families.tiny.text import TEXT_WIDTH, build_gemma_encoder, build_gemma_tokenizer
from dit_lora.families.tiny.vae import LATENT_CHANNELS, scale_posterior


def build_tiny_checkpoint(_variant: str, folder: Path) -> None:
    """Write a tiny SANA-Video pipeline with Wan's autoencoder, whose latents have per-channel mean and deviation."""
    tokenizer = build_gemma_tokenizer()
    pipeline: Any = SanaVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma_encoder(len(tokenizer)),
        vae=_build_wan_vae(),
        transformer=SanaVideoTransformer3DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=TEXT_WIDTH,
            sample_size=30,
            rope_max_seq_len=64,
        ),
        # The published shift for sampling; training uses another one.
        scheduler=build_flow_scheduler(flow_shift=8.0),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_wan_vae() -> AutoencoderKLWan:
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        # Spelled so in Diffusers.
        temperal_downsample=[False, True, True],
        latents_mean=[-0.2, 0.3, 0.1, -0.4],
        latents_std=[0.8, 1.3, 0.6, 1.1],
    )
    return scale_posterior(vae, 5)
