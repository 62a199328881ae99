"""Check whether a checkpoint's stored dtype is compatible with the compute dtype."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from dit_lora.environment.safetensors_files import FLOAT_DTYPES, read_header
from dit_lora.guard.checks import CheckFinding
from dit_lora.numerics.finite import compute_headroom

_FP16_MAX = torch.finfo(torch.float16).max

# Names of floating-point dtypes in a safetensors header (safetensors, `Dtype`).
_SAFETENSORS_DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_stored_dtype(safetensors_files: Sequence[Path]) -> torch.dtype | None:
    """Floating-point dtype of most values in a checkpoint, read from the headers only; None if there is none."""
    counts: Counter[torch.dtype] = Counter()
    for file in safetensors_files:
        for tensor in read_header(file).tensors.values():
            # Integer tensors, such as position ids, do not count.
            if tensor.dtype in _SAFETENSORS_DTYPES:
                counts[_SAFETENSORS_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0] if counts else None


def check_stored_precision(
    stored: torch.dtype | None, compute: torch.dtype, peak: float | None, *, saturates: bool = False
) -> list[CheckFinding]:
    """Check whether a checkpoint stored in one dtype may be computed in another.

    `peak` is the largest magnitude of any module's output over a forward pass in `compute`, or None if not probed.
    Weights stored in fp16 were trained under its limit of 65,504. If activations exceed it, the network relies on a
    saturation that bf16 and fp32 do not have (Sana), unless `saturates`: the model emulates it
    (`numerics.saturation`).
    """
    check = "stored precision"
    summary = f"the weights are stored in {stored} and computed in {compute}"
    if stored is None:
        return [CheckFinding(check, True, "no floating weights are stored", fatal=False)]
    # Activations of bf16 and fp32 checkpoints may exceed fp16's range.
    if compute is torch.float16 and stored is not torch.float16:
        message = f"{summary}, whose limit of {_FP16_MAX:g} they were not trained for; use bf16 or fp32"
        return [CheckFinding(check, False, message, fatal=True)]
    # Only weights that were trained in fp16 may rely on values that saturate at its limit.
    if stored is not torch.float16 or compute is torch.float16:
        return [CheckFinding(check, True, summary, fatal=False)]
    if saturates:
        message = f"{summary}, with fp16's limit of {_FP16_MAX:g} repeated where the network relies on it"
        return [CheckFinding(check, True, message, fatal=False)]
    if peak is None:
        message = f"{summary}; whether activations stay within fp16's {_FP16_MAX:g} was not probed"
        return [CheckFinding(check, False, message, fatal=False)]
    margin = f"{compute_headroom(peak, torch.float16):.3g} times"
    if not peak <= _FP16_MAX:  # NaN is beyond
        message = (
            f"{summary}, and activations reach {peak:.3g}, beyond fp16's {_FP16_MAX:g}: the network was trained with "
            f"values that saturate there, which {compute} does not repeat, so it would compute another function; "
            f"clamp to +-{_FP16_MAX:g} where it did, or use a checkpoint published in bf16 or fp32"
        )
        return [CheckFinding(check, False, message, fatal=True)]
    message = f"{summary}; activations were probed on one batch and reach {peak:.3g}, {margin} below fp16's limit"
    is_coarser = compute is torch.bfloat16
    if is_coarser:
        message += "; bf16 rounds eight times more coarsely than the weights were trained with"
    return [CheckFinding(check, not is_coarser, message, fatal=False)]
