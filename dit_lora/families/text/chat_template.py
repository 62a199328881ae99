"""How many caption tokens fit into a pipeline's chat template, measured with the pipeline's own code."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dit_lora.families.base import TextLimit


def measure_template_limit(pipeline_class: Any, tokenizer: Any, max_tokens: int, **arguments: Any) -> TextLimit:
    """Number of tokens left for a caption out of `max_tokens` after the chat template's.

    `arguments` go to `encode_prompt`.
    """
    probe = _PaddingCounter()
    pipeline = pipeline_class(scheduler=None, vae=None, text_encoder=probe, tokenizer=tokenizer, transformer=None)
    # The padding that an empty caption leaves is the number of tokens a caption can have.
    pipeline.encode_prompt("", device=probe.device, max_sequence_length=max_tokens, **arguments)
    return TextLimit(tokenizer, probe.num_pads)


class _PaddingCounter(nn.Module):
    """Stand-in for a pipeline's text encoder that counts the padding tokens it gets for an empty caption."""

    dtype, device = torch.float32, torch.device("cpu")
    num_pads = 0

    def forward(self, input_ids: torch.Tensor | None = None, *, attention_mask: torch.Tensor, **_: Any) -> Any:
        self.num_pads = int((attention_mask == 0).sum())
        # Zeros for whichever layers the pipeline reads.
        states = torch.zeros(1, attention_mask.shape[1], 1)
        return SimpleNamespace(hidden_states=defaultdict(lambda: states))
