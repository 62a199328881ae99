"""Tiny random Sana pipelines."""

from pathlib import Path
from typing import Any

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from dit_lora.families.tiny.text import TEXT_WIDTH, build_gemma_encoder, build_gemma_tokenizer
from dit_lora.families.tiny.vae import LATENT_CHANNELS


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny pipeline like Sana.

    A variant like 1.5 normalizes q and k; another stores its transformer in fp16.
    """
    tokenizer = build_gemma_tokenizer()
    transformer: Any = SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=TEXT_WIDTH,
        mlp_ratio=2.5,
        sample_size=32,
        qk_norm="rms_norm_across_heads" if variant == "sana-1.5" else None,
    )
    pipeline: Any = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma_encoder(len(tokenizer)),
        vae=_build_autoencoder(),
        transformer=transformer.half() if variant == "sana-fp16" else transformer,
        scheduler=build_flow_scheduler(flow_shift=3.0),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_autoencoder() -> AutoencoderDC:
    """Build a tiny DC-AE with the published model's two kinds of blocks.

    It halves the sides four times (published: five times).
    """
    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock")
    # One entry per stage.
    channels, layers = (8, 8, 16, 16, 16), (1, 1, 1, 1, 1)
    scales: Any = ((), (), (), (5,), (5,))
    vae: Any = AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=layers,
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,  # value of mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers
    )
    return vae.eval()


def build_flow_scheduler(flow_shift: float) -> DPMSolverMultistepScheduler:
    # The options of the published checkpoints (diffusers: scripts/convert_sana_to_diffusers.py).
    return DPMSolverMultistepScheduler(flow_shift=flow_shift, use_flow_sigmas=True, prediction_type="flow_prediction")
