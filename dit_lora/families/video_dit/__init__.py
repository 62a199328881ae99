"""The video DiT, conditioned on classes or on text."""

from dit_lora.adapters.layer_names import make_unsupported_names
from dit_lora.families.family import DiffusionFamily

FAMILY = DiffusionFamily(
    name="video_dit",
    group_patterns={
        "connector": ("patch_embed.*", "time_embed.*", "class_embed.*", "text_embed.*", "adaln_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    has_attention_mask=True,  # masks the padding of captions
    pipeline_names=("VideoDiTPipeline",),
    default_recipe="video_dit/ucf101_lora",
    comfyui=make_unsupported_names("ComfyUI does not support this model"),
    tiny_variants=("video-dit-class", "video-dit-text"),
)
