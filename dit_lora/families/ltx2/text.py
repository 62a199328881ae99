"""LTX-2's text: what its connectors make of a prompt is kept, and given to the pipeline in their place.

Gemma's hidden states of all layers, which the pipeline takes, are 367 MiB a prompt; the connectors' output, with which
the transformer is called, is 15 (2.3: 12). Both of its halves are kept, whether sound is trained or not: the pipeline
makes sound with every video.

Shapes: B batch, T text tokens, D width of the video's text, A of the sound's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_lora.families.base import Tensors, TextEncoder

TEXT = ("prompt_embeds", "audio_prompt_embeds", "prompt_attention_mask")


def connected(pipeline: Any, tokens: int, device: torch.device) -> TextEncoder:
    """Return what encodes captions by a pipeline's own methods up to its transformer."""

    @torch.no_grad()
    def encode(captions: Sequence[str]) -> Tensors:
        # One by one: a caption's tensors do not depend on its neighbours, and the hidden states are large.
        rows = [_encoded(pipeline, caption, tokens, device) for caption in captions]
        return {
            name: torch.cat(one) for name, one in zip(TEXT, zip(*rows, strict=True), strict=True)
        }

    return encode


def _encoded(
    pipeline: Any, caption: str, tokens: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    states, mask, *_ = pipeline.encode_prompt(
        caption, do_classifier_free_guidance=False, max_sequence_length=tokens, device=device
    )
    # Not before: encode_prompt sets it.
    side = pipeline.tokenizer.padding_side
    encoded: tuple[torch.Tensor, ...] = pipeline.connectors(states, mask, padding_side=side)
    return encoded


def encoded_prompt(prompt: Tensors, empty: Tensors | None) -> dict[str, Any]:
    """Return the pipeline's arguments for a prompt's tensors, which `connectors_passed` takes apart again."""
    given = {"": prompt} | ({"negative_": empty} if empty else {})
    return {
        f"{prefix}{name}": tensor
        for prefix, tensors in given.items()
        for name, tensor in {
            "prompt_embeds": torch.cat([tensors[one] for one in TEXT[:2]], dim=-1),
            "prompt_attention_mask": tensors["prompt_attention_mask"],
        }.items()
    }


@contextmanager
def connectors_passed(
    pipeline: Any, conditions: Mapping[str, Any], video_width: int
) -> Iterator[None]:
    """Let a pipeline take prompts that passed its connectors, where these conditions are of such; else as it is."""
    if "prompt_embeds" not in conditions:
        yield
        return
    own = pipeline.connectors
    pipeline.connectors = _Passed(video_width)
    try:
        yield
    finally:
        pipeline.connectors = own


class _Passed:
    """Stands in the place of a pipeline's connectors: parts what `encoded_prompt` joined."""

    # No module: a pipeline asks its modules where they are.
    def __init__(self, video_width: int) -> None:
        self.video_width = video_width

    def __call__(
        self, prompt_embeds: torch.Tensor, attention_mask: torch.Tensor, padding_side: str = "left"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the video's text (B, T, D), the sound's (B, T, A) and their mask (B, T)."""
        video, audio = prompt_embeds.tensor_split([self.video_width], dim=-1)
        return video, audio, attention_mask
