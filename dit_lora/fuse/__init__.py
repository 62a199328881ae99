"""Fused kernels in place of a model's own code: `dit_lora.fuse(model)`, or `from dit_lora.fuse import fuse`.

The package is callable, because its name is also the verb that users call.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dit_lora_kernels import Support, triton_support

if TYPE_CHECKING:
    from dit_lora.fuse.api import FuseReport, fuse, unfuse

__all__ = ["FuseReport", "fuse", "kernel_support", "unfuse"]


def kernel_support() -> Support:
    """Whether Triton kernels could run here, and why not."""
    return triton_support()


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> "FuseReport":
        from dit_lora.fuse.api import fuse

        return fuse(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name in ("FuseReport", "fuse", "unfuse"):
        from dit_lora.fuse import api

        return getattr(api, name)
    raise AttributeError(f"module 'dit_lora.fuse' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Callable
