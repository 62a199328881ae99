"""Tokenizers of bytes with a chat template, for tiny pipelines whose text encoder is a language model; and Qwen3's sizes."""

from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config

WIDTH = 16
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
"""Sizes of a language model, in any of their configs."""
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# Qwen3's, of messages in words: thinking that is switched off is an empty one.
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)


def qwen3(layers: int) -> tuple[Qwen2Tokenizer, Qwen3Config]:
    """Return Qwen3's tokenizer, and the config of a model of that many layers for it."""
    tokenizer = byte_tokenizer(_QWEN_TOKENS, end="<|im_end|>")
    tokenizer.chat_template = _QWEN_TEMPLATE
    config = Qwen3Config(
        **SIZES, vocab_size=len(tokenizer), num_hidden_layers=layers, **ends(tokenizer)
    )
    return tokenizer, config


def byte_tokenizer(special: tuple[str, ...], end: str) -> Qwen2Tokenizer:
    """Every byte, and the special tokens, of which the first pads; nothing is trained."""
    vocab = {piece: index for index, piece in enumerate(sorted(ByteLevel.alphabet()))}
    none: Any = None  # an unknown token would be one more
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=none, pad_token=special[0], eos_token=end
    )
    tokens = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def ends(tokenizer: Any) -> dict[str, Any]:
    """Return the ids of a tokenizer's end and pad, as a model's config names them."""
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
