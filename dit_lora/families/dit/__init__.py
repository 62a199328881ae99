"""DiT: class-conditional images, every checkpoint in Diffusers' format."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily, License

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
    # Its page states no licence; LICENSE.txt of facebookresearch/DiT does.
    licenses={"facebook/DiT-XL-2-*": License("cc-by-nc-4.0")},
    # The head embeds timestep and class with it.
    directly_called_modules=("transformer_blocks.0.norm1.emb",),
    comfyui=make_unsupported_names("ComfyUI does not support DiT with class labels"),
    tiny_variants=("dit-tiny",),
)
