"""Captions of Ideogram 4: truncated prompts, padding on the left, and its pipeline called with cached embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Ideogram4Pipeline
from torch.nn import functional as F

MAX_TEXT_TOKENS = 1024
"""Number of tokens that prompts are truncated to, the chat template's included, and padded to in the cache.

The pipeline takes 2048. Its own prompt enhancer writes captions of at most 1024 (`upsample_prompt`), and each token of
the cache has 53,248 values.
"""


class TruncatingTokenizer:
    """The pipeline's tokenizer, which drops the end of a prompt beyond `max_tokens`, but not the template's end."""

    def __init__(self, tokenizer: Any, max_tokens: int = MAX_TEXT_TOKENS) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        before, after = self.apply_template("{}").split("{}")
        self.num_closing_tokens = len(tokenizer(after, add_special_tokens=False).input_ids)
        self.num_template_tokens = len(tokenizer(before + after, add_special_tokens=False).input_ids)

    def apply_template(self, caption: str) -> str:
        """The text that Ideogram4Pipeline.encode_prompt makes of a caption."""
        messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
        return str(self.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def __call__(self, text: str, **options: Any) -> Any:
        encoded = self.tokenizer(text, **options)
        ids = encoded["input_ids"]
        if ids.shape[1] > self.max_tokens:
            num_kept = self.max_tokens - self.num_closing_tokens
            encoded["input_ids"] = torch.cat([ids[:, :num_kept], ids[:, -self.num_closing_tokens :]], dim=1)
        return encoded


class EmbeddedPromptPipeline(Ideogram4Pipeline):
    """`Ideogram4Pipeline` that also takes embeddings in place of prompts, and pads prompts to their longest one.

    The stock pipeline has no argument for embeddings. Only its encoding of prompts is replaced.
    """

    tokenizer: Any

    def __call__(self, prompt: str | Sequence[str | torch.Tensor], **arguments: Any) -> Any:
        """Generate images. Each prompt is a text, or its embeddings without padding, (T, D)."""
        stock: Any = super()
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        num_tokens = max(map(self.count_prompt_tokens, prompts))
        return stock.__call__(prompts, max_sequence_length=num_tokens, **arguments)

    def count_prompt_tokens(self, prompt: str | torch.Tensor) -> int:
        """Number of tokens of a prompt, the template's included."""
        if isinstance(prompt, torch.Tensor):
            return len(prompt)
        text = self.tokenizer.apply_template(prompt)
        return int(self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].shape[1])

    def encode_prompt(
        self, prompt: Any, grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """The stock method, for texts or embeddings."""
        stock: Any = super()
        if all(isinstance(item, str) for item in prompt):
            return tuple(stock.encode_prompt(prompt, grid_h, grid_w, max_sequence_length, device))
        return build_layout(prompt, grid_h, grid_w, max_sequence_length, device)


def take_embeddings(pipeline: Any) -> EmbeddedPromptPipeline:
    """The same components in a pipeline that also takes embeddings, and truncates prompts."""
    components = dict(pipeline.components)
    if components["tokenizer"] is not None:
        components["tokenizer"] = TruncatingTokenizer(components["tokenizer"])
    return EmbeddedPromptPipeline(**components)


def build_layout(
    captions: Sequence[torch.Tensor], rows: int, columns: int, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The transformer's inputs for captions (T, D), padded on the left to `num_tokens`, and an image's token grid.

    Text features (B, T + S, D) are where the captions are; position ids (B, T + S, 3), segment ids and indicators
    (B, T + S) are on `device`.
    """
    lengths, num_image = [len(caption) for caption in captions], rows * columns
    # Zeros before each caption, and in place of the image's tokens, which have no text features.
    features = torch.stack([F.pad(caption, (0, 0, num_tokens - len(caption), num_image)) for caption in captions])
    ids = Ideogram4Pipeline._prepare_ids(lengths, rows, columns, num_tokens, device)
    return features, *ids
