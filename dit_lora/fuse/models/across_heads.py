"""Attention of LTX, LTX-2 and Wan, which norm q and k over the whole width (across heads) and then rotate them.

Shapes: B batch, S query tokens, K key tokens, D width, H heads.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from dit_lora.fuse.attention import FusedProcessor, RotaryTables, attend, project_output, project_qkv
from dit_lora.fuse.patches import find_unsupported_norm


class AcrossHeadsProcessor(FusedProcessor, ABC):
    """Base class of attention processors that apply RMSNorm across heads to q and k, and rotate them, in one pass."""

    def compute_attention(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        mask: torch.Tensor | None,
        rotary: RotaryTables | None,
    ) -> torch.Tensor:
        """Attention of tokens (B, S, D) over (B, K, .), and its output projection (B, S, D).

        Without a second input the tokens attend to themselves.
        """
        query, key, value = project_qkv(attn, hidden_states, encoder_hidden_states)
        # (B, S, D) to (B, S, H, D / H).
        query = self._normalize_heads(attn, query, attn.norm_q, rotary)
        key = self._normalize_heads(attn, key, attn.norm_k, rotary)
        value = value.unflatten(2, (attn.heads, -1))
        # (B, S, H, D / H) back to (B, S, D).
        attended = attend(query, key, value, mask, self.backend).flatten(2)
        return project_output(attn, attended)

    def _normalize_heads(
        self, attn: Any, query_or_key: torch.Tensor, norm: Any, rotary: RotaryTables | None
    ) -> torch.Tensor:
        """Norm and rotate q or k (B, S, D), and split it into heads (B, S, H, D / H)."""
        if self.fusion.is_on("qk_norm_rope"):
            # Heads are a view of the width: the kernel's means run over all heads of a token.
            tables = None if rotary is None else self.convert_rotary_tables(*rotary)
            heads = query_or_key.unflatten(2, (attn.heads, -1))
            rotation = self.get_rotation_layout(attn)
            return self.norm_and_rotate(heads, norm, tables, "rms", across_heads=True, rotation=rotation)
        # Off: the module norms the whole width, and the model's own code rotates.
        normed = norm(query_or_key)
        if rotary is not None:
            normed = self.apply_rotary_tables(attn, normed, rotary)
        return normed.unflatten(2, (attn.heads, -1))

    def get_rotation_layout(self, attn: Any) -> str:
        """Which elements of a head form a rotated pair, as `qk_norm_rope` names it."""
        return "interleaved"

    @abstractmethod
    def convert_rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """Convert the model's rotary tables to the form that the kernel `qk_norm_rope` takes."""

    @abstractmethod
    def apply_rotary_tables(self, attn: Any, query_or_key: torch.Tensor, rotary: RotaryTables) -> torch.Tensor:
        """Rotate q or k (B, S, D) with the stock model's code. Used while the kernel is off."""


def find_rms_norm_problem(attn: Any) -> str | None:
    """Reason why the kernel cannot compute this layer's norms of q and k; None if both are RMSNorm across heads."""
    return find_unsupported_norm((attn.norm_q, attn.norm_k), nn.RMSNorm)
