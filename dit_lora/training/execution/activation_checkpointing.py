"""Checkpoints the gradients of a transformer's blocks: none, all of a block, or all of it but its attention.

Diffusers' and Transformers' models have the same switch: a function that each of their blocks is called by.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dit_lora.errors import DitLoraError
from dit_lora.numerics.attention_calls import exchange_keeper

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
    """Call the blocks as `call_blocks_by` says in this context. Does nothing for a model without checkpointing."""
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
    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _policy)
    module = called_block(block)
    if module is not None and not torch.compiler.is_compiling():
        contexts = partial(_few_contexts if module in _MARKED else _all_contexts, module)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


# By block: how many calls of attention it makes, where all that is kept is of calls that are marked.
_MARKED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _few_contexts(block: nn.Module) -> tuple["_AtCalls", "_AtCalls"]:
    """Return contexts of a forward and its recomputation in which marked calls alone run under dispatch modes."""
    keeping, handing_out = create_selective_checkpoint_contexts(_policy)
    return _AtCalls(keeping, block), _AtCalls(handing_out)


class _AtCalls:
    """Runs each marked call of attention within it under a dispatch mode, and nothing else.

    A mode is a call of Python in each of the hundred ops of a block, of which it wants one.
    """

    def __init__(self, mode: TorchDispatchMode, block: nn.Module | None = None) -> None:
        self._mode, self._block, self._calls = mode, block, 0

    @contextmanager
    def attention_call(self) -> Iterator[None]:
        """Run what is within it under the mode."""
        self._calls += 1
        # Not the mode's own: that of a recomputation forgets how many calls it has handed out (torch 2.13).
        TorchDispatchMode.__enter__(self._mode)
        try:
            yield
        finally:
            self._mode.__exit__(None, None, None)

    def __enter__(self) -> None:
        self._before = exchange_keeper(self)

    def __exit__(self, *_: object) -> None:
        exchange_keeper(self._before)
        # Other processors since (a kernel switched off), whose calls may not be marked: it is looked at anew.
        if self._block is not None and _MARKED.get(self._block) != self._calls:
            _MARKED.pop(self._block, None)


def _all_contexts(block: nn.Module) -> tuple["_WithNotes", AbstractContextManager[Any]]:
    """Return contexts in which every op runs under dispatch modes; the first notes whether calls are marked."""
    notes = _WithNotes(block)
    notes.mode, handing_out = create_selective_checkpoint_contexts(notes.policy)
    return notes, handing_out


class _WithNotes:
    """Keeps what attention returns, called from wherever, and notes whether it was called where that is marked."""

    mode: AbstractContextManager[Any]

    def __init__(self, block: nn.Module) -> None:
        self._block, self._calls = block, 0
        self._is_inside = self._missed = False

    def policy(self, context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return `_policy`'s answer."""
        found = _policy(context, op, *args, **kwargs)
        self._missed |= found is CheckpointPolicy.MUST_SAVE and not self._is_inside
        return found

    @contextmanager
    def attention_call(self) -> Iterator[None]:
        """Note what is kept within as of a marked call."""
        self._calls, self._is_inside = self._calls + 1, True
        try:
            yield
        finally:
            self._is_inside = False

    def __enter__(self) -> None:
        self._before = exchange_keeper(self)
        self.mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.mode.__exit__(*raised)
        exchange_keeper(self._before)
        if not self._missed and raised[0] is None:
            _MARKED[self._block] = self._calls


def _policy(_context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = keeps_outputs(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


BLOCK_CALLERS: dict[Mode, Callable[..., Any] | None] = {
    "none": None,
    "selective": _selectively,
    "full": _fully,
}
"""The value that `call_blocks_by` takes for each mode."""
