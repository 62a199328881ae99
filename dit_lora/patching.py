"""Somebody else's objects: what they are, and their methods wrapped for a while."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

# As `owner.__class__ = other`, also where a class of Accelerate's hides its own behind a property of that name.
_SET_CLASS = vars(object)["__class__"].__set__


def is_a(value: object, class_path: str) -> bool:
    """Return True for an instance of a class, `module:Class`, of a package that may not be installed.

    Nothing is imported: what nobody has imported has no instances.
    """
    module, _, name = class_path.partition(":")
    made_by = sys.modules.get(module)
    return made_by is not None and isinstance(value, getattr(made_by, name))


class Patches:
    """Wrapped methods, in the order in which they were wrapped; `undo` gives all of them back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call `wrapper(original, ...)` in place of `owner.name(...)`."""
        instance_attribute, original = vars(owner).get(name), getattr(owner, name)

        # With the marks that torch's schedulers leave on `optimizer.step`.
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        def restore() -> None:
            if instance_attribute:
                setattr(owner, name, instance_attribute)
            else:  # the method was the class's alone, which deleting ours shows again
                delattr(owner, name)

        setattr(owner, name, wrapped)
        self._undo.append(restore)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that the owner has not of its own."""
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name))

    def gated_step(self, owner: Any, is_shut: Callable[[], bool]) -> None:
        """Let `owner.step` do nothing while the gate is shut, by a class of its own.

        Not by an attribute: a scheduler's state_dict holds all of its attributes, and must be picklable.
        """
        original_class = type(owner)

        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            return None if is_shut() else original_class.step(this, *args, **kwargs)

        # A subclass of its own class: whatever asks what it is gets the same answer.
        owner.__class__ = type(original_class.__name__, (original_class,), {"step": step})
        self._undo.append(lambda: setattr(owner, "__class__", original_class))

    def iterated(self, owner: Any, wrapper: Callable[[Iterator[Any]], Iterator[Any]]) -> bool:
        """Let `iter(owner)` give `wrapper(iterator)`, by a class of its own; False where its class is fixed."""
        original_class = type(owner)

        def iterate(this: Any) -> Iterator[Any]:
            return wrapper(original_class.__iter__(this))

        try:
            _SET_CLASS(
                owner, type(original_class.__name__, (original_class,), {"__iter__": iterate})
            )
        except TypeError:  # a list of batches, say
            return False
        self._undo.append(lambda: _SET_CLASS(owner, original_class))
        return True

    def handle(self, handle: Any) -> None:
        """Remove a hook with the rest."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
