"""Complete random video DiT pipelines, small enough for tests and demos on a CPU."""

from pathlib import Path
from typing import Any

import torch

from dit_lora.families.tiny.text import POOLED_WIDTH, build_clip_encoder, build_clip_tokenizer
from dit_lora.families.tiny.vae import build_sd_vae
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_base import build_iddpm_scheduler
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline

# The class names of `dit-lora tiny shapes`.
CLASSES = ("blue disc", "blue square", "green disc", "green square", "red disc", "red square")


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny pipeline like VDiT-XL/1x2x2 for 4 frames of 32x48, with six classes or conditioned on CLIP."""
    text = variant == "video-dit-text"
    # Exactly one of the two conditions.
    condition = {"text_dim": POOLED_WIDTH} if text else {"num_classes": len(CLASSES)}
    transformer: Any = VideoDiTTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        sample_frames=4,
        sample_height=4,
        sample_width=6,
        **condition,  # type: ignore[arg-type]
    )
    _randomize_zero_weights(transformer)
    tokenizer = build_clip_tokenizer() if text else None
    labels = {str(row): name for row, name in enumerate(CLASSES)}
    pipeline: Any = VideoDiTPipeline(
        transformer=transformer,
        vae=build_sd_vae(),
        scheduler=build_iddpm_scheduler(),
        text_encoder=build_clip_encoder(tokenizer) if tokenizer else None,
        tokenizer=tokenizer,
        id2label=None if text else labels,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _randomize_zero_weights(transformer: VideoDiTTransformer3DModel) -> None:
    """Randomize the zero-initialized layers: a fresh adaLN-zero model outputs zeros and passes no gradient on."""
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if name.startswith("proj_out") or "adaln" in name:
                parameter.normal_(std=0.1)
