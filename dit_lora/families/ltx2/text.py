"""LTX-2's text: the cache keeps the connectors' output, and the pipeline gets it in place of its connectors' input.

The pipeline takes Gemma's hidden states of all layers, 367 MiB per prompt. The transformer takes the connectors'
output, 15 MiB (2.3: 12). Its parts for video and for sound are both kept, even if sound is not trained, because the
pipeline generates sound with every video.

Shapes: B batch, T text tokens, D width of the video's text, A of the sound's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder
from dit_lora.families.captions import make_caption_encoder

# The connectors return these three, in this order.
TEXT_TENSORS = ("prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask")


def make_text_encoder(pipeline: Any, max_tokens: int, device: torch.device) -> TextEncoder:
    """A caption encoder that runs a pipeline's text encoder and connectors."""

    def encode_caption(caption: str) -> Tensors:
        # Hidden states of all layers, and the mask (1, T).
        states, mask, *_ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=max_tokens, device=device
        )
        # Read this after encode_prompt, which sets it.
        side = pipeline.tokenizer.padding_side
        return dict(zip(TEXT_TENSORS, pipeline.connectors(states, mask, padding_side=side), strict=True))

    # One by one also because the hidden states are large.
    return make_caption_encoder(encode_caption)


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
    """Context in which LTX-2's pipeline accepts prompts from `join_prompt_tensors`.

    Other prompts leave it unchanged.
    """
    if "prompt_embeds" not in prompt_kwargs:
        yield
        return
    connectors = pipeline.connectors
    pipeline.connectors = _ConnectorsStandIn(video_width)
    try:
        yield
    finally:
        pipeline.connectors = connectors


class _ConnectorsStandIn:
    """Stand-in for the connectors of LTX-2's pipeline. It splits prompts that `join_prompt_tensors` joined."""

    # Not an nn.Module: a pipeline asks its modules for their device.
    def __init__(self, video_width: int) -> None:
        self.video_width = video_width

    def __call__(
        self, prompt_embeds: torch.Tensor, attention_mask: torch.Tensor, padding_side: str = "left"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split a joined prompt into the video's text (B, T, D), the sound's text (B, T, A) and their mask (B, T)."""
        video, audio = prompt_embeds.tensor_split([self.video_width], dim=-1)
        return video, audio, attention_mask
