"""Latte text-to-video (Latte-1)."""

from typing import TYPE_CHECKING

from dit_lora.families.family import DiffusionFamily, License, Site

if TYPE_CHECKING:
    from pathlib import Path

    from dit_lora.config.recipe import ModelConfig
    from dit_lora.families.base import Checkpoint


def _stored(family: DiffusionFamily, model: "ModelConfig") -> "Checkpoint":
    from dit_lora.families.latte.checkpoint import open_checkpoint

    return open_checkpoint(family, model)


def _build_tiny(variant: str, out: "Path", seed: int) -> None:
    from dit_lora.families.video_dit.tiny import build_latte

    build_latte(out, seed=seed)


FAMILY = DiffusionFamily(
    name="latte",
    group_patterns={
        "connector": (
            "pos_embed.*",
            "adaln_single.*",
            "caption_projection.*",
            "scale_shift_table",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*", "temporal_transformer_blocks.*"),
    },
    pipeline_names=("LattePipeline",),
    default_recipe="latte/latte1_lora",
    licenses={"maxin-cn/Latte-1": License("apache-2.0")},
    comfyui="ComfyUI has no Latte",
    sites=(
        Site(
            family="latte",
            variant="latte",
            data={"frames": 4, "height": 32, "width": 32, "fps": 8},
            attention="transformer_blocks.0.attn1",
            modulation="adaln_single.linear",
            time_proj="adaln_single.emb.time_proj",
            has_buffers=True,
        ),
    ),
    stored=_stored,
    build_tiny=_build_tiny,
)
