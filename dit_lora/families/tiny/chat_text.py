"""Byte tokenizers with a chat template and small configs, for tiny pipelines with a language model as text encoder."""

from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Mistral3Config, Qwen2Tokenizer, Qwen3Config, Qwen3VLConfig, Qwen3VLModel

TEXT_WIDTH = 16
MODEL_SIZES: dict[str, Any] = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
"""Sizes of a small language model, as options of any of the model configs."""
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_QWEN_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN3_VL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_QWEN_VISION_TOKENS.values())
"""Special tokens of Qwen3-VL, the padding token first."""
# Qwen3's template for text messages: disabled thinking is written as an empty thought.
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)

_MISTRAL_TOKENS = (
    *("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
_MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% set tag = 'SYSTEM_PROMPT' if message['role'] == 'system' "
    "else 'INST' %}{{ '[' + tag + ']' }}{% for part in message['content'] %}{{ part['text'] }}"
    "{% endfor %}{{ '[/' + tag + ']' }}{% endfor %}"
)


def build_qwen3(num_layers: int) -> tuple[Qwen2Tokenizer, Qwen3Config]:
    """Build Qwen3's tokenizer in small, and the config of a text model with this many layers for it."""
    tokenizer = build_byte_tokenizer(_QWEN_TOKENS, end_token="<|im_end|>")
    tokenizer.chat_template = _QWEN_TEMPLATE
    config = Qwen3Config(
        **MODEL_SIZES, vocab_size=len(tokenizer), num_hidden_layers=num_layers, **special_token_ids(tokenizer)
    )
    return tokenizer, config


def build_qwen3_vl(tokenizer: Any, num_layers: int) -> Qwen3VLModel:
    """Build Qwen3-VL in small, with this many text layers, for a tokenizer that has `QWEN3_VL_TOKENS`."""
    ids: dict[str, Any] = {name: tokenizer.get_vocab()[token] for name, token in _QWEN_VISION_TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={
            **MODEL_SIZES,
            **special_token_ids(tokenizer),
            "vocab_size": len(tokenizer),
            "num_hidden_layers": num_layers,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **ids,
    )
    return Qwen3VLModel(config).eval()


def build_mistral3(num_layers: int) -> tuple[Qwen2Tokenizer, Mistral3Config]:
    """Build a tokenizer like Mistral 3's in small, and the config of a model with this many text layers for it."""
    # Published with Pixtral's processor, which contains such a tokenizer and needs torchvision for images.
    tokenizer = build_byte_tokenizer(_MISTRAL_TOKENS, end_token="</s>")
    tokenizer.chat_template = _MISTRAL_TEMPLATE
    config = Mistral3Config(
        text_config={
            **MODEL_SIZES,
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": num_layers,
            "sliding_window": None,
            **special_token_ids(tokenizer),
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.get_vocab()["[IMG]"],
    )
    return tokenizer, config


def build_byte_tokenizer(special_tokens: tuple[str, ...], end_token: str, **options: Any) -> Qwen2Tokenizer:
    """Build a tokenizer of single bytes and special tokens; the first special token is padding. Nothing is trained."""
    # Sorted, so that ids do not depend on the order of a dict.
    vocab = {piece: index for index, piece in enumerate(sorted(ByteLevel.alphabet()))}
    none: Any = None  # an unknown token would enlarge the vocabulary
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=none, pad_token=special_tokens[0], eos_token=end_token, **options
    )
    tokens = [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def special_token_ids(tokenizer: Any) -> dict[str, Any]:
    """Token ids of a tokenizer's end and padding, under their names in a model's config."""
    return {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
