"""CogVideoX 1.0 and 1.5, text-to-video and image-to-video; the checkpoint's configs say which."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_LICENSE = License("other", "cogvideox-license", "https://huggingface.co/THUDM/CogVideoX-5b/blob/main/LICENSE")


FAMILY = DiffusionFamily(
    name="cogvideox",
    # The default targets are those of CogVideo's and Diffusers' own trainers (finetune/schemas/args.py).
    group_patterns={
        "connector": (
            "patch_embed.*",
            "time_embedding.*",
            "ofs_embedding.*",
            "norm_final.*",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
    default_recipe="cogvideox/2b_t2v",
    licenses={
        "THUDM/CogVideoX-2b": License("apache-2.0"),
        "zai-org/CogVideoX-2b": License("apache-2.0"),
        "THUDM/CogVideoX*": _LICENSE,
        "zai-org/CogVideoX*": _LICENSE,
    },
    # Comfy-Org/ComfyUI, comfy/ldm/cogvideo/model.py.
    comfyui=LayerNames(
        renames={
            "transformer_blocks.*.norm1.linear": "blocks.*.norm1.linear",
            "transformer_blocks.*.norm2.linear": "blocks.*.norm2.linear",
            "transformer_blocks.*.attn1.to_q": "blocks.*.q",
            "transformer_blocks.*.attn1.to_k": "blocks.*.k",
            "transformer_blocks.*.attn1.to_v": "blocks.*.v",
            "transformer_blocks.*.attn1.to_out.0": "blocks.*.attn_out",
            "transformer_blocks.*.ff.net.0.proj": "blocks.*.ff_proj",
            "transformer_blocks.*.ff.net.2": "blocks.*.ff_out",
            "patch_embed.proj": "patch_embed.proj",
            "patch_embed.text_proj": "patch_embed.text_proj",
            "time_embedding.linear_1": "time_embedding_linear_1",
            "time_embedding.linear_2": "time_embedding_linear_2",
            "ofs_embedding.linear_1": "ofs_embedding_linear_1",
            "ofs_embedding.linear_2": "ofs_embedding_linear_2",
            "norm_out.linear": "norm_out.linear",
            "proj_out": "proj_out",
        }
    ),
    has_kohya_layout=True,
    tiny_variants=("cogvideox-2b", "cogvideox-5b", "cogvideox-5b-i2v", "cogvideox-1.5", "cogvideox-1.5-i2v"),
)
