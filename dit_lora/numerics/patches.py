"""Methods of somebody else's objects, wrapped for a while."""

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Wrapped methods, in the order in which they were wrapped; `undo` gives all of them back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call `wrapper(original, ...)` in place of `owner.name(...)`."""
        own, original = vars(owner).get(name), getattr(owner, name)

        # With the marks that torch's schedulers leave on `optimizer.step`.
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(lambda: setattr(owner, name, own) if own else delattr(owner, name))

    def gated_step(self, owner: Any, is_shut: Callable[[], bool]) -> None:
        """Let `owner.step` do nothing while the gate is shut, by a class of its own.

        Not by an attribute: a scheduler's state_dict holds all of its attributes, and must be picklable.
        """
        own = type(owner)

        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            return None if is_shut() else own.step(this, *args, **kwargs)

        owner.__class__ = type(own.__name__, (own,), {"step": step})
        self._undo.append(lambda: setattr(owner, "__class__", own))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
