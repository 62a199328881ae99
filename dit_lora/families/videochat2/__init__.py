"""VideoChat2, Mistral, Vicuna or Phi-3, in a folder that `dit-lora convert videochat2` makes."""

from typing import Any

from dit_lora.families.chat_sites import chat_site, experts
from dit_lora.families.family import ChatFamily, Site


def _site(variant: str, **changes: Any) -> Site:
    vision, language = "model.vision_encoder.encoder.blocks.1", "model.language_model"
    defaults: dict[str, Any] = {
        "data": {"frames": 4, "height": 32, "width": 32},
        "groups": {"adapter": {"lr": 1e-3}, "connector": {"lr": 1e-4}},
        "experts": experts(
            f"{vision}.attn.proj",
            "model.projection",
            language,
            qformer="model.qformer.encoder.layer.0.crossattention.self.value",
        ),
        "vision_attention": f"{vision}.attn",
        "queries": "model.extra_query_tokens",
    }
    return chat_site("videochat2", variant, vision, language, **{**defaults, **changes})


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
    sites=(
        _site("videochat2-mistral"),
        _site("videochat2-vicuna"),
        _site("videochat2-phi3", key="o_proj"),
        _site(
            "videochat2-hd",
            sections={
                "chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False, "tiles": 2}
            },
        ),
    ),
)
