"""Check the types of objects from optional packages, and wrap their methods temporarily."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Like `owner.__class__ = other`, but also works for classes of Accelerate that define a property `__class__`.
_SET_CLASS = vars(object)["__class__"].__set__


def is_instance_of(value: object, class_path: str) -> bool:
    """True if a value is an instance of the class named `module:Class`, whose package may not be installed.

    Nothing is imported: a class whose module is not imported has no instances.
    """
    module, _, name = class_path.partition(":")
    # None if nobody has imported the module.
    made_by = sys.modules.get(module)
    return made_by is not None and isinstance(value, getattr(made_by, name))


class Patches:
    """Replaces methods and attributes of other objects. `undo` restores them, the last one first."""

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

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that the object does not have itself; `undo` deletes it."""
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name))

    def skip_step_while(self, owner: Any, is_closed: Callable[[], bool]) -> None:
        """Make `owner.step` do nothing while `is_closed()` is true, by swapping in a subclass.

        An attribute would not do: a scheduler's state_dict contains all of its attributes, and must be picklable.
        """
        original_class = type(owner)

        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            return None if is_closed() else original_class.step(this, *args, **kwargs)

        # A subclass with the same name, so that isinstance and the class name stay the same.
        owner.__class__ = type(original_class.__name__, (original_class,), {"step": step})
        self._undo.append(lambda: setattr(owner, "__class__", original_class))

    def wrap_iteration(self, owner: Any, wrapper: Callable[[Iterator[Any]], Iterator[Any]]) -> bool:
        """Wrap `owner.__iter__` by swapping in a subclass. Returns False if the owner's class cannot be replaced."""
        original_class = type(owner)

        def iterate_wrapped(this: Any) -> Iterator[Any]:
            return wrapper(original_class.__iter__(this))

        try:
            _SET_CLASS(owner, type(original_class.__name__, (original_class,), {"__iter__": iterate_wrapped}))
        except TypeError:  # a list of batches, say
            return False
        self._undo.append(lambda: _SET_CLASS(owner, original_class))
        return True

    def add_hook_handle(self, handle: Any) -> None:
        """Register a PyTorch hook's handle, so that `undo` removes the hook."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
