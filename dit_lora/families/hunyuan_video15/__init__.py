"""HunyuanVideo-1.5 text-to-video, whose licence does not apply in the EU, the United Kingdom and South Korea."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_REFINER = "context_embedder.token_refiner.refiner_blocks.*"
_COMFYUI_REFINER = "txt_in.individual_token_refiner.blocks.*"
# ComfyUI's model has one layer for query, key and value (comfy/ldm/hunyuan_video/model.py, as of the copy
# yzkee/ComfyUI at 8d53494). Its layers outside of the blocks have no names here.
_COMFYUI = LayerNames(
    renames={
        "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn.proj",
        "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn.proj",
        "transformer_blocks.*.ff.net.0.proj": "double_blocks.*.img_mlp.0",
        "transformer_blocks.*.ff.net.2": "double_blocks.*.img_mlp.2",
        "transformer_blocks.*.ff_context.net.0.proj": "double_blocks.*.txt_mlp.0",
        "transformer_blocks.*.ff_context.net.2": "double_blocks.*.txt_mlp.2",
        # Shift, scale and gate of attention, then of the feed-forward layers, in both.
        "transformer_blocks.*.norm1.linear": "double_blocks.*.img_mod.lin",
        "transformer_blocks.*.norm1_context.linear": "double_blocks.*.txt_mod.lin",
        f"{_REFINER}.attn.to_out.0": f"{_COMFYUI_REFINER}.self_attn.proj",
        f"{_REFINER}.ff.net.0.proj": f"{_COMFYUI_REFINER}.mlp.0",
        f"{_REFINER}.ff.net.2": f"{_COMFYUI_REFINER}.mlp.2",
    },
    joined_layers={
        "double_blocks.*.img_attn.qkv": tuple(f"transformer_blocks.*.attn.to_{part}" for part in "qkv"),
        "double_blocks.*.txt_attn.qkv": tuple(f"transformer_blocks.*.attn.add_{part}_proj" for part in "qkv"),
        f"{_COMFYUI_REFINER}.self_attn.qkv": tuple(f"{_REFINER}.attn.to_{part}" for part in "qkv"),
    },
)
FAMILY = DiffusionFamily(
    name="hunyuan_video15",
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
    # For every copy of the weights.
    licenses={
        "*HunyuanVideo-1.5*": License(
            "other",
            "tencent-hunyuan-community",
            "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE",
        )
    },
    has_attention_mask=True,
    comfyui=_COMFYUI,
    tiny_variants=("hunyuan-video-1.5",),
)
