"""Triton's interpreter without what it does again at each launch and each call of a device function.

That is half of its time: a search for builtins, a patch of the language that is patched already, a table of dtypes.
"""

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """Return the names of a module's or class's builtins; which they are does not change."""
    return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def _patch_builtin(package: Any, *rest: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        # One that a kernel's call has patched already is no builtin until that call ends.
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, *rest)


_patched_modules: set[str] = set()
"""Modules whose device functions have been called."""


def _call_device_function(function: interpreter.InterpretedFunction[Any], *args: Any, **kwargs: Any) -> Any:
    """Call it in a running kernel, whose launch has patched `triton.language`.

    Triton's own device functions see `triton.language.core` instead; the interpreter never undoes that patch.
    """
    module = function.fn.__module__
    if module not in _patched_modules:
        _patched_modules.add(module)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


_get_np_dtype = interpreter._get_np_dtype
_get_np_dtype_of_number = functools.cache(_get_np_dtype)


def _find_np_dtype(dtype: Any) -> Any:
    """Look numpy's dtype up without building the table of all of them again."""
    scalar = dtype.scalar
    return _get_np_dtype(scalar) if scalar.is_ptr() else _get_np_dtype_of_number(scalar)


def install() -> None:
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins(package)  # now, while none is patched
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _find_np_dtype
    interpreter.InterpretedFunction.__call__ = _call_device_function
