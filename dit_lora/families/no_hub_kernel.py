"""bitsandbytes without the kernel that its CPU build fetches from the Hub, and runs, as it is imported.

It does where the package `kernels` is installed and the CPU computes in bf16, whatever is imported it for: PEFT and
Diffusers import it wherever it is installed. Without the package, it warns. The kernel is for inference in 4 bits,
which a run does not do.
"""

import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from dit_lora.environment.hub_kernels import kernels_hidden

_MODULE = "bitsandbytes.backends.cpu.ops"


class _Finder(MetaPathFinder):
    """Finds the one module, and nothing of any other name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs the module as its own loader does, while `kernels` cannot be imported."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        logger = logging.getLogger(_MODULE)
        was_disabled, logger.disabled = logger.disabled, True
        try:
            with kernels_hidden():
                self._own.exec_module(module)
        finally:
            logger.disabled = was_disabled


def keep_from_hub() -> None:
    """Have it so for the rest of the process; done again, it changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
