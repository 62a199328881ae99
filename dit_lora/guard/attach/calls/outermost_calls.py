"""Tell listeners of the outermost calls of modules: calls from the loop, not calls from another module.

While anybody listens, `nn.Module.__call__` is replaced; while nobody does, it is torch's own.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from dit_lora.guard.attach.accelerator_adapter import bare_model
from dit_lora.guard.attach.calls.call_recorder import is_recorded, is_redirected


@dataclass
class OutermostCall:
    """One call of a module by the loop; `output` is there once the module has run."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


Listener = Callable[[OutermostCall], AbstractContextManager[None]]
"""Gives what holds around a call that may be part of a training step."""

_CALL = nn.Module.__call__
_listeners: list["weakref.WeakMethod[Listener]"] = []
"""Bound methods of listeners; one whose owner is gone has left."""
_inside: list[nn.Module] = []
"""The module whose outermost call is under way."""


def listen(listener: Listener) -> None:
    """Tell the listener of every outermost call from now on."""
    if listener not in _present():
        _listeners.append(weakref.WeakMethod(listener))
    if not _inside:
        _set_call(_called)


def leave(listener: Listener) -> None:
    """Tell the listener of no further call."""
    _listeners[:] = [ref for ref in _listeners if ref() not in (None, listener)]
    if not _listeners:
        _set_call(_CALL)


def _present() -> list[Listener]:
    return [listener for ref in _listeners if (listener := ref()) is not None]


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Wrappers such as DDP are entered: a replay calls the module that they hold.
    if not is_recorded() or bare_model(module) is not module or is_redirected(module):
        return _CALL(module, *args, **kwargs)
    # Calls of modules inside this one are not looked at, and a compiler that reads them meets torch's own method.
    _set_call(_CALL)
    _inside.append(module)
    call = OutermostCall(module, args, kwargs)
    told: list[Listener] = []
    try:
        with ExitStack() as around:
            # A listener may add another one, which is told of this call too.
            while news := [listener for listener in _present() if listener not in told]:
                for listener in news:
                    told.append(listener)
                    around.enter_context(listener(call))
            call.output = _CALL(module, *args, **kwargs)
            return call.output
    finally:
        _inside.clear()
        if _present():
            _set_call(_called)


def _set_call(call: Callable[..., Any]) -> None:
    setattr(nn.Module, "__call__", call)  # noqa: B010  mypy takes no assignment to a method
