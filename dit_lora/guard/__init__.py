"""The guard: gate, replay, probe, diagnosis, policy, snapshots, monitor, parity and bundles.

`from dit_lora.guard import Guard` needs torch alone, and guards any training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dit_lora.config.ladder import LadderConfig, LoopConfig
    from dit_lora.guard.attach.callbacks.lightning_callback import LightningGuard as LightningGuard
    from dit_lora.guard.attach.callbacks.trainer_callback import GuardCallback
    from dit_lora.guard.attach.guard import Guard
    from dit_lora.guard.gate import NonFiniteError

# LightningGuard is not among them: `import *` must not ask for Lightning.
__all__ = ["Guard", "GuardCallback", "LadderConfig", "LoopConfig", "NonFiniteError"]

_HOMES = {
    "Guard": "dit_lora.guard.attach.guard",
    "GuardCallback": "dit_lora.guard.attach.callbacks.trainer_callback",
    "LadderConfig": "dit_lora.config.ladder",
    "LoopConfig": "dit_lora.config.ladder",
    "LightningGuard": "dit_lora.guard.attach.callbacks.lightning_callback",
    "NonFiniteError": "dit_lora.guard.gate",
}


def __getattr__(name: str) -> Any:
    # At first use: the callback needs Transformers, and a run's guard has no use for the others.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dit_lora.guard' has no attribute {name!r}")
