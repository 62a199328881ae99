"""FLUX.1: dev (guidance is an input), schnell, and Kontext, which edits an image."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="flux",
    # The layers that Diffusers' train_dreambooth_lora_flux.py adapts: attention of both kinds of blocks, and both
    # streams' feed-forward. `proj_out` is excluded, because the single blocks' layer and the head share that name.
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),
    group_patterns={
        "connector": ("x_embedder.*", "context_embedder.*", "time_text_embed.*", "norm_out.*", "proj_out.*"),
        "backbone": ("transformer_blocks.*", "single_transformer_blocks.*"),
    },
    pipeline_names=("FluxPipeline", "FluxKontextPipeline"),
    default_recipe="flux/dev",
    licenses={
        "black-forest-labs/FLUX.1-schnell": License("apache-2.0"),  # from its card
        **{
            base: License(
                "other", "flux-1-dev-non-commercial-license", f"https://huggingface.co/{base}/blob/main/LICENSE.md"
            )
            for base in ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Kontext-dev")
        },
    },
    # ComfyUI's map has Diffusers' names (comfy/utils.py, flux_to_diffusers), with their prefix.
    comfyui=LayerNames(prefix="transformer.", reads_alpha=False),
    tiny_variants=("flux-dev", "flux-schnell", "flux-kontext"),
)
