"""The video DiT, of classes and of text."""

from typing import Any

from dit_lora.adapters.layer_names import no_names
from dit_lora.families.family import DiffusionFamily, Site

_SITE: dict[str, Any] = {
    "family": "video_dit",
    "data": {"frames": 9, "height": 32, "width": 48, "fps": 8},
    "attention": "transformer_blocks.1.attn",
    "modulation": "transformer_blocks.1.adaln.linear",
}


FAMILY = DiffusionFamily(
    name="video_dit",
    checkpoint_module="dit_lora.families.video_dit.checkpoint",
    tiny_module="dit_lora.families.video_dit.tiny",
    group_patterns={
        "connector": (
            "patch_embed.*",
            "time_embed.*",
            "class_embed.*",
            "text_embed.*",
            "adaln_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    masked_attention=True,  # of captions
    pipeline_names=("VideoDiTPipeline",),
    default_recipe="video_dit/ucf101_lora",
    comfyui=no_names("ComfyUI has no such model"),
    sites=(
        Site(
            **_SITE,
            variant="video-dit-class",
            samples="class_clips",
            text=None,
            class_table="class_embed.weight",
        ),
        Site(**_SITE, variant="video-dit-text", text="pooled_projections"),
    ),
)
