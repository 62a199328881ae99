"""Kandinsky 5.0 text-to-video: its models of five-second clips, with attention between all tokens."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="kandinsky5",
    # The layers of the authors' LoRAs of camera movements (their training config in ai-forever/Kandinsky-5).
    lora_targets=(
        "self_attention.to_query",
        "self_attention.to_key",
        "self_attention.to_value",
        "self_attention.out_layer",
        "cross_attention.to_query",
        "cross_attention.to_key",
        "cross_attention.to_value",
        "cross_attention.out_layer",
        "feed_forward.in_layer",
        "feed_forward.out_layer",
    ),
    group_patterns={
        "connector": (
            "time_embeddings.*",
            "text_embeddings.*",
            "pooled_text_embeddings.*",
            "visual_embeddings.*",
            "out_layer.*",
        ),
        "backbone": ("text_transformer_blocks.*", "visual_transformer_blocks.*"),
    },
    pipeline_names=("Kandinsky5T2VPipeline",),
    pipeline_packages=("torchvision",),  # its processor has one for videos
    default_recipe="kandinsky5/lite_t2v_5s",
    # Its authors are kandinskylab on the Hub, formerly ai-forever.
    licenses={f"{owner}/Kandinsky-5.0-*": License("mit") for owner in ("kandinskylab", "ai-forever")},
    # ComfyUI's network has Diffusers' module names (comfy/ldm/kandinsky5/model.py at 0c84b76).
    comfyui=LayerNames(reads_alpha=False),
    tiny_variants=("kandinsky-5-t2v",),
)
