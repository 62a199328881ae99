"""Intercept methods and functions without changing the objects that a loop owns.

Loops pickle, deep-copy, script and inspect their models and optimizers. An attribute or a hook on the object itself
would be copied too. So a method is replaced once on the class, by a function that looks up in a registry whether this
object is watched. Every other object of the class, including a deep copy, runs the original.
"""

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
Handler = Callable[..., Any]
"""Called as `handler(original, *args, **kwargs)`, where `original` is the bound method or the function.

A method of some object. It is held weakly: an interception ends with the object that it belongs to, and keeps neither
models nor optimizers alive that the loop has dropped.
"""


def exclude_from_dynamo(function: Callable[..., Any]) -> None:
    """Keep dynamo from compiling a function's own frame; the frames that it calls are compiled as usual."""
    # There is no public function for this; the name has changed between torch versions.
    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)


def run_uncompiled(function: Callable[[], _T]) -> _T:
    """Run code of the guard that dynamo must not compile, even when a compiled function has called it."""
    # `torch.compiler.disable` would import dynamo in every loop.
    set_dynamo_callback: Any = torch._C._dynamo.eval_frame.set_eval_frame
    callback = set_dynamo_callback(None)
    try:
        return function()
    finally:
        set_dynamo_callback(callback)


exclude_from_dynamo(run_uncompiled)


class _WeakHandler:
    """Weak reference to a bound method, like `weakref.WeakMethod` at a tenth of the cost per access."""

    __slots__ = ("function", "owner")

    def __init__(self, handler: Handler) -> None:
        method: Any = handler
        self.owner: weakref.ref[Any] = weakref.ref(method.__self__)
        self.function: Callable[..., Any] = method.__func__

    def references_handler(self, handler: Handler) -> bool:
        method: Any = handler
        return self.owner() is method.__self__ and self.function is method.__func__


class _ClassMethodPatch:
    """Replacement of one method of a class, for the objects in `handlers` only."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls = cls
        self.name = name
        self.handlers: dict[int, tuple[weakref.ref[Any], list[_WeakHandler]]] = {}
        """Object id to a weak reference and the handlers, outermost last."""
        # False for an inherited method, whose replacement is deleted afterwards and not restored.
        self._is_class_attribute = name in vars(cls)
        self._original = getattr(cls, name)
        self._replacement = self._make_replacement()
        setattr(cls, name, self._replacement)

    def _make_replacement(self) -> Callable[..., Any]:
        handlers = self.handlers
        is_compiling = torch.compiler.is_compiling
        original = self._original
        if not self._is_class_attribute:
            cls, name = self.cls, self.name

            # Look up an inherited method at each call: other code may replace it on the base class.
            def original(self: Any, *args: Any, **kwargs: Any) -> Any:
                return getattr(super(cls, self), name)(*args, **kwargs)

            exclude_from_dynamo(original)

        @functools.wraps(self._original)
        def call_with_handlers(self: Any, *args: Any, **kwargs: Any) -> Any:
            # dynamo evaluates is_compiling() to True, so that it traces only the original.
            if is_compiling():
                return original(self, *args, **kwargs)
            entry = handlers.get(id(self))
            if entry is None:
                return original(self, *args, **kwargs)
            call = functools.partial(original, self)
            # Each handler wraps those before it, so the one added last runs first.
            for handler in entry[1]:
                owner = handler.owner()
                if owner is not None:
                    call = functools.partial(handler.function, owner, call)
            return call(*args, **kwargs)

        # As the first frame of a compiled region, this frame runs uncompiled and the frames below it are compiled.
        exclude_from_dynamo(call_with_handlers)
        return call_with_handlers

    def add_handler(self, owner: Any, handler: Handler) -> None:
        key = id(owner)
        if key not in self.handlers:
            handlers = self.handlers

            # Ids are reused, so the entry must end with the object.
            def remove_entry(_ref: weakref.ref[Any]) -> None:
                handlers.pop(key, None)

            self.handlers[key] = (weakref.ref(owner, remove_entry), [])
        self.handlers[key][1].append(_WeakHandler(handler))

    def remove_handler(self, key: int, handler: Handler) -> None:
        entry = self.handlers.get(key)
        if entry is not None:
            # Handlers whose owner is gone are removed too.
            entry[1][:] = [h for h in entry[1] if h.owner() is not None and not h.references_handler(handler)]
            if not entry[1]:
                del self.handlers[key]
        # If other code has patched on top of this patch, leave it: it passes every call on.
        if self.handlers or vars(self.cls).get(self.name) is not self._replacement:
            return
        if self._is_class_attribute:
            setattr(self.cls, self.name, self._original)
        else:
            delattr(self.cls, self.name)
        _class_patches.pop((self.cls, self.name), None)


_class_patches: dict[tuple[type, str], _ClassMethodPatch] = {}


class MethodInterceptions:
    """The methods and functions that one guard intercepts; `restore_originals` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo_functions: list[Callable[[], None]] = []

    def intercept_method(self, owner: Any, name: str, handler: Handler) -> None:
        """Call `handler(original, ...)` instead of the method `owner.name(...)`, for this object only.

        If the object has an instance attribute of that name, as an optimizer has once a schedule was created for it,
        that attribute is replaced by a function with the same markers.
        """
        if name in vars(owner):
            self._intercept_attribute(owner, name, handler)
            return
        patch = _class_patches.get((type(owner), name))
        if patch is None:
            patch = _class_patches[type(owner), name] = _ClassMethodPatch(type(owner), name)
        patch.add_handler(owner, handler)
        key = id(owner)
        self._undo_functions.append(lambda: patch.remove_handler(key, handler))

    def intercept_function(self, holder: ModuleType | type, name: str, handler: Handler) -> None:
        """Call `handler(original, ...)` instead of a function of a module, or a method of all objects of a class."""
        is_defined, original = name in vars(holder), getattr(holder, name)
        is_compiling = torch.compiler.is_compiling
        # Once the handler's owner is gone, calls go to the original.
        weak_handler = _WeakHandler(handler)

        @functools.wraps(original)
        def call_handler(*args: Any, **kwargs: Any) -> Any:
            owner = None if is_compiling() else weak_handler.owner()
            if owner is None:
                return original(*args, **kwargs)
            return weak_handler.function(owner, original, *args, **kwargs)

        exclude_from_dynamo(call_handler)
        setattr(holder, name, call_handler)

        def restore_function() -> None:
            # Other code has replaced it since, and may call this replacement: leave it.
            if vars(holder).get(name) is not call_handler:
                return
            if is_defined:
                setattr(holder, name, original)
            else:
                delattr(holder, name)

        self._undo_functions.append(restore_function)

    def restore_originals(self) -> None:
        while self._undo_functions:
            # The newest first, so that nested replacements come off in the right order.
            self._undo_functions.pop()()

    def _intercept_attribute(self, owner: Any, name: str, handler: Handler) -> None:
        original = vars(owner)[name]
        handlers = [_WeakHandler(handler)]
        # Do not keep the object alive until `restore_originals`.
        owner_ref = weakref.ref(owner)

        # `functools.wraps` keeps the attributes that torch's schedules look for.
        @functools.wraps(original)
        def call_handler(*args: Any, **kwargs: Any) -> Any:
            live = handlers[0].owner() if handlers else None
            if live is None:
                return original(*args, **kwargs)
            return handlers[0].function(live, original, *args, **kwargs)

        setattr(owner, name, call_handler)

        def restore_attribute() -> None:
            handlers.clear()
            live = owner_ref()
            if live is not None and vars(live).get(name) is call_handler:
                setattr(live, name, original)

        self._undo_functions.append(restore_attribute)
