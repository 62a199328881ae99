"""A tiny random HunyuanVideo-1.5 pipeline. Both text encoders read bytes."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from dit_lora.families.tiny import text
from dit_lora.families.tiny.chat_text import MODEL_SIZES, TEXT_WIDTH, build_qwen3, special_token_ids
from dit_lora.families.tiny.vae import LATENT_CHANNELS


def build_tiny_checkpoint(_variant: str, folder: Path) -> None:
    """Write a tiny HunyuanVideo-1.5 pipeline with weights from torch's default generator."""
    tokenizer, _ = build_qwen3(num_layers=1)
    tokenizer_2 = ByT5Tokenizer()
    pipeline: Any = HunyuanVideo15Pipeline(
        tokenizer=tokenizer,
        text_encoder=_build_text_encoder(tokenizer),
        tokenizer_2=tokenizer_2,
        text_encoder_2=text.build_t5_encoder(len(tokenizer_2)),
        vae=_build_vae(),
        transformer=_build_transformer(),
        # The published shift of 480p.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_text_encoder(tokenizer: Any) -> Qwen2_5_VLTextModel:
    # The pipeline reads the third to last hidden states, so there are three layers. Heads have four pairs of elements:
    # positions of time, height and width take 2, 1 and 1 of them.
    config = Qwen2_5_VLTextConfig(
        **{
            **MODEL_SIZES,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
        },
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        **special_token_ids(tokenizer),
    )
    return Qwen2_5_VLTextModel(config).eval()


def _build_vae() -> AutoencoderKLHunyuanVideo15:
    vae: Any = AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    with torch.no_grad():
        # The last half of the channels is the log variance. A narrow posterior, as a trained one is.
        vae.encoder.conv_out.conv.bias[LATENT_CHANNELS:] -= 6.0
    return vae.eval()  # type: ignore[no-any-return]


def _build_transformer() -> HunyuanVideo15Transformer3DModel:
    transformer: Any = HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=text.TEXT_WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    return transformer.eval()  # type: ignore[no-any-return]
