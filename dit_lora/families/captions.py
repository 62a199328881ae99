"""Captions: encoding one at a time, token limits, pipeline arguments and masks of their padding.

Masks (B, T) are evaluated on the device they are on. In a training step that is the host
(`dit_lora.data.loading.batch.HOST_TENSORS`).

Shapes: B batch, T text tokens, D text width.
"""

import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.utils import is_ftfy_available
from torch import nn

from dit_lora.families.base import Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.numerics.streams import move_to_device

MASKED_BIAS = -10000.0
"""Attention bias of a masked token, as the forward of Diffusers' transformers with a text mask computes it.

Sources: sana_transformer.py, latte_transformer_3d.py; pixart_transformer_2d.py and others have the same number.
"""


def make_caption_encoder(encode_caption: Callable[[str], Tensors]) -> TextEncoder:
    """A caption encoder that encodes captions one at a time, so that no result depends on the rest of its batch.

    Args:
        encode_caption: Encodes one caption to tensors (1, ...).
    """

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # Tensors (1, ...) by name, one dict per caption.
        rows = [encode_caption(caption) for caption in captions]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    return encode


def make_unpadded_encoder(encode_caption: Callable[[str], torch.Tensor], num_tokens: int) -> TextEncoder:
    """A caption encoder for pipelines that do not pad captions: it pads them with zeros for the cache, with a mask.

    Args:
        encode_caption: Encodes one caption to embeddings (length, D).
        num_tokens: Length T of the result, `prompt_embeds` (B, T, D) and `prompt_attention_mask` (B, T).
    """

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # One by one: a caption's tensors must not depend on the others in its batch.
        encoded = [encode_caption(caption) for caption in captions]
        padded = encoded[0].new_zeros((len(encoded), num_tokens, encoded[0].shape[-1]))
        mask = torch.zeros(padded.shape[:2], dtype=torch.bool, device=padded.device)
        for row, embeddings in enumerate(encoded):
            padded[row, : len(embeddings)] = embeddings
            mask[row, : len(embeddings)] = True
        return {"prompt_embeds": padded, "prompt_attention_mask": mask}

    return encode


def make_padded_encoder(pipeline: Any, num_tokens: int, device: torch.device) -> TextEncoder:
    """Create a caption encoder that pads every caption to `num_tokens`, so that none influences the others."""

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # (B, T, D)
        embeddings, _ = pipeline.encode_prompt(
            list(captions), do_classifier_free_guidance=False, max_sequence_length=num_tokens, device=device
        )
        return {"prompt_embeds": embeddings}

    return encode


def get_caption_spec(
    num_tokens: int,
    width: int,
    dtype: torch.dtype,
    mask_name: str = "prompt_attention_mask",
    mask_dtype: torch.dtype = torch.bool,
) -> TensorSpec:
    """Shapes and dtypes of one caption's padded embeddings and mask, for `Encoders.text_spec`."""
    return {
        "prompt_embeds": (torch.Size((num_tokens, width)), dtype),
        mask_name: (torch.Size((num_tokens,)), mask_dtype),
    }


def list_missing_ftfy_warnings(captions: Iterable[str], model: str) -> list[str]:
    """Message if ftfy is missing and these captions may hold what the model's pipeline would clean with it."""
    if is_ftfy_available():
        return []
    # Without characters or HTML entities to replace, ftfy returns a caption as it is.
    if all(caption.isascii() and html.unescape(caption) == caption for caption in captions):
        return []
    return [f"captions: ftfy is missing; pip install ftfy to clean them as {model}'s pipeline does"]


def compute_caption_token_limit(pipeline_class: Any, tokenizer: Any, max_tokens: int, **arguments: Any) -> TextLimit:
    """Number of tokens left for a caption, special tokens included, out of `max_tokens` after the chat template's.

    `arguments` go to `encode_prompt`.
    """
    probe = _PaddingCounter()
    pipeline = pipeline_class(scheduler=None, vae=None, text_encoder=probe, tokenizer=tokenizer, transformer=None)
    # The padding that an empty caption leaves is the number of tokens a caption can have.
    pipeline.encode_prompt("", device=probe.device, max_sequence_length=max_tokens, **arguments)
    # A caption's tokens are counted with the tokenizer's special ones, of which the template has its own.
    return TextLimit(tokenizer, probe.num_pads + tokenizer.num_special_tokens_to_add())


class _PaddingCounter(nn.Module):
    """Stand-in for a pipeline's text encoder that counts the padding tokens it gets for an empty caption."""

    dtype, device = torch.float32, torch.device("cpu")
    num_pads = 0

    def forward(self, input_ids: torch.Tensor | None = None, *, attention_mask: torch.Tensor, **_: Any) -> Any:
        self.num_pads = int((attention_mask == 0).sum())
        # Zeros for whichever layers the pipeline reads.
        states = torch.zeros(1, attention_mask.shape[1], 1)
        return SimpleNamespace(hidden_states=defaultdict(lambda: states))


def trim_text_padding(embeddings: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Remove the token columns that are padding in every caption of a batch.

    Captions are cached padded to one length, but a batch only needs the length of its longest caption.

    Args:
        embeddings: (B, T, ...).
        mask: (B, T), 1 for text.

    Returns:
        The shortened embeddings and mask. The mask is None if nothing is masked any more: attention then has more and
        faster backends.
    """
    is_text = mask == 1
    # Columns in which at least one caption has text.
    columns = is_text.any(0).nonzero().flatten()
    # Prefer a slice, which does not copy. Only padding in the middle of captions needs a copy.
    if len(columns) == 0 or int(columns[-1]) == len(columns) - 1:
        shortened = embeddings[:, : len(columns)]
    else:
        shortened = embeddings.index_select(1, move_to_device(columns, embeddings.device))
    is_text = is_text[:, columns]
    return shortened, None if bool(is_text.all()) else is_text


def build_text_attention_bias(mask: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor | None:
    """Attention bias (B, 1, T) of a mask of ones and zeros, in the dtype and on the device of the embeddings.

    None if nothing is masked: without a bias, attention has more and faster backends.
    """
    is_text = mask == 1
    if bool(is_text.all()):
        return None
    # (B, T), then (B, 1, T) for all queries.
    bias = torch.where(is_text, 0.0, MASKED_BIAS).to(embeddings.dtype)
    return move_to_device(bias[:, None], embeddings.device)


def get_unpadded_kwargs(prompt: Tensors, empty_prompt: Tensors | None) -> dict[str, Any]:
    """Arguments of pipelines that take a list of embeddings (length, D) without padding, one per caption.

    Args:
        prompt: `prompt_embeds` (B, T, D) and `prompt_attention_mask` (B, T).
        empty_prompt: The same of "", of one caption or as many. None without guidance.
    """
    captions = unpad_captions(prompt["prompt_embeds"], prompt["prompt_attention_mask"])
    arguments: dict[str, Any] = {"prompt_embeds": captions}
    if empty_prompt:
        empty = unpad_captions(empty_prompt["prompt_embeds"], empty_prompt["prompt_attention_mask"])
        arguments["negative_prompt_embeds"] = empty * (len(captions) // len(empty))
    return arguments


def unpad_captions(embeddings: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Embeddings of each caption without its padding, (length, ...), from captions (B, T, ...) padded at the end."""
    lengths = mask.sum(1).tolist()
    return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]
