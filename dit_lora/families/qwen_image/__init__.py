"""Qwen-Image and Qwen-Image-2512 (from text), and Qwen-Image-Edit, -2509 and -2511 (from images and a prompt)."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="qwen_image",
    checkpoint_module="dit_lora.families.qwen_image.opened",
    # The default targets are those of Diffusers' train_dreambooth_lora_qwen_image.py: attention of the image stream.
    group_patterns={
        "connector": ("img_in.*", "txt_in.*", "txt_norm.*", "time_text_embed.*", "norm_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    has_attention_mask=True,  # masks the padding of captions
    pipeline_names=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    default_recipe="qwen_image/base",
    # From the card of each model.
    licenses={
        f"Qwen/{name}": License("apache-2.0")
        for name in (
            "Qwen-Image",
            "Qwen-Image-2512",
            "Qwen-Image-Edit",
            "Qwen-Image-Edit-2509",
            "Qwen-Image-Edit-2511",
        )
    },
    # ComfyUI's model has Diffusers' names (comfy/ldm/qwen_image/model.py at 01f4512). With this prefix Diffusers loads
    # them with alpha, with `transformer.` only without (_convert_non_diffusers_qwen_lora_to_diffusers in
    # loaders/lora_conversion_utils.py).
    comfyui=LayerNames(),
    tiny_variants=("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"),
)
