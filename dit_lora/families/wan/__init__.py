"""Wan 2.1 and 2.2: text-to-video and image-to-video, with one transformer or two experts, as the files say."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="wan",
    # The default targets are those of finetrainers; musubi-tuner adapts every linear layer of the blocks.
    group_patterns={
        "connector": ("patch_embedding.*", "condition_embedder.*", "scale_shift_table", "proj_out.*"),
        "backbone": ("blocks.*",),
    },
    pipeline_names=("WanPipeline", "WanImageToVideoPipeline"),
    default_recipe="wan/2.1_t2v_1.3b",
    licenses={"Wan-AI/Wan2.[12]-*": License("apache-2.0")},
    pipeline_packages=("ftfy",),
    # The inverse of Diffusers' _convert_non_diffusers_wan_lora_to_diffusers (loaders/lora_conversion_utils.py).
    comfyui=LayerNames(
        renames={
            **{
                f"blocks.*.{ours}.{layer}": f"blocks.*.{theirs}.{name}"
                for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
                for layer, name in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
            },
            "blocks.*.attn2.add_k_proj": "blocks.*.cross_attn.k_img",
            "blocks.*.attn2.add_v_proj": "blocks.*.cross_attn.v_img",
            "blocks.*.ffn.net.0.proj": "blocks.*.ffn.0",
            "blocks.*.ffn.net.2": "blocks.*.ffn.2",
            "condition_embedder.text_embedder.linear_1": "text_embedding.0",
            "condition_embedder.text_embedder.linear_2": "text_embedding.2",
            "condition_embedder.time_embedder.linear_1": "time_embedding.0",
            "condition_embedder.time_embedder.linear_2": "time_embedding.2",
            "condition_embedder.time_proj": "time_projection.1",
            "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
            "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
            "proj_out": "head.head",
        }
    ),
    tiny_variants=(
        "wan-2.1-t2v",
        "wan-2.1-i2v",
        "wan-2.1-flf2v",
        "wan-2.2-t2v-a14b",
        "wan-2.2-i2v-a14b",
        "wan-2.2-ti2v-5b",
    ),
)
