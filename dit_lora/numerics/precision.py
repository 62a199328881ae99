"""The precision policy: which dtype a run computes in, and why."""

from typing import NamedTuple

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Precision(NamedTuple):
    """The dtype of frozen weights and compute; trainable weights are fp32 whatever it is."""

    dtype: torch.dtype
    reason: str

    @property
    def mixed(self) -> str:
        """Accelerate's name for it: the one owner of autocast is Accelerate."""
        return "bf16" if self.dtype is torch.bfloat16 else "no"


def choose_precision(asked: str, device: torch.device) -> Precision:
    """Return the dtype for `model.dtype` on a device: `auto` is bf16 where the device computes in it."""
    if asked != "auto":
        return Precision(DTYPES[asked], f"asked for by model.dtype={asked}")
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision(torch.bfloat16, "this GPU computes in bf16")
    if device.type == "cpu":
        return Precision(
            torch.float32, "without bf16 instructions a CPU is 10 to 70 times slower in bf16"
        )
    return Precision(torch.float32, f"this {device.type} device does not compute in bf16")
