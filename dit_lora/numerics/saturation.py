"""The limit that fp16 puts on values, repeated in a wider dtype for networks that were trained with it.

A network trained in fp16 under a clamp at +-65504 (Sana's linear attention) relies on it: in bf16 or fp32
without the clamp its activations reach 1e6 and it computes another function (diffusers issue 10336).
"""

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

FP16_MAX = torch.finfo(torch.float16).max


class SaturatingProcessor:
    """An attention processor whose result is clamped at +-65504 whatever its dtype."""


def saturate(values: torch.Tensor) -> torch.Tensor:
    """Return the values clamped at +-65504; the gradient is zero beyond, as in the fp16 network.

    bf16 does not have 65504: there the limit is the nearest value, 65536.
    """
    return values.clamp(-FP16_MAX, FP16_MAX)


def is_emulated(model: nn.Module) -> bool:
    """Return True if the model repeats fp16's limit in any of its attention layers."""
    return any(
        isinstance(module, Attention) and isinstance(module.processor, SaturatingProcessor)
        for module in model.modules()
    )
