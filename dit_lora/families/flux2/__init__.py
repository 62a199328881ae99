"""FLUX.2 text-to-image: klein-base (4B and 9B), and dev, which takes guidance as an input."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

_NON_COMMERCIAL = License("other", "flux-non-commercial-license")

FAMILY = DiffusionFamily(
    name="flux2",
    # The targets of Diffusers' train_dreambooth_lora_flux2_klein.py. The checkpoint adds the single blocks'
    # `attn.to_out` one by one.
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj"),
    group_patterns={
        "connector": (
            "x_embedder.*",
            "context_embedder.*",
            "time_guidance_embed.*",
            "double_stream_modulation_img.*",
            "double_stream_modulation_txt.*",
            "single_stream_modulation.*",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*", "single_transformer_blocks.*"),
    },
    pipeline_names=("Flux2KleinPipeline", "Flux2Pipeline"),
    default_recipe="flux2/klein_base_4b",
    # From the card of each model.
    licenses={
        "black-forest-labs/FLUX.2-klein-base-4B": License("apache-2.0"),
        "black-forest-labs/FLUX.2-klein-4B": License("apache-2.0"),
        "black-forest-labs/FLUX.2-klein*9B": _NON_COMMERCIAL,
        "black-forest-labs/FLUX.2-dev": _NON_COMMERCIAL,
    },
    # ComfyUI's map has Diffusers' names (comfy/utils.py at 09708ea, flux_to_diffusers), with their prefix. Of the
    # layers that only FLUX.2 has, it contains the two of the single blocks.
    comfyui=LayerNames(
        prefix="transformer.",
        reads_alpha=False,
        unnamed_layers=("time_guidance_embed.*", "double_stream_modulation_*", "single_stream_modulation.*"),
    ),
    tiny_variants=("flux2-klein", "flux2-dev"),
)
