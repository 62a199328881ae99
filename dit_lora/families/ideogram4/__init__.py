"""Ideogram 4 text-to-image, whose guidance compares with a second, unconditional transformer."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="ideogram4",
    # The targets of Diffusers' train_dreambooth_lora_ideogram4.py and of musubi-tuner: all linear layers of the blocks
    # but the modulation.
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"),
    group_patterns={
        "connector": (
            *("input_proj.*", "llm_cond_norm.*", "llm_cond_proj.*", "t_embedding.*", "adaln_proj.*"),
            *("embed_image_indicator.*", "final_layer.*"),
        ),
        "backbone": ("layers.*",),
    },
    pipeline_names=("Ideogram4Pipeline",),
    default_recipe="ideogram4/base",
    # The Ideogram Non-Commercial Model Agreement, for every copy of the weights.
    licenses={
        "*[Ii]deogram-[4v]*": License(
            "other",
            "ideogram-4-non-commercial",
            "https://huggingface.co/ideogram-ai/ideogram-4-fp8/blob/main/LICENSE.md",
        )
    },
    has_attention_mask=True,  # the model masks pads, and always passes a mask
    # ComfyUI's model is the published one, with one layer for query, key and value (comfy/ldm/ideogram4/model.py at
    # 7b30bf3). Diffusers loads its files of the blocks, alpha included.
    comfyui=LayerNames(
        joined_layers={
            "layers.*.attention.qkv": tuple(f"layers.*.attention.to_{part}" for part in "qkv"),
            "layers.*.attention.o": ("layers.*.attention.to_out.0",),
        }
    ),
    tiny_variants=("ideogram-4",),
)
