"""Sana text-to-image: 0.6B, 1.6B, and 1.5 of 1.6B and 4.8B."""

from dit_lora.adapters.layer_names import no_names
from dit_lora.families.family import DiffusionFamily, License, Site


def _site(variant: str) -> Site:
    return Site(
        family="sana",
        variant=variant,
        data={"height": 64, "width": 64},
        samples="images",
        ff_out="transformer_blocks.0.ff.conv_point",
        modulation="time_embed.linear",
        time_proj="time_embed.emb.time_proj",
        posterior=False,
    )


FAMILY = DiffusionFamily(
    name="sana",
    checkpoint_module="dit_lora.families.sana.checkpoint",
    tiny_module="dit_lora.families.sana.tiny",
    # to_q, to_k and to_v are what Diffusers' train_dreambooth_lora_sana.py adapts; of self and cross attention.
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
    masked_attention=True,  # of captions
    pipeline_names=("SanaPipeline",),
    default_recipe="sana/600m_512",
    # Its cards: "NSCL v2-custom, ./LICENSE.txt", and Gemma's terms for the text encoder.
    licenses={"Efficient-Large-Model/S[Aa][Nn][Aa]*": License("other", "nscl-v2-custom")},
    comfyui=no_names(
        "ComfyUI has no Sana; the nodes that have one (ComfyUI_ExtraModels) load no LoRA for it"
    ),
    sites=tuple(_site(variant) for variant in ("sana-600m", "sana-1.5", "sana-fp16")),
)
