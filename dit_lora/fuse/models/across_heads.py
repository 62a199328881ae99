"""Attention of LTX, LTX-2 and Wan, which norm q and k over the whole width (across heads) and then rotate them.

Shapes: B batch, S query tokens, K key tokens, D width, H heads.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from dit_lora.fuse.attention import FusedProcessor, Rotary, attend, project_output, project_qkv
from dit_lora.fuse.patches import other_norm


class AcrossHeadsProcessor(FusedProcessor, ABC):
    """Processor base class: RMSNorm of q and k across heads, and their rotation, in one pass."""

    def attended(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        mask: torch.Tensor | None,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Attention of (B, S, D) over (B, K, .), or over itself if that is None, and its projection (B, S, D)."""
        query, key, value = project_qkv(attn, hidden_states, encoder_hidden_states)
        # (B, S, D) to (B, S, H, D / H).
        query = self._normed(attn, query, attn.norm_q, rotary)
        key = self._normed(attn, key, attn.norm_k, rotary)
        value = value.unflatten(2, (attn.heads, -1))
        # (B, S, H, D / H) back to (B, S, D).
        attended = attend(query, key, value, mask, self.backend).flatten(2)
        return project_output(attn, attended)

    def _normed(
        self, attn: Any, projected: torch.Tensor, norm: Any, rotary: Rotary | None
    ) -> torch.Tensor:
        """Norm and rotate q or k (B, S, D), and split it into heads (B, S, H, D / H)."""
        if self.fusion.is_on("qk_norm_rope"):
            # Heads are a view of the width: the kernel's means run over all heads of a token.
            tables = None if rotary is None else self.tables(*rotary)
            heads = projected.unflatten(2, (attn.heads, -1))
            rotation = self.rotation(attn)
            return self.norm_and_rotate(
                heads, norm, tables, "rms", across_heads=True, rotation=rotation
            )
        # Off: the module norms the whole width, and the model's own code rotates.
        normed = norm(projected)
        if rotary is not None:
            normed = self.rotated(attn, normed, rotary)
        return normed.unflatten(2, (attn.heads, -1))

    def rotation(self, attn: Any) -> str:
        """Which elements of a head form a rotated pair, as `qk_norm_rope` names it."""
        return "interleaved"

    @abstractmethod
    def tables(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
        """Convert the model's rotary tables to those that `qk_norm_rope` takes."""

    @abstractmethod
    def rotated(self, attn: Any, normed: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate q or k (B, S, D) with the model's own code. Used while the kernel is off."""


def rms_why_not(attn: Any) -> str | None:
    """Why the kernel cannot compute this layer's norms of q and k; None if both are RMSNorm across heads."""
    return other_norm((attn.norm_q, attn.norm_k), nn.RMSNorm)
