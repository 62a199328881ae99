"""Chroma text-to-image: FLUX.1-schnell's blocks without guidance and pooled text, trained on from there."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License
from dit_lora.families.flux import FAMILY as FLUX

FAMILY = DiffusionFamily(
    name="chroma",
    lora_targets=FLUX.lora_targets,
    group_patterns={
        # `distilled_guidance_layer` computes the modulation of all blocks.
        "connector": ("x_embedder.*", "context_embedder.*", "distilled_guidance_layer.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*", "single_transformer_blocks.*"),
    },
    pipeline_names=("ChromaPipeline",),
    default_recipe="chroma/hd",
    licenses={"lodestones/Chroma*": License("apache-2.0")},  # from their cards
    # ComfyUI's Chroma is one of its FLUX models, whose map has Diffusers' names (comfy/utils.py, flux_to_diffusers),
    # with their prefix. The map has no layer that only Chroma has.
    comfyui=LayerNames(prefix="transformer.", reads_alpha=False, unnamed_layers=("distilled_guidance_layer.*",)),
    tiny_variants=("chroma",),
)
