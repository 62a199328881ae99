"""Attention of Transformers' models: sets one implementation for the whole model, checks it, and restores it later.

Modules that call `scaled_dot_product_attention` themselves, such as VideoChat2's vision tower, are not affected.
Padding: in training it is on the right and no mask is passed, so that causal attention never sees it and flash
attention needs no unpadding. When several prompts generate together they are padded on the left, with a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from dit_lora.errors import DitLoraError, format_list
from dit_lora.guard.fallbacks import Fallback

DEFAULT_IMPLEMENTATION = "sdpa"
"""PyTorch's `scaled_dot_product_attention`, whose backends the guard can switch off one by one."""
_AVAILABILITY_CHECKS: dict[str, Callable[[], bool]] = {
    DEFAULT_IMPLEMENTATION: lambda: True,
    "eager": lambda: True,
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
TRAINABLE_IMPLEMENTATIONS = tuple(_AVAILABILITY_CHECKS)
_HALF_DTYPES = (torch.float16, torch.bfloat16)

ConfigImplementations = list[tuple[PreTrainedConfig, str | None]]


def require_implementation(model: PreTrainedModel, name: str) -> None:
    """Check that this model can train with this attention implementation on this machine.

    Raises:
        DitLoraError: An unknown name, a missing package or device, or `eager` for a model that is not in fp32.
    """
    if name not in _AVAILABILITY_CHECKS:
        raise DitLoraError(
            format_list(
                f"kernels.attention: {name} does not work with Transformers models; choose one of",
                TRAINABLE_IMPLEMENTATIONS,
            )
        )
    if not _AVAILABILITY_CHECKS[name]():
        raise DitLoraError(
            f"kernels.attention: {name} cannot be used here: Transformers finds no package for it that runs on "
            "this device; use auto"
        )
    # Eager attention keeps scores in the model's dtype. At logits near -120 in bf16 its outputs are off by 0.09 to
    # 0.14 of the largest and its gradients by 0.07 to 0.13, while SDPA's math and flash are off by 0.002 and 0.014
    # (one draw each of 64 and 513 causal tokens of width 64, as `numerics.attention.parity` draws).
    if name == "eager" and any(p.dtype in _HALF_DTYPES for p in model.parameters()):
        raise DitLoraError(
            "kernels.attention: eager rounds attention's scores to half precision; use auto, or model.dtype: float32"
        )


class AttentionChoice:
    """An attention implementation that was set on a Transformers model. `remove` restores the previous one."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Set an attention implementation on the model.

        Raises `DitLoraError` as `require_implementation` does, and if a part of the model rejects it.
        """
        require_implementation(model, name)
        # Read before the first change: parts may have different implementations, and each must be restored.
        self.name, self._previous = name, list_implementations(model)
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            self.remove()
            raise DitLoraError(f"kernels.attention: {name}: {error}") from error
        # A part that does not support it may silently keep its old one.
        rejecting_parts = {
            type(part).__name__
            for part in model.modules()
            if isinstance(part, PreTrainedModel) and part.config._attn_implementation != name
        }
        if rejecting_parts:
            self.remove()
            raise DitLoraError(
                format_list(f"kernels.attention: these parts do not take {name}", sorted(rejecting_parts))
            )

    def remove(self) -> None:
        """Restore the original attention implementation of every part of the model."""
        _restore_implementations(self._previous)

    def build_fallbacks(self, model: PreTrainedModel) -> list[Fallback]:
        """Fallbacks with which the guard switches a model to PyTorch's attention.

        Empty if the model already uses it.
        """
        if self.name == DEFAULT_IMPLEMENTATION:
            return []

        @contextmanager
        def use_default_attention() -> Iterator[None]:
            previous = list_implementations(model)
            model.set_attn_implementation(DEFAULT_IMPLEMENTATION)
            try:
                yield
            finally:
                _restore_implementations(previous)

        fallback = Fallback(
            f"attention:{self.name}",
            "attention_backend",
            use_default_attention,
            partial(model.set_attn_implementation, DEFAULT_IMPLEMENTATION),
            "PyTorch's own attention",
            required=True,
        )
        return [fallback]


def list_implementations(model: nn.Module) -> ConfigImplementations:
    """List the configurations of a model's parts, outer ones first, each with its attention implementation."""
    # Keyed by identity: parts may share a configuration, and configurations compare by value.
    by_config: dict[int, tuple[PreTrainedConfig, str | None]] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            by_config.setdefault(id(part.config), (part.config, part.config._attn_implementation))
    return list(by_config.values())


def _restore_implementations(choices: ConfigImplementations) -> None:
    """Set the stored attention implementation of each configuration."""
    # Outer ones first: setting one also sets its sub-configurations, which are then restored one by one.
    for config, name in choices:
        config._attn_implementation = name
