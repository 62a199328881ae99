"""The precision policy: which dtype a run computes in, and why."""

from typing import NamedTuple

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Precision(NamedTuple):
    """The dtype of frozen weights and compute. Trainable weights are always fp32."""

    dtype: torch.dtype
    reason: str

    @property
    def mixed_precision(self) -> str:
        """Accelerate's `mixed_precision` for this dtype: only Accelerate enables autocast."""
        return "bf16" if self.dtype is torch.bfloat16 else "no"


def choose_precision(requested: str, device: torch.device) -> Precision:
    """Choose the dtype for `model.dtype`. `auto` is bf16 if the device computes in bf16 natively, else fp32."""
    if requested != "auto":
        return Precision(DTYPES[requested], f"asked for by model.dtype={requested}")
    # PyTorch emulates bf16 on older GPUs, which this excludes.
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision(torch.bfloat16, "this GPU computes in bf16")
    if device.type == "cpu":
        return Precision(torch.float32, "without bf16 instructions a CPU is 10 to 70 times slower in bf16")
    return Precision(torch.float32, f"this {device.type} device does not compute in bf16")
