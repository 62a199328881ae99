"""The video DiT's blocks on fused ops.

Source of the arithmetic: dit_lora/models/video_dit.py (VideoDiTBlock, ModulatedNorm). Its attention is
`AttnProcessor2_0`, whose patch is in dit_lora/fuse/attention.py.

Shapes: B batch, N tokens, D width.
"""

from typing import Any

import torch

from dit_lora.fuse.core import ForwardPatch
from dit_lora_kernels.ada_norm import Stream, ada_norm, joint_ada_norm


def block_forward(block: Any, tokens_BND: torch.Tensor, condition_BD: torch.Tensor) -> torch.Tensor:
    """Tokens (B, N, D) after attention and feed-forward, as `VideoDiTBlock.forward`."""
    shift, scale, gate, shift_ff, scale_ff, gate_ff = block.adaln(condition_BD)
    normed, (x,) = joint_ada_norm(
        (Stream(tokens_BND, shift, scale),), norm="layer", eps=block.norm1.eps
    )
    attended = block.attn(normed)
    normed, x = ada_norm(
        x, shift_ff, scale_ff, norm="layer", eps=block.norm2.eps, y=attended, gate=gate
    )
    return torch.addcmul(x, gate_ff[:, None], block.ff(normed))


FORWARDS = (ForwardPatch("dit_lora.models.video_dit.VideoDiTBlock", "ada_norm", block_forward),)
