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


def count_prompt_tokens(tokenizer: Any, caption: str) -> int:
    """Number of tokens that `Ideogram4Pipeline.encode_prompt` makes of a caption, the chat template's included."""
    messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


class EmbeddedPromptPipeline(Ideogram4Pipeline):
    """`Ideogram4Pipeline` that also takes embeddings in place of prompts, and pads prompts to their longest one.

    The stock pipeline has no argument for embeddings. Only its encoding of prompts is replaced.
    """

    tokenizer: Any

    def __call__(self, prompt: str | Sequence[str | torch.Tensor], **arguments: Any) -> Any:
        """Generate images. Each prompt is a text, or its embeddings without padding, (T, D)."""
        stock: Any = super()
        prompts = [prompt] if isinstance(prompt, str) else prompt
        captions = [self.embed_caption(item) if isinstance(item, str) else item for item in prompts]
        return stock.__call__(captions, max_sequence_length=max(map(len, captions)), **arguments)

    @torch.no_grad()
    def embed_caption(self, caption: str) -> torch.Tensor:
        """Embeddings (T, D) of a caption without padding. The end of a long caption is dropped."""
        stock: Any = super()
        while (num_tokens := count_prompt_tokens(self.tokenizer, caption)) > MAX_TEXT_TOKENS:
            spans = self.tokenizer(caption, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
            # From the first token to drop; tokens of one character have the same start. A cut inside a word can give
            # its beginning more tokens than before.
            caption = caption[: spans[MAX_TEXT_TOKENS - num_tokens][0]]
        # Without an image (a grid of 0 x 0).
        features, *_ = stock.encode_prompt(caption, 0, 0, num_tokens, stock._execution_device)
        return features[0]  # type: ignore[no-any-return]

    @staticmethod
    def encode_prompt(
        prompt: Sequence[torch.Tensor], grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """The transformer's inputs for captions (T, D), padded on the left, and an image's grid of tokens.

        Text features (B, T + S, D), which are zero outside of captions, are on the captions' device. Position ids
        (B, T + S, 3), segment ids and indicators (B, T + S) are on `device`.
        """
        lengths, num_image = [len(caption) for caption in prompt], grid_h * grid_w
        # Zeros before each caption, and in place of the image's tokens.
        pads = [(0, 0, max_sequence_length - length, num_image) for length in lengths]
        features = torch.stack([F.pad(caption, pad) for caption, pad in zip(prompt, pads, strict=True)])
        ids = Ideogram4Pipeline._prepare_ids(lengths, grid_h, grid_w, max_sequence_length, device)
        return features, *ids
