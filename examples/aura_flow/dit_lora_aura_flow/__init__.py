"""AuraFlow text-to-image for dit-lora. This file is imported by every `dit-lora` command, so it imports no torch."""

from dit_lora.adapters.layer_names import LayerNames
from dit_lora.families.family import DiffusionFamily, License

FAMILY = DiffusionFamily(
    name="aura_flow",
    checkpoint_module="dit_lora_aura_flow.checkpoint",
    tiny_module="dit_lora_aura_flow.tiny",
    # Attention of both streams, as in SimpleTuner (simpletuner/helpers/models/auraflow/model.py).
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ),
    group_patterns={
        "connector": (
            "pos_embed.*",
            "context_embedder.*",
            "time_step_proj.*",
            "register_tokens",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("joint_transformer_blocks.*", "single_transformer_blocks.*"),
    },
    pipeline_names=("AuraFlowPipeline",),
    default_recipe="aura_flow/v0.3",
    licenses={"fal/AuraFlow*": License("apache-2.0")},
    # ComfyUI's map has Diffusers' names, with their prefix (comfy/utils.py, auraflow_to_diffusers; comfy/lora.py).
    comfyui=LayerNames(prefix="transformer.", reads_alpha=False),
    tiny_variants=("aura-flow",),
)
