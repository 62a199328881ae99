"""Gradient checkpointing of a transformer's blocks: none, full, or selective (attention outputs are kept).

Diffusers' and Transformers' models have the same switch: a function through which each of their blocks is called.
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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dit_lora.errors import DitLoraError
from dit_lora.guard.fallbacks import CHECKPOINTING, Fallback
from dit_lora.numerics.attention_calls import swap_context_provider

CheckpointingMode = Literal["none", "selective", "full"]
CHECKPOINTING_MODES: tuple[CheckpointingMode, ...] = get_args(CheckpointingMode)
"""Modes from no recomputation to the largest memory saving."""

# Op names without their overload: PyTorch's fused attention, FlashAttention's forward ops under any namespace, and
# this package's linear attention.
_ATTENTION_OP_PATTERN = re.compile(
    r"aten::_scaled_dot_product_\w+"
    r"|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|\w*flash_attn\w*::(fwd|\w*_forward)"
    r"|dit_lora::relu_linear_attention"
)


@cache
def is_attention_op(op: OpOverload) -> bool:
    """True if an op is a fused attention forward: small outputs, many FLOPs."""
    name = op.name().partition(".")[0]
    return bool(_ATTENTION_OP_PATTERN.fullmatch(name)) and "backward" not in name


def should_keep_outputs(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if `selective` keeps the outputs of this op call: it is attention without dropout.

    With dropout, a kept call would not draw its random numbers again, and all later dropout would draw other numbers.
    """
    # The probability may come by keyword or by position; left out, it is 0.
    return is_attention_op(op) and not any(
        kwargs.get(name, args[position] if position < len(args) else 0)
        for position, name in _find_dropout_arguments(op)
    )


@cache
def _find_dropout_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the dropout probability argument of an attention op."""
    arguments = enumerate(op._schema.arguments)
    return tuple((position, a.name) for position, a in arguments if a.name in ("dropout_p", "p_dropout"))


def supports_checkpointing(transformer: nn.Module) -> bool:
    """True if Diffusers' or Transformers' gradient checkpointing works on this model."""
    # Transformers' models; one of them may still have no block that reads the switch.
    if getattr(transformer, "supports_gradient_checkpointing", False):
        return any(hasattr(module, "gradient_checkpointing") for module in transformer.modules())
    return bool(getattr(transformer, "_supports_gradient_checkpointing", False))


def set_block_caller(transformer: nn.Module, function: Callable[..., Any] | None) -> None:
    """Call the model's checkpointable blocks through `function(block, *inputs)`; None calls them directly.

    Transformers calls `function` only in training mode, and its `block` is a `functools.partial` with bound inputs.
    """
    # Transformers' models have `supports_gradient_checkpointing`, Diffusers' an underscored one.
    model: Any = transformer
    if not getattr(model, "supports_gradient_checkpointing", False):
        if function is None:
            model.disable_gradient_checkpointing()
        else:
            model.enable_gradient_checkpointing(function)
    # Not with `activation_checkpointing_enable`: it makes the outputs of frozen embeddings require gradients.
    elif function is None:
        model._set_gradient_checkpointing(enable=False)
    else:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


@contextmanager
def use_block_caller(transformer: nn.Module, function: Callable[..., Any] | None) -> Iterator[None]:
    """Call the blocks through `function` inside the context. Does nothing for a model without checkpointing."""
    if not supports_checkpointing(transformer):
        yield
        return
    set_block_caller(transformer, function)
    try:
        yield
    finally:
        set_block_caller(transformer, None)


def choose_least_memory_mode(transformer: nn.Module) -> CheckpointingMode:
    """The activation checkpointing mode that needs the least memory.

    It is `full`, or `none` for a model without checkpointing.
    """
    return "full" if supports_checkpointing(transformer) else "none"


def require_checkpointing(transformer: nn.Module, requested_mode: Literal["auto", CheckpointingMode]) -> None:
    """Raise `DitLoraError` if the mode needs gradient checkpointing and the model has none."""
    if requested_mode in ("selective", "full") and not supports_checkpointing(transformer):
        raise DitLoraError(
            f"train.checkpointing={requested_mode}: {type(transformer).__name__} has no gradient checkpointing; use "
            "auto or none"
        )


def set_checkpointing(transformer: nn.Module, mode: CheckpointingMode) -> None:
    """Checkpoint the model's blocks. Values, gradients and dropout stay bitwise the same.

    Raises `DitLoraError` as `require_checkpointing`.
    """
    require_checkpointing(transformer, mode)
    if supports_checkpointing(transformer):
        set_block_caller(transformer, BLOCK_CALLERS[mode])


def get_checkpointing_mode(transformer: nn.Module) -> CheckpointingMode:
    """The mode in which the model's blocks are checkpointed now."""
    # There is no public accessor: Diffusers and Transformers keep the function on each module.
    functions = [
        module.__dict__.get("_gradient_checkpointing_func")
        for module in transformer.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    if not functions:
        return "none"
    # One function for all blocks.
    return "selective" if _checkpoint_selectively in functions else "full"


def make_checkpointing_fallback(transformer: nn.Module) -> Fallback | None:
    """A fallback that turns gradient checkpointing off; None if the model does not use it."""
    if get_checkpointing_mode(transformer) == "none":
        return None
    return Fallback(
        CHECKPOINTING,
        "kernel",
        lambda: use_checkpointing_mode(transformer, "none"),
        lambda: set_checkpointing(transformer, "none"),
        "activations that are kept",
    )


@contextmanager
def use_checkpointing_mode(transformer: nn.Module, mode: CheckpointingMode) -> Iterator[None]:
    """Checkpoint the model's blocks in `mode` inside the context, and restore the previous mode afterwards."""
    before = get_checkpointing_mode(transformer)
    set_checkpointing(transformer, mode)
    try:
        yield
    finally:
        set_checkpointing(transformer, before)


def register_before_computation(block: nn.Module, function: Callable[[], None]) -> None:
    """Make `full` checkpointing call `function` before each computation of a block, including the recomputation.

    A forward pre-hook is not enough: Transformers recomputes a layer without its hooks.
    """
    block.__dict__[_BEFORE_COMPUTATION_KEY] = function


_BEFORE_COMPUTATION_KEY = "_dit_lora_before_computation"


def _checkpoint_fully(block: Callable[..., Any], *args: Any) -> Any:
    """Run a block; everything inside it is recomputed in the backward pass."""
    before: Callable[[], None] | None = getattr(find_called_block(block), _BEFORE_COMPUTATION_KEY, None)
    if before is None:
        return checkpoint(block, *args, use_reentrant=False)

    def compute(*args: Any) -> Any:
        before()
        return block(*args)

    # Offload uses this to bring a block's weights: Transformers recomputes a layer without its hooks.
    return checkpoint(compute, *args, use_reentrant=False)


def find_called_block(function: Callable[..., Any]) -> nn.Module | None:
    """The module behind a checkpointed function, as Diffusers and Transformers pass it; None if there is none."""
    candidates: list[Any] = [function]
    if isinstance(function, partial):
        # A partial of the layer's forward, with the layer first; in older versions of its bound `__call__`.
        candidates = [*function.args, getattr(function.func, "__self__", None)]
    return next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)


def _checkpoint_selectively(block: Callable[..., Any], *args: Any) -> Any:
    """Run a block; its attention outputs are kept, the rest is recomputed in the backward pass."""
    # The general way, for compiled blocks and unknown callables.
    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _choose_policy)
    module = find_called_block(block)
    if module is not None and not torch.compiler.is_compiling():
        # Once all attention calls of a block are known to be marked, cheaper contexts keep the same outputs.
        contexts = partial(
            _make_marked_contexts if module in _MARKED_CALL_COUNTS else _make_recording_contexts, module
        )
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


# Number of attention calls per block, for blocks in which every kept output is from a marked call.
_MARKED_CALL_COUNTS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _make_marked_contexts(block: nn.Module) -> tuple["_MarkedCallContext", "_MarkedCallContext"]:
    """Contexts for a forward and its recomputation in which only marked attention calls run under dispatch modes."""
    # The first keeps outputs in the forward pass, the second returns them in the recomputation.
    keeping, handing_out = create_selective_checkpoint_contexts(_choose_policy)
    return _MarkedCallContext(keeping, block), _MarkedCallContext(handing_out)


class _MarkedCallContext:
    """Runs each marked attention call inside it under a dispatch mode, and nothing else.

    A dispatch mode costs a Python call for each of a block's hundred ops, but only attention needs it.
    """

    def __init__(self, mode: TorchDispatchMode, block: nn.Module | None = None) -> None:
        self._mode, self._block, self._num_calls = mode, block, 0

    @contextmanager
    def attention_call(self) -> Iterator[None]:
        """Context that runs one attention call under the dispatch mode of selective checkpointing."""
        self._num_calls += 1
        # Not the mode's own `__enter__`: in a recomputation that resets the count of outputs handed out (torch 2.13).
        TorchDispatchMode.__enter__(self._mode)
        try:
            yield
        finally:
            self._mode.__exit__(None, None, None)

    def __enter__(self) -> None:
        self._previous_keeper = swap_context_provider(self)

    def __exit__(self, *_: object) -> None:
        swap_context_provider(self._previous_keeper)
        # Other processors, installed since (a kernel switched off), may be unmarked: examine the block again.
        if self._block is not None and _MARKED_CALL_COUNTS.get(self._block) != self._num_calls:
            _MARKED_CALL_COUNTS.pop(self._block, None)


def _make_recording_contexts(block: nn.Module) -> tuple["_RecordingContext", AbstractContextManager[Any]]:
    """Contexts in which every op runs under dispatch modes; the first records whether attention calls are marked."""
    notes = _RecordingContext(block)
    notes.save_context, handing_out = create_selective_checkpoint_contexts(notes.choose_policy)
    return notes, handing_out


class _RecordingContext:
    """Keeps attention outputs wherever attention is called, and records whether each call was marked."""

    save_context: AbstractContextManager[Any]

    def __init__(self, block: nn.Module) -> None:
        self._block, self._num_calls = block, 0
        self._is_in_call = self._has_unmarked_calls = False

    def choose_policy(self, context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decide whether selective checkpointing keeps an op's output.

        It is recorded if a kept output was outside a marked attention call.
        """
        decision = _choose_policy(context, op, *args, **kwargs)
        # The cheap contexts would not keep this output.
        self._has_unmarked_calls |= decision is CheckpointPolicy.MUST_SAVE and not self._is_in_call
        return decision

    @contextmanager
    def attention_call(self) -> Iterator[None]:
        """Context for a marked attention call; outputs kept in it belong to that call."""
        self._num_calls, self._is_in_call = self._num_calls + 1, True
        try:
            yield
        finally:
            self._is_in_call = False

    def __enter__(self) -> None:
        self._previous_keeper = swap_context_provider(self)
        self.save_context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.save_context.__exit__(*raised)
        swap_context_provider(self._previous_keeper)
        # Only a complete forward pass tells how many attention calls the block makes.
        if not self._has_unmarked_calls and raised[0] is None:
            _MARKED_CALL_COUNTS[self._block] = self._num_calls


def _choose_policy(_context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Everything that is not kept is recomputed in the backward pass.
    is_kept = should_keep_outputs(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


BLOCK_CALLERS: dict[CheckpointingMode, Callable[..., Any] | None] = {
    "none": None,
    "selective": _checkpoint_selectively,
    "full": _checkpoint_fully,
}
"""The function to pass to `set_block_caller` for each mode."""
