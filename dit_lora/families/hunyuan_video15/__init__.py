"""HunyuanVideo-1.5 text-to-video, under the Tencent Hunyuan Community License, which has territory terms."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="hunyuan_video15",
    checkpoint_module="dit_lora.families.hunyuan_video15.checkpoint",
    tiny_module="dit_lora.families.hunyuan_video15.tiny",
    # The default targets are the attention of all blocks, with the two of the text's token refiner.
    group_patterns={
        "connector": (
            "x_embedder.*",
            "image_embedder.*",
            "context_embedder.*",
            "context_embedder_2.*",
            "time_embed.*",
            "cond_type_embed.*",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("HunyuanVideo15Pipeline",),
    default_recipe="hunyuan_video15/480p_t2v",
    licenses={
        "hunyuanvideo-community/HunyuanVideo-1.5*": License(
            "other",
            "tencent-hunyuan-community",
            "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE",
        )
    },
    has_attention_mask=True,
    comfyui=make_unsupported_names(
        "ComfyUI's HunyuanVideo-1.5 has one layer for query, key and value, and no names for three"
    ),
    tiny_variants=("hunyuan-video-1.5",),
)
