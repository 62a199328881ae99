"""Emulate fp16's value range in wider dtypes, for networks that were trained with it.

A network trained in fp16 under a clamp at +-65504 (Sana's linear attention) relies on it: in bf16 or fp32
without the clamp its activations reach 1e6 and it computes another function (diffusers issue 10336).
"""

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

FP16_MAX = torch.finfo(torch.float16).max


class SaturatingProcessor:
    """Base class of attention processors that clamp their output to +-65504 in every dtype."""


def saturate(values: torch.Tensor) -> torch.Tensor:
    """Clamp values to +-65504. The gradient is zero outside, as in the fp16 network.

    bf16 cannot represent 65504: the limit is then the nearest value, 65536.
    """
    return values.clamp(-FP16_MAX, FP16_MAX)


def has_fp16_saturation(model: nn.Module) -> bool:
    """True if any attention layer of the model clamps its output to +-65504, the largest fp16 value."""
    return any(
        isinstance(module, Attention) and isinstance(module.processor, SaturatingProcessor)
        for module in model.modules()
    )
