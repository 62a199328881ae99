"""VideoChat2 with Mistral, Vicuna or Phi-3, in a folder made by `dit-lora convert videochat2`."""

from dit_lora.families.family import ChatFamily

FAMILY = ChatFamily(
    name="videochat2",
    # Includes lm_head, as in scripts/videochat_mistral.
    lora_targets=(
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",  # Phi-3 fuses several of the other projections into one
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "lm_head",
    ),
    lora_parent_modules=("language_model", "lm_head"),
    group_patterns={
        "connector": ("model.projection.*", "model.query_tokens", "model.extra_query_tokens"),
        "backbone": ("model.vision_encoder.*", "model.vision_layernorm.*", "model.qformer.*"),
    },
    default_recipe="videochat2/mistral_stage3",
    has_default_timestamps=False,
    tiny_variants=("videochat2-mistral", "videochat2-vicuna", "videochat2-phi3", "videochat2-hd"),
)
