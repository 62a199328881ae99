"""LTX-2, LTX-2.3 and LTX-2.5: text-to-video, image-to-video and video-to-video (IC-LoRA), with or without sound."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License
from dit_lora.families.ltx2.layers import ATTENTION_LAYERS, BLOCK_LAYERS

_LICENSE = License(
    "other", "ltx-2-community-license-agreement", "https://github.com/Lightricks/LTX-2/blob/main/LICENSE"
)
# Dated August 2026; the versions before 2.5 stay under the older one.
_LICENSE_2_5 = License(
    "other", "ltx-2.x-community-license-agreement", "https://github.com/Lightricks/LTX-2/blob/main/LICENSE.md"
)

_MODULATION_NAMES = {
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}
_TIMESTEP_EMBEDDER = "emb.timestep_embedder"
# The inverse of Diffusers' _convert_non_diffusers_ltx2_lora_to_diffusers (loaders/lora_conversion_utils.py), whose
# loader rejects `.alpha` tensors.
_COMFYUI_NAMES = {
    **{f"transformer_blocks.*.{name}": f"transformer_blocks.*.{name}" for name in BLOCK_LAYERS},
    **{
        f"{ours}.{layer}": f"{theirs}.{layer}"
        for ours, theirs in _MODULATION_NAMES.items()
        for layer in ("linear", f"{_TIMESTEP_EMBEDDER}.linear_1", f"{_TIMESTEP_EMBEDDER}.linear_2")
    },
    "proj_in": "patchify_proj",
    "audio_proj_in": "audio_patchify_proj",
    "proj_out": "proj_out",
    "audio_proj_out": "audio_proj_out",
}


FAMILY = DiffusionFamily(
    name="ltx2",
    # Only the video's layers, as the trainer's guide says. With sound, the checkpoint selects the layers of all
    # attentions.
    lora_targets=tuple(f"{attn}.{layer}" for attn in ("attn1", "attn2") for layer in ATTENTION_LAYERS),
    group_patterns={
        "connector": (
            "*proj_in.*",
            "*caption_projection.*",
            "*time_embed.*",
            "*prompt_adaln.*",
            "av_cross_attn_*",
            "scale_shift_table",
            "audio_scale_shift_table",
            "proj_out.*",
            "audio_proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    },
    pipeline_names=("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2InContextPipeline"),
    default_recipe="ltx2/2.3_t2v",
    licenses={"Lightricks/LTX-2.5*": _LICENSE_2_5, "Lightricks/LTX-2*": _LICENSE, "diffusers/LTX-2.3*": _LICENSE},
    has_attention_mask=True,
    comfyui=LayerNames(reads_alpha=False, renames=_COMFYUI_NAMES),
    tiny_variants=("ltx-2", "ltx-2.3", "ltx-2.5"),
)
