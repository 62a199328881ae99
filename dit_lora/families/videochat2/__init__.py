"""VideoChat2, Mistral, Vicuna or Phi-3, in a folder that `dit-lora convert videochat2` makes."""

from dit_lora.families.family import ChatFamily

FAMILY = ChatFamily(
    name="videochat2",
    checkpoint_module="dit_lora.families.videochat2.checkpoint",
    tiny_module="dit_lora.families.videochat2.tiny",
    # lm_head too, as scripts/videochat_mistral trains it.
    lora_targets=(
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",  # Phi-3's, of which each is several of the others
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "lm_head",
    ),
    lora_within=("language_model", "lm_head"),
    group_patterns={
        "connector": ("model.projection.*", "model.query_tokens", "model.extra_query_tokens"),
        "backbone": ("model.vision_encoder.*", "model.vision_layernorm.*", "model.qformer.*"),
    },
    default_recipe="videochat2/mistral_stage3",
    tells_times=False,
    tiny_variants=("videochat2-mistral", "videochat2-vicuna", "videochat2-phi3", "videochat2-hd"),
)
