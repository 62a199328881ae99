"""The family `chat`: Transformers video chat models whose processor is reimplemented here."""

from dit_lora.families.family import ChatFamily, License

FAMILY = ChatFamily(
    name="chat",
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    lora_parent_modules=("language_model", "text_model"),  # `text_model` is SmolVLM's
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
            "other", "qwen-research", "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE"
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": License("apache-2.0"),
        "HuggingFaceTB/SmolVLM2-*": License("apache-2.0"),
    },
    tiny_variants=("llava-next-video", "qwen2.5-vl", "qwen3-vl", "smolvlm2", "internvl"),
)
