"""Gradient checkpointing of a transformer's blocks: none, all of a block, or all of it but its attention."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, get_args

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dit_lora.errors import DitLoraError

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""From the one that recomputes nothing to the one that saves the most memory."""

_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_\w+"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|\w*flash_attn\w*::(fwd|\w*_forward)"
    r"|dit_lora::relu_linear_attention"
)


@cache
def is_attention(op: OpOverload) -> bool:
    """Whether an op is a fused attention's forward, whose outputs are small and whose FLOPs are many."""
    name = op.name().partition(".")[0]
    return bool(_ATTENTION.fullmatch(name)) and "backward" not in name


def supports_checkpointing(transformer: nn.Module) -> bool:
    """Whether Diffusers' switch for it works on this model."""
    return bool(getattr(transformer, "_supports_gradient_checkpointing", False))


def least_memory(transformer: nn.Module) -> Mode:
    """The mode that needs the least memory: `full`, or `none` of a model without checkpointing."""
    return "full" if supports_checkpointing(transformer) else "none"


def require_checkpointing(transformer: nn.Module, asked: Literal["auto", Mode]) -> None:
    """Raise `DitLoraError` if the model has none and the mode needs it."""
    if asked in ("selective", "full") and not supports_checkpointing(transformer):
        raise DitLoraError(
            f"train.checkpointing={asked}: {type(transformer).__name__} has no gradient checkpointing; use "
            "auto or none"
        )


def set_checkpointing(transformer: nn.Module, mode: Mode) -> None:
    """Checkpoint the model's blocks; values and gradients stay the same bits, and dropout draws the same.

    Raises `DitLoraError` as `require_checkpointing`.
    """
    require_checkpointing(transformer, mode)
    model: Any = transformer
    if mode != "none":
        model.enable_gradient_checkpointing(_selectively if mode == "selective" else None)
    elif supports_checkpointing(transformer):
        model.disable_gradient_checkpointing()


@contextmanager
def least_memory_mode(transformer: nn.Module) -> Iterator[None]:
    """Within it the model recomputes all that it can: what is compared or tried may need more than a step."""
    before = _mode(transformer)
    set_checkpointing(transformer, least_memory(transformer))
    try:
        yield
    finally:
        set_checkpointing(transformer, before)


def _mode(transformer: nn.Module) -> Mode:
    functions = [
        module.__dict__.get("_gradient_checkpointing_func")
        for module in transformer.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    if not functions:
        return "none"
    return "selective" if _selectively in functions else "full"


def _selectively(block: nn.Module, *args: Any) -> Any:
    """The block's outputs; its attention's are kept, and the rest is computed again in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def _policy(_context: Any, op: OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE
