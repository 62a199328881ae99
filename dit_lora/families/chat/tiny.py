"""Tiny random video chat checkpoints of Transformers' own model types; see `tiny` for their guarantees.

Frames have 56 pixels per side and four features each (Qwen: any size; SmolVLM2: 32 pixels). Text is encoded as bytes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    InternVLConfig,
    LlavaNextVideoConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from dit_lora.environment.pretrained import build_from_config
from dit_lora.families.chat.layouts import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from dit_lora.families.tiny.chat_text import build_byte_tokenizer

# Maximum length of a prompt. Byte tokens make prompts several times longer than in published models.
_MAX_TOKENS = 2048
# LLaVA's anyres sizes (height, width), for squares of 56 instead of 336 pixels.
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
TEXT_WIDTH = 48
# The language model, for every model type.
_TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _MAX_TOKENS,
    "initializer_range": 0.2,
}
# The vision encoders of LLaVA, SmolVLM2 and InternVL.
_VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
# Qwen's vision encoders have option names of their own.
_QWEN_VISION_CONFIG: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "initializer_range": 0.2,
}
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# SmolVLM2's tokens for the position of a tile, up to 4 x 4 tiles.
_TILE_TOKENS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))


class TinyChatVariant(NamedTuple):
    """The parts of one tiny chat checkpoint for tests."""

    special_tokens: tuple[str, ...]
    """Special tokens; the first is the padding token."""
    end_token: str
    """The token that ends an answer."""
    named_tokens: dict[str, str]
    """Tokens that the stock processor reads from the tokenizer by name."""
    template: str
    config: Callable[[Callable[[str], int], dict[str, Any]], PreTrainedConfig]
    files: dict[str, dict[str, Any]]
    """Processor settings by file, as in the files of the published checkpoints."""


def build_tiny_checkpoint(variant_name: str, folder: Path) -> None:
    """Write a tiny chat checkpoint to `folder`.

    It has config, weights, tokenizer, chat template and the processors' configs.
    """
    tokenizer, model = build_tiny_chat(variant_name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Written by hand: saving Transformers' video processors needs torchvision.
    for file, values in VARIANTS[variant_name].files.items():
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (folder / file).write_text(text, encoding="utf-8")


def build_tiny_chat(variant_name: str, extra_tokens: Sequence[str] = ()) -> tuple[Qwen2Tokenizer, Any]:
    """Build the tokenizer and the model of a tiny checkpoint.

    Each of `extra_tokens` becomes one token, as in a trained vocabulary.
    """
    variant = VARIANTS[variant_name]
    tokenizer = build_byte_tokenizer(
        variant.special_tokens,
        variant.end_token,
        extra_special_tokens=variant.named_tokens,
        model_max_length=_MAX_TOKENS,
    )
    tokenizer.chat_template = variant.template
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in extra_tokens])
    token_id: Callable[[str], int] = tokenizer.convert_tokens_to_ids  # type: ignore[assignment]
    # The names that configs and generation configs use for these ids.
    ends = {
        "bos_token_id": None,
        "eos_token_id": token_id(variant.end_token),
        "pad_token_id": token_id(variant.special_tokens[0]),
    }
    # The vocabulary size includes the words added above.
    config = variant.config(token_id, {**_TEXT_CONFIG, **ends, "vocab_size": len(tokenizer)})
    model: Any = build_from_config(AutoModelForImageTextToText, config).eval()
    # Perturb biases and norm weights: those of a trained model are not zeros and ones.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    # `generate` reads these ids from the generation config, not from the model's config.
    model.generation_config.update(**ends)
    return tokenizer, model


def _llava_config(token_id: Callable[[str], int], text: dict[str, Any]) -> PreTrainedConfig:
    return LlavaNextVideoConfig(
        text_config={**text, "model_type": "mistral", "sliding_window": None},
        vision_config={**_VISION_CONFIG, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        image_grid_pinpoints=_PINPOINTS,
        image_token_index=token_id("<image>"),
        video_token_index=token_id("<video>"),
        # 4 x 4 patches per square, pooled to 2 x 2 in videos.
        image_seq_length=16,
        video_seq_length=4,
    )


def _qwen2_5_config(token_id: Callable[[str], int], text: dict[str, Any]) -> PreTrainedConfig:
    return Qwen2_5_VLConfig(
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                # Halves of rotary dimensions for time, height and width; together half of the head's 12.
                "mrope_section": [2, 2, 2],
            },
        },
        vision_config={
            **_QWEN_VISION_CONFIG,
            "patch_size": 14,
            # Windowed attention in all blocks but the second, which has full attention.
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **_vision_token_ids(token_id),
    )


def _qwen3_config(token_id: Callable[[str], int], text: dict[str, Any]) -> PreTrainedConfig:
    return Qwen3VLConfig(
        text_config={
            **text,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                # Together half of `head_dim`.
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            **_QWEN_VISION_CONFIG,
            "patch_size": 16,
            "num_position_embeddings": 64,
            # The vision block whose features are also added inside the language model.
            "deepstack_visual_indexes": [1],
        },
        **_vision_token_ids(token_id),
    )


def _smolvlm_config(token_id: Callable[[str], int], text: dict[str, Any]) -> PreTrainedConfig:
    # SmolVLM has a padding id in its outer config too.
    pad: dict[str, Any] = {"pad_token_id": text["pad_token_id"]}
    return SmolVLMConfig(
        text_config={**text, "model_type": "llama"},
        vision_config={**_VISION_CONFIG, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=token_id("<image>"),
        **pad,
    )


def _internvl_config(token_id: Callable[[str], int], text: dict[str, Any]) -> PreTrainedConfig:
    return InternVLConfig(
        text_config={**text, "model_type": "qwen2"},
        vision_config={**_VISION_CONFIG, "image_size": [56, 56], "patch_size": [14, 14], "use_qk_norm": True},
        image_token_id=token_id("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def _vision_token_ids(token_id: Callable[[str], int]) -> dict[str, Any]:
    return {
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
    }


def _chatml_template(image: str, video: str, system: str = "") -> str:
    """The chat template of Qwen and InternVL. A picture's text comes where the picture is in the message."""
    # Qwen2.5-VL's template adds this message if a conversation has no system message.
    default_system = f"<|im_start|>system\n{system}<|im_end|>\n"
    default = (
        "{% if messages[0]['role'] != 'system' %}"
        # json.dumps quotes the text so that it is a string literal in Jinja, between {{ and }}.
        + json.dumps(default_system).join(("{{ ", " }}"))
        + "{% endif %}"
    )
    return (
        (default if system else "") + "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ " + json.dumps(image) + " }}"
        "{% elif part['type'] == 'video' %}{{ " + json.dumps(video) + " }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


# LLaVA's template for Mistral: `[INST] <video>\nquestion [/INST] answer</s>`.
_INST_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'][0]['text'] + '</s>' }}{% elif message['role'] != 'user' %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% else %}{{ '[INST] ' }}"
    "{% for kind in ('image', 'video') %}{% for part in message['content'] %}"
    "{% if part['type'] == kind %}{{ '<' + kind + '>\\n' }}{% endif %}{% endfor %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ ' [/INST]' }}{% endif %}{% endfor %}"
)
# SmolVLM2's template: a turn that starts with an image has no space after the colon.
_UTTERANCE_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ '<' + part['type'] + '>' }}{% endif %}{% endfor %}"
    "{{ '<end_of_utterance>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Attributes of the tokenizer that Qwen's processors read.
_PAD_TOKEN_NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def _processor_files(
    processor: str,
    image: tuple[str, dict[str, Any]],
    video: tuple[str, dict[str, Any]],
    mean_and_std: tuple[Sequence[float], Sequence[float]],
    **values: Any,
) -> dict[str, dict[str, Any]]:
    # Both processors normalise with the same mean and std.
    mean_std = {"image_mean": list(mean_and_std[0]), "image_std": list(mean_and_std[1])}
    return {
        "preprocessor_config.json": {**mean_std, **image[1], "image_processor_type": image[0]},
        "video_preprocessor_config.json": {
            **mean_std,
            **video[1],
            "do_sample_frames": False,
            "video_processor_type": video[0],
        },
        "processor_config.json": {**values, "processor_class": processor},
    }


# Sizes in the forms that the different processors expect.
_SQUARE_SIZE = {"height": 56, "width": 56}
_SHORTEST_EDGE = {"size": {"shortest_edge": 56}, "crop_size": _SQUARE_SIZE}
_QWEN_PIXELS = {"min_pixels": 28 * 28, "max_pixels": 112 * 112, "patch_size": 14}
_PAD_TEXTS = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
_TILE, _SAMPLING = {"longest_edge": 32}, {"fps": 1, "max_frames": 64}
_SMOLVLM_SIZE = {"max_image_size": _TILE}
VARIANTS: dict[str, TinyChatVariant] = {
    "llava-next-video": TinyChatVariant(
        ("<unk>", "<s>", "</s>", "<video>", "<image>"),
        "</s>",
        {},
        _INST_TEMPLATE,
        _llava_config,
        _processor_files(
            "LlavaNextVideoProcessor",
            ("LlavaNextImageProcessor", {**_SHORTEST_EDGE, "image_grid_pinpoints": _PINPOINTS}),
            ("LlavaNextVideoVideoProcessor", _SHORTEST_EDGE),
            (CLIP_MEAN, CLIP_STD),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "qwen2.5-vl": TinyChatVariant(
        (*_CHATML_TOKENS, *_VISION_TOKENS),
        "<|im_end|>",
        _PAD_TOKEN_NAMES,
        _chatml_template(*_PAD_TEXTS, "You are a helpful assistant."),
        _qwen2_5_config,
        _processor_files(
            "Qwen2_5_VLProcessor",
            ("Qwen2VLImageProcessor", _QWEN_PIXELS),
            ("Qwen2VLVideoProcessor", _QWEN_PIXELS),
            (CLIP_MEAN, CLIP_STD),
        ),
    ),
    "qwen3-vl": TinyChatVariant(
        (*_CHATML_TOKENS, *_VISION_TOKENS),
        "<|im_end|>",
        _PAD_TOKEN_NAMES,
        _chatml_template(*_PAD_TEXTS),
        _qwen3_config,
        _processor_files(
            "Qwen3VLProcessor",
            (
                "Qwen2VLImageProcessor",
                {"size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}, "patch_size": 16},
            ),
            (
                "Qwen3VLVideoProcessor",
                {"size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 128 * 128}, "patch_size": 16},
            ),
            (HALF, HALF),
        ),
    ),
    "smolvlm2": TinyChatVariant(
        (
            "<|endoftext|>",
            "<|im_start|>",
            "<end_of_utterance>",
            "<fake_token_around_image>",
            "<image>",
            "<global-img>",
            *_TILE_TOKENS,
        ),
        "<end_of_utterance>",
        {},
        _UTTERANCE_TEMPLATE,
        _smolvlm_config,
        _processor_files(
            "SmolVLMProcessor",
            ("SmolVLMImageProcessor", {**_SMOLVLM_SIZE, "size": {"longest_edge": 128}}),
            (
                "SmolVLMVideoProcessor",
                {**_SMOLVLM_SIZE, "size": _TILE, "video_sampling": {**_SAMPLING, "video_size": _TILE}},
            ),
            (HALF, HALF),
            image_seq_len=4,
        ),
    ),
    "internvl": TinyChatVariant(
        (*_CHATML_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<|im_end|>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        _chatml_template("<IMG_CONTEXT>\n", "<video>\n"),
        _internvl_config,
        _processor_files(
            "InternVLProcessor",
            ("GotOcr2ImageProcessor", {"size": _SQUARE_SIZE, "max_patches": 6, "crop_to_patches": False}),
            ("InternVLVideoProcessor", {"size": _SQUARE_SIZE}),
            (IMAGENET_MEAN, IMAGENET_STD),
            image_seq_length=4,
        ),
    ),
}
"""One variant for each model type that the family `chat` trains."""
