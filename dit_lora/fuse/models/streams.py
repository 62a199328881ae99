"""Run `ada_norm` on a stream of tokens with the weights and eps of a block's norm module.

Shapes: B batch, S tokens, D width.
"""

from collections.abc import Callable
from typing import Any

import torch

from dit_lora.fuse.attention import NormKind
from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm


def normalize_stream(norm: Any, stream: AdaNormInputs, kind: NormKind = "layer") -> tuple[torch.Tensor, torch.Tensor]:
    """Add the stream's gated y to x, then norm and modulate the sum. Both results are (B, S, D).

    Args:
        norm: The block's norm module, which provides the weights, if any, and eps.
        stream: x and, each optional, shift, scale, y and gate.
        kind: `layer` or `rms`.

    Returns:
        The normed and modulated sum, and the sum itself (the residual stream to continue with).
    """
    # The op returns the sum even without a y: then the gradient of the sum's other use arrives in the same kernel.
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    normed, (residual,) = joint_ada_norm((stream,), weight, bias, norm=kind, eps=norm.eps)
    return normed, residual


def recompute_norm(normalize: Callable[..., tuple[torch.Tensor, Any]], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a norm again and return only its first output, for `RecomputableTensor`. The values are bitwise the same."""
    return normalize(*args, **kwargs)[0]
