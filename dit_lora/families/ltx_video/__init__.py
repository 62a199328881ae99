"""LTX-Video 0.9 and 0.9.1: text-to-video, and image-to-video with a clean first latent frame."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_BLOCK_LAYERS = (
    *(f"{a}.{name}" for a in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *("ff.net.0.proj", "ff.net.2"),
)
_UNCHANGED_NAMES = (
    *(f"transformer_blocks.*.{name}" for name in _BLOCK_LAYERS),
    *("caption_projection.linear_1", "caption_projection.linear_2", "proj_out"),
)
# The inverse of TRANSFORMER_KEYS_RENAME_DICT in diffusers' scripts/convert_ltx_to_diffusers.py.
_RENAMED_LAYERS = {
    "proj_in": "patchify_proj",
    "time_embed.linear": "adaln_single.linear",
    "time_embed.emb.timestep_embedder.linear_1": "adaln_single.emb.timestep_embedder.linear_1",
    "time_embed.emb.timestep_embedder.linear_2": "adaln_single.emb.timestep_embedder.linear_2",
}

FAMILY = DiffusionFamily(
    name="ltx_video",
    # The default targets are those of Lightricks/LTX-Video-Trainer (configs/ltxv_2b_lora_low_vram.yaml).
    group_patterns={
        "connector": ("proj_in.*", "caption_projection.*", "time_embed.*", "scale_shift_table", "proj_out.*"),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("LTXPipeline", "LTXImageToVideoPipeline"),
    default_recipe="ltx_video/0.9_t2v",
    # Its card says `other`; the licence file is in the repository.
    licenses={
        "Lightricks/LTX-Video": License(
            "other",
            "ltx-video-open-weights-license",
            "https://huggingface.co/Lightricks/LTX-Video/blob/main/LTX-Video-Open-Weights-License-0.X.txt",
        )
    },
    has_attention_mask=True,
    # The published model's names, from which ComfyUI takes those of its blocks. Diffusers' script renamed only these
    # two layers, and its loader rejects `.alpha` tensors.
    comfyui=LayerNames(reads_alpha=False, renames={**{name: name for name in _UNCHANGED_NAMES}, **_RENAMED_LAYERS}),
    tiny_variants=("ltx-video", "ltx-video-0.9.1"),
)
