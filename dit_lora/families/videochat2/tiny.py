"""Tiny random VideoChat2 checkpoints, one of each published kind; their native shape is 4 frames of 32x32.

The vocabularies are spelled out and nothing is trained (a trained tokenizer differs from process to process), so one
seed gives the same bytes everywhere.
"""

import string
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    BertTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
)

from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

VARIANTS: dict[str, str] = {
    "videochat2-mistral": "mistral",
    "videochat2-vicuna": "vicuna",
    "videochat2-phi3": "phi3",
    "videochat2-hd": "mistral",
}
"""The prompt format of each variant. HD is Mistral with twice the context length, for its tiles."""

# Enough for captions and questions. Other words are split into characters, other characters into bytes.
_WORDS = [
    "the",
    "a",
    "an",
    "of",
    "in",
    "on",
    "to",
    "and",
    "is",
    "are",
    "it",
    "what",
    "does",
    "do",
    "with",
    "man",
    "woman",
    "person",
    "video",
    "image",
    "describe",
    "detail",
    "question",
    "answer",
    "watch",
    "observe",
    "frames",
    "contains",
    "sampled",
    "at",
    "seconds",
    "this",
    "that",
    "red",
    "green",
    "blue",
    "ball",
    "moves",
    "left",
    "right",
    "up",
    "down",
    "The",
    "What",
]
# Markers of the prompt formats, each merged into one token.
_PROMPT_MARKERS = ("[INST]", "[/INST]", "###", "Human:", "Assistant:", "<Video>", "</Video>", "<Image>")
# From Phi-3's tokenizer.json: control tokens that swallow the white space after them.
_PHI3_CONTROL_TOKENS = ("<|assistant|>", "<|end|>", "<|system|>", "<|user|>")
_MAX_POSITIONS = 512


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny VideoChat2 checkpoint to `folder`.

    It has config, weights, the language model's tokenizer and qformer_tokenizer/.
    """
    tokenizer = build_llm_tokenizer(VARIANTS[variant])
    qformer_tokenizer = build_bert_tokenizer()
    config = build_tiny_config(variant, tokenizer, len(qformer_tokenizer))
    model = VideoChat2ForConditionalGeneration(config).eval()
    # As in a trained model, no bias is zero and images influence the answer. With Transformers' standard deviation of
    # 0.02, layers this narrow pass on a hundredth of their input.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            else:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    qformer_tokenizer.save_pretrained(folder / "qformer_tokenizer")


def build_tiny_config(variant: str, tokenizer: LlamaTokenizer, qformer_vocab: int) -> VideoChat2Config:
    """A tiny VideoChat2 config.

    It has three vision blocks of 16-pixel patches, two Q-Former layers and two language model layers.
    """
    return VideoChat2Config(
        vision_config={
            "image_size": 32,
            "patch_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 4,  # the last one is not built
            "num_attention_heads": 2,
            "mlp_ratio": 2,
            # More frames than in pretraining, so that positions are interpolated in time.
            "num_frames": 4,
            "pretrained_frames": 2,
        },
        qformer_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "vocab_size": qformer_vocab,
            "use_text": True,
        },
        text_config=_build_text_config(VARIANTS[variant], tokenizer, 2 if variant == "videochat2-hd" else 1),
        num_query_tokens=3,
        num_extra_query_tokens=2,
        tile_size=32,
        add_global=True,
        legacy=True,
        prompt_format=VARIANTS[variant],
    )


def _build_text_config(prompt_format: str, tokenizer: LlamaTokenizer, context_factor: int) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context_factor * _MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if prompt_format == "mistral":
        return MistralConfig(**common, num_key_value_heads=2, sliding_window=None)
    if prompt_format == "vicuna":
        return LlamaConfig(**common, num_key_value_heads=4)
    return Phi3Config(**common, num_key_value_heads=4)


def build_llm_tokenizer(prompt_format: str) -> LlamaTokenizer:
    """Build a BPE tokenizer like Llama's, as all three language models use.

    It has a short list of whole words, characters and bytes.
    """
    characters = [c for c in string.printable if not c.isspace()]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    merges: list[tuple[str, str]] = []
    for word in [*(f"▁{w}" for w in _WORDS), *_PROMPT_MARKERS]:
        for end in range(1, len(word)):  # a prefix at a time: the▁ is ▁+t, ▁t+h, ▁th+e
            merge = (word[:end], word[end])
            if merge not in merges:
                merges.append(merge)
                pieces.append(word[: end + 1])
    control = _PHI3_CONTROL_TOKENS if prompt_format == "phi3" else ()
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer: Any = LlamaTokenizer(
        vocab=vocab,
        merges=merges,
        # Phi-3 pads with its end-of-text token. The others have no padding token, and the original uses </s>.
        pad_token="</s>" if not control else "<|endoftext|>",
        eos_token="</s>" if not control else "<|endoftext|>",
        add_bos_token=True,
    )
    tokenizer.add_tokens([AddedToken(c, rstrip=True, special=True) for c in control], special_tokens=True)
    return tokenizer


def build_bert_tokenizer() -> BertTokenizer:
    """Build BERT's WordPiece tokenizer over the same words and all ASCII characters, with the [DEC] token."""
    # Lower case only, as in bert-base-uncased.
    characters = [c for c in string.printable if not c.isspace() and not c.isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    # Pieces that continue a word.
    pieces += [f"##{c}" for c in characters if c.isalnum()]
    pieces += [word for word in _WORDS if len(word) > 1 and word.islower()]
    tokenizer: Any = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, truncation_side="left")
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    return tokenizer
