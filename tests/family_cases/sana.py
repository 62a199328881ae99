"""Sana and SANA-Video."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dit_lora.config.data import VideoShape
from dit_lora.families import get_family
from family_cases.case import Case, Smoke, captioned_images

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    # As SanaPipeline.__call__ ends.
    return pipeline.vae.decode(clean / pipeline.vae.config.scaling_factor, return_dict=False)[0]


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


def decode_video(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """As SanaVideoPipeline.__call__ ends with Wan's autoencoder."""
    config = pipeline.vae.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    return pipeline.vae.decode(clean * std + mean, return_dict=False)[0]


TAKES = frozenset({"lora_linear", "ada_norm", "relu_linear_attention", "silu_dwconv_glu"})

CASES = (
    *(
        Case(
            family="sana",
            variant=variant,
            native=VideoShape(1, 64, 96),
            off_native=VideoShape(1, 96, 32),
            captions=("picture 0", "a Picture 1", "a longer caption, 2"),
            decode=decode,
            vae_decode=vae_decode,
            takes=TAKES | ({"qk_norm_rope"} if variant == "sana-1.5" else set()),
            refused=(
                (
                    VideoShape(1, 60, 96),
                    "height must be a multiple of 32; got 60, nearest 32 and 64",
                ),
                (VideoShape(1, 64, 7), "width must be a multiple of 32; got 7, nearest 32"),
                (VideoShape(9, 64, 96), "frames must be 1, Sana makes images; got 9"),
            ),
        )
        for variant in ("sana-600m", "sana-1.5", "sana-fp16")
    ),
    Case(
        family="sana_video",
        variant="sana-video",
        native=VideoShape(9, 64, 96),
        off_native=VideoShape(13, 96, 32),
        captions=("clip 0", "clip 1. motion score: 5.", "another clip, 2"),
        decode=decode_video,
        vae_decode=vae_decode,
        takes=TAKES | {"qk_norm_rope"},
        refused=(
            (VideoShape(9, 60, 96), "height must be a multiple of 32; got 60, nearest 32 and 64"),
            (VideoShape(9, 64, 7), "width must be a multiple of 32; got 7, nearest 32"),
            (VideoShape(10, 64, 96), r"frames must be 4n \+ 1; got 10, nearest 9 and 13"),
        ),
    ),
)
SMOKES = {"sana": Smoke("sana-fp16", captioned_images), "sana_video": Smoke("sana-video")}


def saturating(tiny: Path, out: Path) -> Path:
    """The tiny fp16 checkpoint with attention outputs beyond 65504, as the published ones have."""
    get_family("sana").build_tiny_checkpoint(tiny.name, out, 0)
    weights = load_file(out / WEIGHTS)
    for name, tensor in weights.items():
        if "attn1.to_v" in name:
            tensor *= 3e4
        if "attn1.to_out.0.weight" in name:
            tensor *= 20
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    return out
