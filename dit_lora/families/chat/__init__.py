"""Video chat models of Transformers whose processor is known here."""

from typing import Any

from dit_lora.families.chat_sites import chat_site, experts
from dit_lora.families.family import ChatFamily, License, Site


def _site(
    variant: str, size: int, vision: str, out: str, projection: str, mixed: str | None = None
) -> Site:
    """Return the site of a variant; `out` is the last layer of the vision encoder's layer `vision`.

    `mixed` is one that all tokens go through, where the first token is of the class and dropped at the end.
    """
    language = "model.text_model" if variant == "smolvlm2" else "model.language_model"
    changes: dict[str, Any] = {
        "data": {"frames": 4, "height": size, "width": size},
        "ff_out": f"{vision}.{out}",
        "experts": experts(f"{vision}.{mixed or out}", projection, language),
    }
    return chat_site("chat", variant, vision, language, **changes)


FAMILY = ChatFamily(
    name="chat",
    checkpoint_module="dit_lora.families.chat.checkpoint",
    tiny_module="dit_lora.families.chat.tiny",
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    lora_within=("language_model", "text_model"),  # the latter is SmolVLM's
    group_patterns={
        "connector": (
            "model.multi_modal_projector.*",  # LLaVA-NeXT-Video, InternVL
            "model.visual.merger.*",  # Qwen
            "model.visual.deepstack_merger_list.*",
            "model.connector.*",  # SmolVLM
        ),
        "backbone": ("model.vision_tower.*", "model.visual.*", "model.vision_model.*"),
    },
    default_recipe="chat/smolvlm2",
    licenses={
        "llava-hf/LLaVA-NeXT-Video-7B*": License("llama2"),
        "Qwen/Qwen2.5-VL-3B-Instruct": License(
            "other",
            "qwen-research",
            "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE",
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": License("apache-2.0"),
        "HuggingFaceTB/SmolVLM2-*": License("apache-2.0"),
    },
    sites=(
        _site(
            "llava-next-video",
            56,
            "model.vision_tower.encoder.layers.0",
            "mlp.fc2",
            "model.multi_modal_projector.linear_2",
            "self_attn.v_proj",
        ),
        _site(
            "qwen2.5-vl", 56, "model.visual.blocks.1", "mlp.down_proj", "model.visual.merger.mlp.2"
        ),
        _site(
            "qwen3-vl",
            64,
            "model.visual.blocks.1",
            "mlp.linear_fc2",
            "model.visual.merger.linear_fc2",
        ),
        _site(
            "smolvlm2",
            32,
            "model.vision_model.encoder.layers.1",
            "mlp.fc2",
            "model.connector.modality_projection.proj",
        ),
        _site(
            "internvl",
            56,
            "model.vision_tower.encoder.layer.1",
            "mlp.fc2",
            "model.multi_modal_projector.linear_2",
            "attention.v_proj",
        ),
    ),
)
