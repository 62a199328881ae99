"""Qwen-Image 2.1 text-to-image, and Qwen-Image-2.1-Turbo, which is distilled from it to eight steps."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="qwen_image21",
    # The default targets are those of Diffusers' train_dreambooth_lora_qwenimage21.py.
    group_patterns={
        "connector": ("img_in.*", "txt_in.*", "time_text_embed.*", "modulation.*", "norm_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    has_attention_mask=True,  # of text, which is causal
    pipeline_names=("QwenImage21Pipeline",),
    pipeline_packages=("torchvision",),  # its processor has one for videos
    default_recipe="qwen_image21/base",
    # Its LICENSE is the Qwen Research License: commercial use needs another one.
    licenses={
        "Qwen/Qwen-Image-2.1*": License(
            "other", "qwen-research", "https://huggingface.co/Qwen/Qwen-Image-2.1/blob/main/LICENSE"
        )
    },
    # ComfyUI's model has Diffusers' names (comfy/ldm/qwen_image21/model.py at 08f68f0), but joins these two layers for
    # some checkpoints. Diffusers loads its files, alpha included (lora_conversion_utils.py, as Qwen-Image's).
    comfyui=LayerNames(unnamed_layers=("*.img_mlp.gate_layer", "*.img_mlp.proj")),
    tiny_variants=("qwen-image-2.1",),
)
