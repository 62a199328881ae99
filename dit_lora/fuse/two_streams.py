"""What models share whose image (or video) and text are streams with weights of their own, and attend together.

Source of the arithmetic: diffusers, models/normalization.py (AdaLayerNormZero), and what the blocks of Flux, SD3,
HunyuanVideo and Mochi have in common.

Shapes: B batch, S tokens of a stream, R of them rotated, D width, H heads.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import MochiRMSNorm, RMSNorm
from torch import nn

from dit_lora.fuse.attention import NORMS, FusedProcessor, Recomputable
from dit_lora.fuse.lora import project
from dit_lora_kernels.ada_norm import Stream, ada_norm, joint_ada_norm
from dit_lora_kernels.qk_norm_rope import qk_norm_rope

Rotary = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Norm = Literal["layer", "rms"]
HEAD_NORMS: dict[type, Norm] = {
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
    RMSNorm: "rms",
    MochiRMSNorm: "rms",
}


class Modulation(NamedTuple):
    """Six tables (B, D) in the order of `AdaLayerNormZero.linear`."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor
    shift_ff: torch.Tensor
    scale_ff: torch.Tensor
    gate_ff: torch.Tensor


def modulated(
    streams: Sequence[Stream], *, norm: Norm = "layer", eps: float
) -> tuple[Recomputable, tuple[torch.Tensor, ...]]:
    """Streams normed and modulated in one buffer (B, sum of S, D), and each x to go on from.

    The norm's backward keeps its input: its output need not be kept for adapters.
    """
    buffer, residuals = joint_ada_norm(streams, norm=norm, eps=eps)
    return Recomputable(buffer, partial(_buffer, streams, norm, eps)), residuals


def _buffer(streams: Sequence[Stream], norm: Norm, eps: float) -> torch.Tensor:
    return joint_ada_norm(streams, norm=norm, eps=eps)[0]


def enter(
    norm: Any, x: torch.Tensor, temb: torch.Tensor
) -> tuple[Recomputable, torch.Tensor, Modulation]:
    """A stream (B, S, D) before attention, x to go on from, and its modulation; as `AdaLayerNormZero.forward`."""
    modulation = Modulation(*norm.linear(norm.silu(temb)).chunk(6, dim=1))
    stream = Stream(x, modulation.shift, modulation.scale)
    normed, (x,) = modulated((stream,), eps=norm.norm.eps)
    return normed, x, modulation


def leave(
    norm: Any, ff: Any, x: torch.Tensor, attended: torch.Tensor, modulation: Modulation
) -> torch.Tensor:
    """The stream (B, S, D) with attention's output, and its feed-forward's, added through their gates."""
    _, _, gate, shift_ff, scale_ff, gate_ff = modulation
    normed, x = ada_norm(x, shift_ff, scale_ff, norm="layer", eps=norm.eps, y=attended, gate=gate)
    return torch.addcmul(x, gate_ff[:, None], ff(normed))


def clipped(x: torch.Tensor) -> torch.Tensor:
    """As Flux's blocks do, so that fp16 stays finite."""
    return x.clip(-65504, 65504) if x.dtype is torch.float16 else x


class TwoStreamProcessor(FusedProcessor):
    """What processors of both streams share: q, k and v of one, ready for attention."""

    def heads(
        self,
        layers: Sequence[nn.Module],
        norms: tuple[Any, Any],
        x: torch.Tensor,
        shape: tuple[int, int],
        rotary: Rotary | None = None,
        recomputable: Recomputable | None = None,
    ) -> Heads:
        """q, k, v (B, S, H, D) of x (B, S, H * D); q and k normed per head, their first R tokens rotated.

        `layers` are the projections, `shape` is (H, D) with a -1 for what follows from the other.
        """
        with recomputable.not_kept() if recomputable is not None else nullcontext():
            projected = project(layers, x)
        query, key, value = (tensor.unflatten(-1, shape) for tensor in projected)
        return self.normed(query, norms[0], rotary), self.normed(key, norms[1], rotary), value

    def normed(self, heads: torch.Tensor, norm: Any, rotary: Rotary | None) -> torch.Tensor:
        """q or k (B, S, H, D) after its norm and rotation, either of which may be missing."""
        if norm is None and rotary is None:
            return heads
        if self.fusion.is_on("qk_norm_rope"):
            cos, sin = rotary if rotary is not None else (None, None)
            return qk_norm_rope(
                heads,
                getattr(norm, "weight", None),
                getattr(norm, "bias", None),
                cos,
                sin,
                norm="none" if norm is None else HEAD_NORMS[type(norm)],
                eps=0.0 if norm is None else norm.eps,
                from_output=self.from_output,
            )
        if norm is not None:
            heads = norm(heads)
        if rotary is None:
            return heads
        tables: Any = rotary
        count = len(rotary[0])
        rotated: Any = apply_rotary_emb(heads[:, :count], tables, sequence_dim=1)
        return torch.cat([rotated, heads[:, count:]], dim=1)


def spared(attn: Any, *normed: Recomputable) -> dict[str, tuple[Recomputable, ...]]:
    """An argument for attention with a processor of these, which then does not keep its input."""
    takes = isinstance(attn.processor, TwoStreamProcessor)
    return {"recomputable": normed} if takes else {}


def each(
    recomputable: tuple[Recomputable, ...],
) -> tuple[Recomputable | None, Recomputable | None]:
    """The image's and the text's; nothing is given where the block runs its stock forward."""
    return (recomputable[0], recomputable[-1]) if recomputable else (None, None)


def norms_why_not(*norms: Any) -> str | None:
    """Why these are not all LayerNorms without weights, as which the blocks' forwards take them."""
    for norm in norms:
        if type(norm) is not nn.LayerNorm:
            return f"one of its norms is a {type(norm).__name__}"
        if norm.elementwise_affine:
            return "one of its norms has weights"
    return None


def attention_why_not(attn: Any) -> str | None:
    """Why a norm of q or k is none that `qk_norm_rope` computes."""
    norms = [getattr(attn, name, None) for name in NORMS]
    other = [n for n in norms if n is not None and type(n) not in HEAD_NORMS]
    return f"one of its norms is a {type(other[0]).__name__}" if other else None
