"""Checkpoints the gradients of a transformer's blocks: none, all of a block, or all of it but its attention.

Diffusers' and Transformers' models have the same switch: a function that each of their blocks is called by.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Modes from the one that recomputes nothing to the one that saves the most memory."""

_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_\w+"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|\w*flash_attn\w*::(fwd|\w*_forward)"
    r"|dit_lora::relu_linear_attention"
)


@cache
def is_attention(op: OpOverload) -> bool:
    """Return true if an op is a fused attention's forward, whose outputs are small and whose FLOPs are many."""
    name = op.name().partition(".")[0]
    return bool(_ATTENTION.fullmatch(name)) and "backward" not in name


def keeps_outputs(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return true if `selective` keeps what this call of an op returned: it is attention, and without dropout.

    With dropout a kept call would not draw again, and all dropout after it would draw other numbers than it did.
    """
    return is_attention(op) and not any(
        kwargs.get(name, args[place] if place < len(args) else 0)
        for place, name in _dropout_arguments(op)
    )


@cache
def _dropout_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of the op's dropout probability."""
    arguments = enumerate(op._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.name in ("dropout_p", "p_dropout"))


def supports_checkpointing(transformer: nn.Module) -> bool:
    """Return true if Diffusers' or Transformers' switch for it works on this model."""
    if getattr(transformer, "supports_gradient_checkpointing", False):  # Transformers
        return any(hasattr(module, "gradient_checkpointing") for module in transformer.modules())
    return bool(getattr(transformer, "_supports_gradient_checkpointing", False))


def call_blocks_by(transformer: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let the blocks that can be checkpointed be called by `function(block, *inputs)`, or, by None, plainly.

    The model has to support checkpointing. Transformers' blocks, which do so in training mode only, come as a
    `functools.partial` that holds inputs too.
    """
    model: Any = transformer
    if not getattr(model, "supports_gradient_checkpointing", False):
        if function is None:
            model.disable_gradient_checkpointing()
        else:
            model.enable_gradient_checkpointing(function)
    # Not by `activation_checkpointing_enable`: that makes frozen embeddings' outputs need gradients.
    elif function is None:
        model._set_gradient_checkpointing(enable=False)
    else:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


@contextmanager
def blocks_called_by(transformer: nn.Module, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within it the blocks are called as `call_blocks_by` says, afterwards plainly; a model without checkpointing always."""
    if not supports_checkpointing(transformer):
        yield
        return
    call_blocks_by(transformer, function)
    try:
        yield
    finally:
        call_blocks_by(transformer, None)


def least_memory(transformer: nn.Module) -> Mode:
    """Return the mode that needs the least memory: `full`, or `none` of a model without checkpointing."""
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
    if supports_checkpointing(transformer):
        call_blocks_by(transformer, BLOCK_CALLERS[mode])


@contextmanager
def in_mode(transformer: nn.Module, mode: Mode) -> Iterator[None]:
    """Checkpoint the model's blocks in a mode within, and in the mode of before afterwards."""
    before = _mode(transformer)
    set_checkpointing(transformer, mode)
    try:
        yield
    finally:
        set_checkpointing(transformer, before)


def _mode(transformer: nn.Module) -> Mode:
    # There is no public way to ask: Diffusers and Transformers keep the function on each module.
    functions = [
        module.__dict__.get("_gradient_checkpointing_func")
        for module in transformer.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    if not functions:
        return "none"
    return "selective" if _selectively in functions else "full"


def before_each_computation(block: nn.Module, function: Callable[[], None]) -> None:
    """Let `full` checkpointing call `function` before each computation of a block, the backward pass's too.

    A forward pre-hook alone is not enough: Transformers computes a layer again without its hooks.
    """
    block.__dict__[_BEFORE] = function


_BEFORE = "_dit_lora_before_computation"


def _fully(block: Callable[..., Any], *args: Any) -> Any:
    """Return the block's outputs; everything within it is computed again in the backward pass."""
    before: Callable[[], None] | None = getattr(called_block(block), _BEFORE, None)
    if before is None:
        return checkpoint(block, *args, use_reentrant=False)

    def compute(*args: Any) -> Any:
        before()
        return block(*args)

    # Offload brings a block's weights by this: Transformers recomputes a layer without its hooks.
    return checkpoint(compute, *args, use_reentrant=False)


def called_block(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module that a checkpointed function computes, as Diffusers and Transformers give it."""
    candidates: list[Any] = [function]
    if isinstance(function, partial):
        # Of the layer's forward, with the layer first; in older versions of its bound `__call__`.
        candidates = [*function.args, getattr(function.func, "__self__", None)]
    return next((one for one in candidates if isinstance(one, nn.Module)), None)


def _selectively(block: Callable[..., Any], *args: Any) -> Any:
    """Return the block's outputs; its attention's are kept, the rest is computed again in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def _policy(_context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = keeps_outputs(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


BLOCK_CALLERS: dict[Mode, Callable[..., Any] | None] = {
    "none": None,
    "selective": _selectively,
    "full": _fully,
}
"""The value that `call_blocks_by` takes for each mode."""
