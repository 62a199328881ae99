"""The guard: gate, replay, probe, diagnosis, policy, snapshots, monitor, parity and bundles.

`from dit_lora.guard import Guard` needs only torch, and guards any training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dit_lora.config.recovery_settings import LoopConfig, RecoveryConfig
    from dit_lora.guard.attach.callbacks.lightning_callback import LightningGuard as LightningGuard
    from dit_lora.guard.attach.callbacks.trainer_callback import GuardCallback
    from dit_lora.guard.attach.guard import Guard
    from dit_lora.guard.finite_gate import NonFiniteError

# LightningGuard is left out: `import *` must not import Lightning.
__all__ = ["Guard", "GuardCallback", "LoopConfig", "NonFiniteError", "RecoveryConfig"]

_LAZY_MODULES = {
    "Guard": "dit_lora.guard.attach.guard",
    "GuardCallback": "dit_lora.guard.attach.callbacks.trainer_callback",
    "RecoveryConfig": "dit_lora.config.recovery_settings",
    "LoopConfig": "dit_lora.config.recovery_settings",
    "LightningGuard": "dit_lora.guard.attach.callbacks.lightning_callback",
    "NonFiniteError": "dit_lora.guard.finite_gate",
}


# Hidden from type checkers, which would take every misspelled name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # The earlier name of RecoveryConfig, accepted until version 0.3.
        if name == "LadderConfig":
            name = "RecoveryConfig"
        # Imported on first use: the callback needs Transformers, and a run's guard needs none of these.
        if name in _LAZY_MODULES:
            return getattr(import_module(_LAZY_MODULES[name]), name)
        raise AttributeError(f"module 'dit_lora.guard' has no attribute {name!r}")
