"""Imports bitsandbytes without the kernel that its CPU build downloads from the Hub and runs on import.

bitsandbytes does so if the package `kernels` is installed and the CPU supports bf16, and warns if the package is
missing. PEFT and Diffusers import bitsandbytes whenever it is installed. The kernel is for 4-bit inference, which a
run never does.
"""

import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from dit_lora.environment.hub_kernels import hide_kernels_package

_MODULE = "bitsandbytes.backends.cpu.ops"


class _ImportFinder(MetaPathFinder):
    """Import finder that gives one module of bitsandbytes a different loader; it ignores all other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # None hands all other modules on to the next finder.
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _ImportLoader(spec.loader)
        return spec


class _ImportLoader(Loader):
    """Loader that executes a module while the package `kernels` looks as if it were not installed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # While the package is hidden, the module warns that it is missing. That is intended, so silence it.
        logger = logging.getLogger(_MODULE)
        was_disabled, logger.disabled = logger.disabled, True
        try:
            with hide_kernels_package():
                self._loader.exec_module(module)
        finally:
            logger.disabled = was_disabled


def hide_kernels_from_bitsandbytes() -> None:
    """Install the import finder that hides the package `kernels` from bitsandbytes, for the rest of the process.

    Calling it again has no effect.
    """
    # First in the list, so that it is asked before the standard finder.
    if not any(isinstance(finder, _ImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportFinder())
