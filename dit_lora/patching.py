"""Check the types of objects from optional packages, and wrap their methods temporarily."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def is_instance_of(value: object, class_path: str) -> bool:
    """True if a value is an instance of the class named `module:Class`, whose package may not be installed.

    Nothing is imported: a class whose module is not imported has no instances.
    """
    module, _, name = class_path.partition(":")
    # None if nobody has imported the module.
    made_by = sys.modules.get(module)
    return made_by is not None and isinstance(value, getattr(made_by, name))


class Patches:
    """Replaces methods of other objects. `undo` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap_method(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `owner.name(...)` with `wrapper(original, ...)`."""
        instance_attribute, original = vars(owner).get(name), getattr(owner, name)

        # `wraps` keeps the attributes that torch's schedulers set on `optimizer.step`.
        @functools.wraps(original)
        def call_wrapper(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        def restore_original_method() -> None:
            if instance_attribute:
                setattr(owner, name, instance_attribute)
            else:  # deleting our attribute makes the method of the class visible again
                delattr(owner, name)

        setattr(owner, name, call_wrapper)
        # Undone in reverse order: an object may be patched several times.
        self._undo.append(restore_original_method)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
