"""The video DiT's blocks on fused ops.

Source of the arithmetic: dit_lora/models/video_dit.py (VideoDiTBlock, ModulatedNorm). Its attention is
`AttnProcessor2_0`, whose patch is in dit_lora/fuse/attention.py.

Shapes: B batch, N tokens, D width.
"""

from typing import Any

import torch

from dit_lora.fuse.models.streams import normalize_stream
from dit_lora.fuse.patches import ForwardPatch
from dit_lora_kernels.ada_norm import AdaNormInputs


def block_forward(block: Any, tokens_BND: torch.Tensor, condition_BD: torch.Tensor) -> torch.Tensor:
    """Forward of `VideoDiTBlock`: tokens (B, N, D) after attention and feed-forward, modulated by condition (B, D)."""
    shift, scale, gate, shift_ff, scale_ff, gate_ff = block.adaln(condition_BD)
    normed, x = normalize_stream(block.norm1, AdaNormInputs(tokens_BND, shift, scale))
    # The second norm adds attention's gated output before it norms.
    normed, x = normalize_stream(block.norm2, AdaNormInputs(x, shift_ff, scale_ff, block.attn(normed), gate))
    return torch.addcmul(x, gate_ff[:, None], block.ff(normed))


FORWARDS = (ForwardPatch("dit_lora.models.video_dit.VideoDiTBlock", "ada_norm", block_forward),)
