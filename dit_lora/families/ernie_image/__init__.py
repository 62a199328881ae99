"""ERNIE-Image text-to-image: the base, and Turbo, which is distilled from it to eight steps."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="ernie_image",
    # The default targets are also SimpleTuner's (simpletuner/helpers/models/ernie/model.py): attention of all layers.
    group_patterns={
        "connector": (
            "x_embedder.*",
            "text_proj.*",
            "time_embedding.*",
            "adaLN_modulation.*",
            "final_norm.*",
            "final_linear.*",
        ),
        "backbone": ("layers.*",),
    },
    pipeline_names=("ErnieImagePipeline",),
    default_recipe="ernie_image/base",
    licenses={"baidu/ERNIE-Image*": License("apache-2.0")},  # from their cards
    # Captions of a batch differ in length and are padded.
    has_attention_mask=True,
    # ComfyUI's network has Diffusers' module names (comfy/ldm/ernie/model.py at 7b30bf3).
    comfyui=LayerNames(reads_alpha=False),
    tiny_variants=("ernie-image",),
)
