"""Tells who wants to know of the outermost calls of modules: those that a loop makes, and not one module of another.

While anybody listens, every such call passes by here; while nobody does, none.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from dit_lora.guard.attach.accelerator_adapter import bare_model
from dit_lora.guard.attach.call_recorder import is_recorded, is_redirected

Listener = Callable[[nn.Module], AbstractContextManager[None]]
"""Gives what holds around the call of a module that may be a part of a training step."""

_CALL = nn.Module.__call__
_listeners: list["weakref.WeakMethod[Listener]"] = []
"""Methods of those that listen; who is gone has left."""
_inside: list[nn.Module] = []
"""The module whose outermost call is under way."""


def listen(listener: Listener) -> None:
    """Tell the listener of every outermost call from now on."""
    if listener not in _present():
        _listeners.append(weakref.WeakMethod(listener))
    if not _inside:
        _stand_in(_called)


def leave(listener: Listener) -> None:
    """Tell the listener of no call any more."""
    _listeners[:] = [one for one in _listeners if one() not in (None, listener)]
    if not _listeners:
        _stand_in(_CALL)


def _present() -> list[Listener]:
    return [listener for one in _listeners if (listener := one()) is not None]


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Wrappers such as DDP are entered: a replay calls what is in them.
    if not is_recorded() or bare_model(module) is not module or is_redirected(module):
        return _CALL(module, *args, **kwargs)
    # What is called within is not looked at, and a compiler that reads it meets nothing of ours.
    _stand_in(_CALL)
    _inside.append(module)
    told: list[Listener] = []
    try:
        with ExitStack() as around:
            # One may bring another, which is to know of this call too.
            while news := [one for one in _present() if one not in told]:
                for listener in news:
                    told.append(listener)
                    around.enter_context(listener(module))
            return _CALL(module, *args, **kwargs)
    finally:
        _inside.clear()
        if _present():
            _stand_in(_called)


def _stand_in(call: Callable[..., Any]) -> None:
    setattr(nn.Module, "__call__", call)  # noqa: B010  mypy takes no assignment to a method
