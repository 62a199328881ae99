"""A family of a package of its own: Stable Diffusion 3 under another name. Its entry point is `toy`."""

from dit_lora.families.family import DiffusionFamily

FAMILY = DiffusionFamily(
    name="toy",
    checkpoint_module="toy_family.checkpoint",
    tiny_module="toy_family.tiny",
    lora_targets=("attn.to_q", "attn.to_k", "attn.to_v"),
    group_patterns={"connector": ("pos_embed.*", "proj_out.*"), "backbone": ("transformer_blocks.*",)},
    pipeline_names=("ToyPipeline",),
    default_recipe="smoke/sd3",
    tiny_variants=("toy-image",),
)
