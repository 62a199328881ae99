"""Chroma text-to-image: FLUX.1-schnell's blocks without guidance and pooled text, trained on from there."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="chroma",
    checkpoint_module="dit_lora.families.chroma.checkpoint",
    tiny_module="dit_lora.families.chroma.tiny",
    # FLUX.1's targets: attention of both kinds of blocks, and both streams' feed-forward.
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),
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
