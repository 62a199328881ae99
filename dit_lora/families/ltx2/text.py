"""LTX-2's text: the cache keeps the connectors' output, and the pipeline gets it in place of its connectors' input.

The pipeline takes Gemma's hidden states of all layers, 367 MiB per prompt. The transformer takes the connectors'
output, 15 MiB (2.3: 12). Its parts for video and for sound are both kept, even if sound is not trained, because the
pipeline generates sound with every video.

Shapes: B batch, T text tokens, D width of the video's text, A of the sound's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder

# The connectors return these three, in this order.
TEXT_TENSORS = ("prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask")


def make_text_encoder(pipeline: Any, max_tokens: int, device: torch.device) -> TextEncoder:
    """A caption encoder that runs a pipeline's text encoder and connectors."""

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # One by one: a caption's tensors must not depend on the others in its batch, and the hidden states are large.
        rows = [_encode_caption(pipeline, caption, max_tokens, device) for caption in captions]
        # (1, T, ...) of each caption -> (B, T, ...)
        return {name: torch.cat(tensors) for name, tensors in zip(TEXT_TENSORS, zip(*rows, strict=True), strict=True)}

    return encode


def _encode_caption(pipeline: Any, caption: str, max_tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    # Hidden states of all layers, and the mask (1, T).
    states, mask, *_ = pipeline.encode_prompt(
        caption, do_classifier_free_guidance=False, max_sequence_length=max_tokens, device=device
    )
    # Read this after encode_prompt, which sets it.
    side = pipeline.tokenizer.padding_side
    encoded: tuple[torch.Tensor, ...] = pipeline.connectors(states, mask, padding_side=side)
    return encoded


def join_prompt_tensors(prompt: Tensors, empty_prompt: Tensors | None) -> dict[str, Any]:
    """Pipeline arguments for a prompt's cached tensors, joined so that `bypass_connectors` can split them again."""
    # The pipeline takes one embedding per prompt, so join the video's and the sound's text along the width.
    prompts = {"": prompt} | ({"negative_": empty_prompt} if empty_prompt else {})
    return {
        f"{prefix}{name}": tensor
        for prefix, tensors in prompts.items()
        for name, tensor in {
            "prompt_embeds": torch.cat([tensors[name] for name in TEXT_TENSORS[:2]], dim=-1),
            "prompt_attention_mask": tensors["prompt_attention_mask"],
        }.items()
    }


@contextmanager
def bypass_connectors(pipeline: Any, prompt_kwargs: Mapping[str, Any], video_width: int) -> Iterator[None]:
    """Inside the context, the pipeline accepts prompts from `join_prompt_tensors`. Other conditions leave it
    unchanged.
    """
    if "prompt_embeds" not in prompt_kwargs:
        yield
        return
    connectors = pipeline.connectors
    pipeline.connectors = _SplitConnectors(video_width)
    try:
        yield
    finally:
        pipeline.connectors = connectors


class _SplitConnectors:
    """Replaces a pipeline's connectors and splits what `join_prompt_tensors` joined."""

    # Not an nn.Module: a pipeline asks its modules for their device.
    def __init__(self, video_width: int) -> None:
        self.video_width = video_width

    def __call__(
        self, prompt_embeds: torch.Tensor, attention_mask: torch.Tensor, padding_side: str = "left"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The video's text (B, T, D), the sound's text (B, T, A) and their mask (B, T)."""
        video, audio = prompt_embeds.tensor_split([self.video_width], dim=-1)
        return video, audio, attention_mask
