"""Attention of Transformers' models: one implementation by name for the whole model, checked, and given back.

What calls `scaled_dot_product_attention` itself, such as VideoChat2's vision tower, keeps doing so. Padding: in
training it is on the right and no mask is given, so that causal attention never sees it and flash attention needs
no unpadding; several prompts that are generated from together are padded on the left, with a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from dit_lora.errors import DitLoraError, listed
from dit_lora.guard.switches import Switch

STOCK = "sdpa"
"""PyTorch's `scaled_dot_product_attention`, whose backends the guard can switch off one by one."""
_AVAILABLE: dict[str, Callable[[], bool]] = {
    STOCK: lambda: True,
    "eager": lambda: True,
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
}
TRAINABLE = tuple(_AVAILABLE)
_HALVES = (torch.float16, torch.bfloat16)

Before = list[tuple[PreTrainedConfig, str | None]]


def require_implementation(model: PreTrainedModel, name: str) -> None:
    """Raise `DitLoraError` unless this model can train with this implementation here; `eager` can in fp32 alone."""
    if name not in _AVAILABLE:
        raise DitLoraError(
            listed(f"kernels.attention: {name} is not for Transformers' models; choose", TRAINABLE)
        )
    if not _AVAILABLE[name]():
        raise DitLoraError(
            f"kernels.attention: {name} cannot be used here: Transformers finds no package for it that runs on "
            "this device; use auto"
        )
    # It keeps scores in the model's dtype: at logits near -120 in bf16 its outputs are off by 0.09 to 0.14 of the largest
    # and its gradients by 0.07 to 0.13, where SDPA's math and flash are off by 0.002 and 0.014 (one draw each of 64 and
    # 513 causal tokens of width 64, as `numerics.attention.parity` draws).
    if name == "eager" and any(p.dtype in _HALVES for p in model.parameters()):
        raise DitLoraError(
            "kernels.attention: eager rounds attention's scores to half precision; use auto, or model.dtype: "
            "float32"
        )


class AttentionChoice:
    """The implementation that a model was given; `remove` gives back what it had."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Set it; raise as `require_implementation` does, and for a model of which a part cannot take it."""
        require_implementation(model, name)
        # Before the first change, as a model whose parts differ must get each back.
        self.name, self._before = name, implementations(model)
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            self.remove()
            raise DitLoraError(f"kernels.attention: {name}: {error}") from error
        # A part that does not take it may keep what it has, without an error.
        others = {
            type(part).__name__
            for part in model.modules()
            if isinstance(part, PreTrainedModel) and part.config._attn_implementation != name
        }
        if others:
            self.remove()
            raise DitLoraError(
                listed(f"kernels.attention: these parts do not take {name}", sorted(others))
            )

    def remove(self) -> None:
        """Restore the original attention implementation of every part of the model."""
        _set(self._before)

    def switches(self, model: PreTrainedModel) -> list[Switch]:
        """Return the guard's way to PyTorch's own attention, if this is another."""
        if self.name == STOCK:
            return []
        off = Switch(
            f"attention:{self.name}",
            "attention_backend",
            partial(_stock_for_a_while, model),
            partial(model.set_attn_implementation, STOCK),
            "PyTorch's own attention",
            insisted=True,
        )
        return [off]


def implementations(model: nn.Module) -> Before:
    """Return the configurations of a model's parts, outer ones first, with the implementation of each."""
    # By identity, as parts may share a configuration, and configurations compare by their values.
    by_config: dict[int, tuple[PreTrainedConfig, str | None]] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            by_config.setdefault(id(part.config), (part.config, part.config._attn_implementation))
    return list(by_config.values())


def _set(choices: Before) -> None:
    """Give each configuration its implementation."""
    # Outer ones first: setting one sets those within it, which are then set again to their own.
    for config, name in choices:
        config._attn_implementation = name


@contextmanager
def _stock_for_a_while(model: PreTrainedModel) -> Iterator[None]:
    """Let the model attend by PyTorch's own within it."""
    before = implementations(model)
    model.set_attn_implementation(STOCK)
    try:
        yield
    finally:
        _set(before)
