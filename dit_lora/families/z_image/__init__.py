"""Z-Image text-to-image: the base, and Turbo, which is distilled from it to eight steps."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="z_image",
    # The default targets are those of Diffusers' train_dreambooth_lora_z_image.py: attention of the 30 layers and of
    # both refiners, 136 layers. musubi-tuner skips the refiners (as `lora.targets` of `layers.*` does).
    group_patterns={
        "connector": (
            "all_x_embedder.*",
            "cap_embedder.*",
            "t_embedder.*",
            "x_pad_token",
            "cap_pad_token",
            "all_final_layer.*",
        ),
        "backbone": ("noise_refiner.*", "context_refiner.*", "layers.*"),
    },
    pipeline_names=("ZImagePipeline",),
    default_recipe="z_image/base",
    licenses={"Tongyi-MAI/Z-Image*": License("apache-2.0")},  # from their cards
    # Captions of a batch differ in length, so samples do too and need a mask.
    has_attention_mask=True,
    # ComfyUI's map has Diffusers' names of every linear layer (comfy/utils.py at b3be02d, z_image_to_diffusers), with
    # their prefix (comfy/lora.py at 17358c8, Lumina2).
    comfyui=LayerNames(prefix="transformer.", reads_alpha=False),
    tiny_variants=("z-image", "z-image-turbo"),
)
