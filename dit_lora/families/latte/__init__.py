"""Latte text-to-video (Latte-1)."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="latte",
    group_patterns={
        "connector": ("pos_embed.*", "adaln_single.*", "caption_projection.*", "scale_shift_table", "proj_out.*"),
        "backbone": ("transformer_blocks.*", "temporal_transformer_blocks.*"),
    },
    has_attention_mask=True,  # masks the padding of captions
    pipeline_names=("LattePipeline",),
    default_recipe="latte/latte1_lora",
    licenses={"maxin-cn/Latte-1": License("apache-2.0")},
    comfyui=make_unsupported_names("ComfyUI does not support Latte"),
    tiny_variants=("latte",),
)
