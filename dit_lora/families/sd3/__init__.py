"""Stable Diffusion 3.5 text-to-image, large and medium; 3.0 medium uses the same code."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="sd3",
    # Attention of both streams, as in Diffusers' train_dreambooth_lora_sd3.py. The checkpoint adds the text's queries,
    # except in the last block, and medium's second attention.
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ),
    group_patterns={
        "connector": ("pos_embed.*", "context_embedder.*", "time_text_embed.*", "norm_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("StableDiffusion3Pipeline",),
    default_recipe="sd3/3.5_medium",
    licenses={
        base: License("other", "stabilityai-ai-community", f"https://huggingface.co/{base}/blob/main/LICENSE.md")
        for base in (
            "stabilityai/stable-diffusion-3.5-large",
            "stabilityai/stable-diffusion-3.5-large-turbo",
            "stabilityai/stable-diffusion-3.5-medium",
        )
    },
    # ComfyUI's map has Diffusers' names, with their prefix (comfy/utils.py, mmdit_to_diffusers).
    comfyui=LayerNames(prefix="transformer.", reads_alpha=False),
    tiny_variants=("sd3.5-medium", "sd3.5-large"),
)
