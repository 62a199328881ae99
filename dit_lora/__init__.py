"""LoRA fine-tuning of diffusion transformers and video chat models that does not die of NaN."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dit_lora.version import __version__

if TYPE_CHECKING:
    from dit_lora.adapters.groups import parameter_groups
    from dit_lora.adapters.load import load_adapter
    from dit_lora.adapters.lora_mixins import with_lora
    from dit_lora.config.recovery_settings import LoopConfig, RecoveryConfig
    from dit_lora.fuse.api import fuse, unfuse
    from dit_lora.guard.attach.callbacks.lightning_callback import LightningGuard as LightningGuard
    from dit_lora.guard.attach.callbacks.trainer_callback import GuardCallback
    from dit_lora.guard.attach.guard import Guard

# LightningGuard is not among them: `import *` must not ask for Lightning.
__all__ = [
    "Guard",
    "GuardCallback",
    "LoopConfig",
    "RecoveryConfig",
    "__version__",
    "fuse",
    "load_adapter",
    "parameter_groups",
    "unfuse",
    "with_lora",
]

_MODULES = {
    "Guard": "dit_lora.guard.attach.guard",
    "GuardCallback": "dit_lora.guard.attach.callbacks.trainer_callback",
    "RecoveryConfig": "dit_lora.config.recovery_settings",
    "LoopConfig": "dit_lora.config.recovery_settings",
    "LightningGuard": "dit_lora.guard.attach.callbacks.lightning_callback",
    "fuse": "dit_lora.fuse.api",
    "unfuse": "dit_lora.fuse.api",
    "parameter_groups": "dit_lora.adapters.groups",
    "load_adapter": "dit_lora.adapters.load",
    "with_lora": "dit_lora.adapters.lora_mixins",
}


def __dir__() -> list[str]:
    return __all__


# Hidden from type checkers, which would take every misspelled name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # The earlier name of RecoveryConfig, accepted until version 0.3.
        if name == "LadderConfig":
            name = "RecoveryConfig"
        # Heavy imports happen at first use, so that `import dit_lora` is instant (PEP 562).
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'dit_lora' has no attribute {name!r}")
