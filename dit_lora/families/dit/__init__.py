"""DiT: class-conditional images, every checkpoint in Diffusers' format."""

from typing import TYPE_CHECKING

from dit_lora.families.family import DiffusionFamily, License, Site

if TYPE_CHECKING:
    from pathlib import Path

    from dit_lora.config.recipe import ModelConfig
    from dit_lora.families.base import Checkpoint


def _stored(family: DiffusionFamily, model: "ModelConfig") -> "Checkpoint":
    from dit_lora.families.dit.checkpoint import open_checkpoint

    return open_checkpoint(family, model)


def _build_tiny(variant: str, out: "Path", seed: int) -> None:
    from dit_lora.families.dit.tiny import build_dit

    build_dit(out, seed=seed)


FAMILY = DiffusionFamily(
    name="dit",
    group_patterns={
        "connector": (
            "pos_embed.*",
            "transformer_blocks.*.norm1.emb.timestep_embedder.*",
            "transformer_blocks.*.norm1.emb.class_embedder.*",
            "proj_out_1.*",
            "proj_out_2.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("DiTPipeline",),
    default_recipe="dit/xl2_256_lora",
    # Its page states none; LICENSE.txt of facebookresearch/DiT does.
    licenses={"facebook/DiT-XL-2-*": License("cc-by-nc-4.0")},
    called_alone=("transformer_blocks.0.norm1.emb",),  # the head embeds time and class by it
    comfyui="ComfyUI has no DiT with class labels",
    sites=(
        Site(
            family="dit",
            variant="dit-tiny",
            data={"height": 32, "width": 32},
            samples="classes",
            last="proj_out_2",
            time_proj="transformer_blocks.1.norm1.emb.time_proj",
            text=None,
            has_buffers=True,
            class_table="transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight",
        ),
    ),
    stored=_stored,
    build_tiny=_build_tiny,
)
