"""Qwen-Image text-to-image: Qwen-Image and Qwen-Image-2512."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License, Site

FAMILY = DiffusionFamily(
    name="qwen_image",
    checkpoint_module="dit_lora.families.qwen_image.checkpoint",
    tiny_module="dit_lora.families.qwen_image.tiny",
    # The default targets are what Diffusers' train_dreambooth_lora_qwen_image.py adapts: attention of the image's stream.
    group_patterns={
        "connector": (
            "img_in.*",
            "txt_in.*",
            "txt_norm.*",
            "time_text_embed.*",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    masked_attention=True,  # of captions
    pipeline_names=("QwenImagePipeline",),
    default_recipe="qwen_image/base",
    # Each one's card.
    licenses={
        "Qwen/Qwen-Image": License("apache-2.0"),
        "Qwen/Qwen-Image-2512": License("apache-2.0"),
    },
    # ComfyUI's model has Diffusers' names (comfy/ldm/qwen_image/model.py at 01f4512). Behind this prefix Diffusers reads
    # them back with alpha, behind `transformer.` without alone (_convert_non_diffusers_qwen_lora_to_diffusers in
    # loaders/lora_conversion_utils.py).
    comfyui=LayerNames(),
    sites=(
        Site(
            family="qwen_image",
            variant="qwen-image",
            data={"height": 64, "width": 64},
            samples="images",
            attention="transformer_blocks.1.attn",
            ff="transformer_blocks.0.img_mlp",
            ff_out="transformer_blocks.0.img_mlp.net.2",
            modulation="transformer_blocks.1.img_mod.1",
            time_proj="time_text_embed.time_proj",
        ),
    ),
)
