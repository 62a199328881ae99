"""The room that a pipeline's chat template leaves a caption, found by the pipeline's own code."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dit_lora.families.base import TextLimit


def template_limit(
    pipeline_class: Any, tokenizer: Any, max_tokens: int, **arguments: Any
) -> TextLimit:
    """Return what is left of `max_tokens` for a caption; `arguments` are further ones of `encode_prompt`."""
    probe = _Probe()
    pipeline = pipeline_class(
        scheduler=None, vae=None, text_encoder=probe, tokenizer=tokenizer, transformer=None
    )
    pipeline.encode_prompt("", device=probe.device, max_sequence_length=max_tokens, **arguments)
    return TextLimit(tokenizer, probe.pads)


class _Probe(nn.Module):
    """Stands for a text encoder and counts the pads that it is given in the place of a caption."""

    dtype, device = torch.float32, torch.device("cpu")
    pads = 0

    def forward(self, *, attention_mask: torch.Tensor, **_: Any) -> Any:
        self.pads = int((attention_mask == 0).sum())
        states = torch.zeros(1, attention_mask.shape[1], 1)
        return SimpleNamespace(hidden_states=defaultdict(lambda: states))
