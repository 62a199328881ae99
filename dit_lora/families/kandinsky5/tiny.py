"""A tiny random Kandinsky 5.0, whose tokenizer splits the pipeline's prompt template into as many tokens as Qwen's."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from transformers import Qwen2VLProcessor

from dit_lora.families.chat.tiny import TEXT_WIDTH
from dit_lora.families.opening import build_empty_pipeline
from dit_lora.families.qwen_image.tiny import build_text_components, write_processor
from dit_lora.families.tiny.text import POOLED_WIDTH, build_clip_encoder, build_clip_tokenizer
from dit_lora.families.tiny.vae import LATENT_CHANNELS, narrow_posterior

# Words of the template that are two tokens in Qwen's vocabulary, and a line's end, which is a single one.
_SPLIT_WORDS = {" dynamism": " dynam\nism", " postprocessing": " post\nprocessing", " scren": " sc\nren"}
_LINE_END = ".\n"


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny Kandinsky 5.0 pipeline with weights from torch's default generator."""
    template = build_empty_pipeline(Kandinsky5T2VPipeline).prompt_template
    for word, parts in _SPLIT_WORDS.items():
        template = template.replace(word, parts)
    text, clip = build_text_components("qwen2.5-vl", template, (_LINE_END,)), build_clip_tokenizer()
    no_processor: Any = None
    pipeline: Any = Kandinsky5T2VPipeline(
        transformer=_build_transformer(),
        vae=_build_vae(),
        text_encoder=text["text_encoder"],
        tokenizer=no_processor,
        text_encoder_2=build_clip_encoder(clip),
        tokenizer_2=clip,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),  # the published shift
    )
    pipeline._optional_components = [*pipeline._optional_components, "tokenizer"]
    pipeline.save_pretrained(folder, safe_serialization=True)
    # Written separately: Transformers' class contains a video processor, which needs torchvision.
    write_processor("qwen2.5-vl", Qwen2VLProcessor.__name__, text["tokenizer"], folder, "tokenizer")


def _build_vae() -> AutoencoderKLHunyuanVideo:
    vae: Any = AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    narrow_posterior(vae.quant_conv, LATENT_CHANNELS)
    return vae.eval()  # type: ignore[no-any-return]


def _build_transformer() -> Kandinsky5Transformer3DModel:
    transformer: Any = Kandinsky5Transformer3DModel(
        in_visual_dim=LATENT_CHANNELS,
        out_visual_dim=LATENT_CHANNELS,
        in_text_dim=TEXT_WIDTH,
        in_text_dim2=POOLED_WIDTH,
        time_dim=32,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=2,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        visual_cond=True,  # as published
    )
    with torch.no_grad():
        # The initial zeros would make every block the identity.
        for name, parameter in transformer.named_parameters():
            if "modulation" in name:
                parameter.normal_(std=0.3)
    return transformer.eval()  # type: ignore[no-any-return]
