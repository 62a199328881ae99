"""SANA-Video text-to-video: the checkpoints with Wan's autoencoder (2B, 480p)."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="sana_video",
    group_patterns={
        "connector": (
            "patch_embedding.*",
            "time_embed.*",
            "caption_projection.*",
            "caption_norm.*",
            "scale_shift_table",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    has_attention_mask=True,  # masks the padding of captions
    pipeline_names=("SanaVideoPipeline",),
    default_recipe="sana/video_2b",
    licenses={
        "Efficient-Large-Model/SANA-Video_*": License(
            "other",
            "nvidia-open-model-license",
            "https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
        )
    },
    comfyui=make_unsupported_names("ComfyUI does not support SANA-Video"),
    tiny_variants=("sana-video",),
)
