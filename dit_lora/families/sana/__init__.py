"""Sana text-to-image: 0.6B, 1.6B, and 1.5 of 1.6B and 4.8B."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="sana",
    # Diffusers' train_dreambooth_lora_sana.py adapts to_q, to_k and to_v of self and cross attention.
    group_patterns={
        "connector": (
            "patch_embed*",
            "time_embed.*",
            "caption_projection.*",
            "caption_norm.*",
            "scale_shift_table",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    has_attention_mask=True,  # masks the padding of captions
    pipeline_names=("SanaPipeline",),
    default_recipe="sana/600m_512",
    # Its cards: "NSCL v2-custom, ./LICENSE.txt", and Gemma's terms for the text encoder.
    licenses={"Efficient-Large-Model/S[Aa][Nn][Aa]*": License("other", "nscl-v2-custom")},
    comfyui=make_unsupported_names("ComfyUI does not support Sana, and ComfyUI_ExtraModels loads no LoRA for it"),
    tiny_variants=("sana-600m", "sana-1.5", "sana-fp16"),
)
