"""Triton's interpreter without its search for builtins at each device function call, 40 % of kernel tests' time."""

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


def install() -> None:
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins(package)  # now, while none is patched
    interpreter._patch_builtin = _patch_builtin
