"""Notify listeners of the outermost module calls: calls from the loop, not from another module.

While there are listeners, `nn.Module.__call__` is replaced; otherwise it is torch's.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.guard.attach.accelerator_adapter import unwrap_model
from dit_lora.guard.attach.calls.call_recorder import has_redirected_forward, is_training_call
from dit_lora.guard.attach.interception import exclude_from_dynamo


@dataclass
class OutermostCall:
    """A model call that no other model's call contains; `output` is set once the model has run."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


Listener = Callable[[OutermostCall], AbstractContextManager[None]]
"""Returns a context manager to enter around a call that may be part of a training step."""

_ORIGINAL_CALL = nn.Module.__call__
_listeners: list["weakref.WeakMethod[Listener]"] = []
"""Weak references to bound methods; a listener whose owner was deleted is ignored."""
_running_modules: list[nn.Module] = []
"""The module whose outermost call is running; empty outside a call."""


def add_listener(listener: Listener) -> None:
    """Register a listener for every model call that no other model's call contains."""
    if listener not in _list_listeners():
        _listeners.append(weakref.WeakMethod(listener))
    # While a call runs, torch's method stays in place until it ends.
    if not _running_modules:
        _set_module_call_method(_call_with_listeners)


def remove_listener(listener: Listener) -> None:
    _listeners[:] = [ref for ref in _listeners if ref() not in (None, listener)]
    if not _listeners:
        _set_module_call_method(_ORIGINAL_CALL)


def _list_listeners() -> list[Listener]:
    return [listener for ref in _listeners if (listener := ref()) is not None]


def _call_with_listeners(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # In a compiled function, dynamo would compile the listeners and the checks before them, which takes seconds. Leave
    # it only the module. `torch.compiler.disable` would import dynamo in every loop.
    set_dynamo_callback = torch._C._dynamo.eval_frame.set_eval_frame
    dynamo_callback = set_dynamo_callback(None)
    # Look inside wrappers such as DDP: a replay calls the module that they hold.
    if not is_training_call() or unwrap_model(module) is not module or has_redirected_forward(module):
        set_dynamo_callback(dynamo_callback)
        return _ORIGINAL_CALL(module, *args, **kwargs)
    # Restore torch's method for the modules inside: their calls are not outermost, and torch.compile must see it.
    _set_module_call_method(_ORIGINAL_CALL)
    _running_modules.append(module)
    call = OutermostCall(module, args, kwargs)
    notified: list[Listener] = []
    try:
        with ExitStack() as listener_contexts:
            # A listener may register another one, which is notified of this call too.
            while new_listeners := [listener for listener in _list_listeners() if listener not in notified]:
                for listener in new_listeners:
                    notified.append(listener)
                    listener_contexts.enter_context(listener(call))
            set_dynamo_callback(dynamo_callback)
            try:
                call.output = _ORIGINAL_CALL(module, *args, **kwargs)
            finally:
                set_dynamo_callback(None)
            return call.output
    finally:
        _running_modules.clear()
        if _list_listeners():
            _set_module_call_method(_call_with_listeners)
        set_dynamo_callback(dynamo_callback)


exclude_from_dynamo(_call_with_listeners)


def _set_module_call_method(call: Callable[..., Any]) -> None:
    setattr(nn.Module, "__call__", call)  # noqa: B010  mypy takes no assignment to a method
