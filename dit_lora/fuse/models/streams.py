"""A stream of tokens through `ada_norm`, by the norm module that a block has for it.

Shapes: B batch, S tokens, D width.
"""

from typing import Any

import torch

from dit_lora.fuse.attention import Norm
from dit_lora_kernels.ada_norm import Stream, joint_ada_norm


def norm_stream(
    norm: Any, stream: Stream, kind: Norm = "layer"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stream's sum with its gated y (B, S, D), normed and modulated; and that sum, to go on from.

    `norm` is the block's own module, of which the weights, if it has any, and eps are taken.
    """
    # The sum is an output of the op also where there is no y: its other use's gradient then arrives in the kernel.
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    normed, (residual,) = joint_ada_norm((stream,), weight, bias, norm=kind, eps=norm.eps)
    return normed, residual
