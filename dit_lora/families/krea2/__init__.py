"""Krea 2 text-to-image: Raw, for training, and the distilled Turbo, which samples with adapters trained on Raw."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_LICENSE = License("other", "krea-2-community-license", "https://www.krea.ai/krea-2-licensing")
_ATTENTION_NAMES = {"to_q": "wq", "to_k": "wk", "to_v": "wv", "to_out.0": "wo", "to_gate": "gate"}
# Names in the published files of each block's layers (diffusers: loaders/lora_conversion_utils.py,
# _convert_non_diffusers_krea2_lora_to_diffusers).
_BLOCK_LAYERS = {
    **{f"attn.{ours}": f"attn.{theirs}" for ours, theirs in _ATTENTION_NAMES.items()},
    **{f"ff.{name}": f"mlp.{name}" for name in ("gate", "up", "down")},
}
_BLOCK_NAMES = {
    "transformer_blocks.*": "blocks.*",
    "text_fusion.layerwise_blocks.*": "txtfusion.layerwise_blocks.*",
    "text_fusion.refiner_blocks.*": "txtfusion.refiner_blocks.*",
}

FAMILY = DiffusionFamily(
    name="krea2",
    # Krea's recommendation for long runs (diffusers: examples/dreambooth/README_krea2.md), in the blocks and in the
    # fusion of the text encoder's layers. The longer list of its script is in the recipe.
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "to_gate"),
    group_patterns={
        "connector": ("img_in.*", "time_embed.*", "time_mod_proj.*", "text_fusion.*", "txt_in.*", "final_layer.*"),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("Krea2Pipeline",),
    default_recipe="krea2/raw",
    licenses={"krea/Krea-2-*": _LICENSE},
    has_attention_mask=True,  # masks the padding of captions
    # The published model's own names, which ComfyUI uses and Diffusers' loader converts; that loader accepts no
    # `.alpha`. ComfyUI's map also has Diffusers' names, but for the fusion only those of its first two blocks of each
    # kind.
    comfyui=LayerNames(
        renames={
            **{
                f"{block}.{layer}": f"{theirs}.{name}"
                for block, theirs in _BLOCK_NAMES.items()
                for layer, name in _BLOCK_LAYERS.items()
            },
            "img_in": "first",
            "time_embed.linear_1": "tmlp.0",
            "time_embed.linear_2": "tmlp.2",
            "time_mod_proj": "tproj.1",
            "txt_in.linear_1": "txtmlp.1",
            "txt_in.linear_2": "txtmlp.3",
            "text_fusion.projector": "txtfusion.projector",
            "final_layer.linear": "last.linear",
        },
        reads_alpha=False,
    ),
    tiny_variants=("krea2-raw",),
)
