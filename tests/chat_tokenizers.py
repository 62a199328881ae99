"""Tiny fast tokenizers of the two kinds that chat models have, built in milliseconds."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

_TEXT = (
    "The video contains 8 frames sampled at 0.5, 1.5, 2.5 seconds. What does the cat do in the picture? "
    "### Human: Watch it closely. ### Assistant: It sleeps on the warm sofa. [INST] Describe this image. [/INST] "
    "USER: ASSISTANT: User: Assistant: a dog runs through the grass and the man plays the guitar "
)
_SPECIAL = (
    ("<|im_start|>", False),
    ("<|im_end|>", False),
    ("<|system|>", True),
    ("<|user|>", True),
    ("<|assistant|>", True),
    ("<|end|>", True),
    ("<|vision_start|>", False),
    ("<|vision_end|>", False),
    ("<|video_pad|>", False),
    ("<|image_pad|>", False),
    ("<image>", False),
    ("<video>", False),
    ("<end_of_utterance>", False),
)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's and Mistral's kind: `▁` for spaces and before each text, bytes for what it does not know."""
    trainer = BpeTrainer(vocab_size=300, show_progress=False)
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator([_TEXT], trainer)
    state = _state(learned)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in state["vocab"] if token not in tokens] + ["▁▁"]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [("▁", "▁"), *((pair[0], pair[1]) for pair in state["merges"])],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = post_processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return _wrapped(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_tokenizer(*, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2's and Qwen's kind: `Ġ` for spaces, no beginning-of-text token, words split before their space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=450, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator([_TEXT], trainer)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = post_processors.ByteLevel(trim_offsets=trim_offsets)
    return _wrapped(backend, eos_token="<|im_end|>")


def _state(tokenizer: Tokenizer) -> dict[str, list[str]]:
    model: dict[str, list[str]] = json.loads(tokenizer.to_str())["model"]
    return model


def _wrapped(backend: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names.values()])
    backend.add_special_tokens([AddedToken(text, rstrip=rstrip, normalized=False) for text, rstrip in _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
