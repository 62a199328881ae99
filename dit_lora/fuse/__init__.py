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
    """Whether Triton kernels can run on this machine, and the reason if they cannot."""
    return triton_support()


class _CallableModule(ModuleType):
    """Module class whose modules can be called: calling the module `dit_lora.fuse` runs its function `fuse`."""

    def __call__(self, *args: Any, **kwargs: Any) -> "FuseReport":
        # Imported late, as in `__getattr__`: the api imports Diffusers, PEFT and Transformers.
        from dit_lora.fuse.api import fuse

        return fuse(*args, **kwargs)


# Hidden from type checkers, which would take every misspelled name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the functions that patch models on first use: their module imports Diffusers and Transformers."""
        if name in ("FuseReport", "fuse", "unfuse"):
            from dit_lora.fuse import api

            return getattr(api, name)
        raise AttributeError(f"module 'dit_lora.fuse' has no attribute {name!r}")


# Python looks `__call__` up on the class, and a module has no other way to have one: a function named `__call__` in it
# is not asked. `__class__` of a module may be assigned for this purpose.
sys.modules[__name__].__class__ = _CallableModule
