"""Judges the dtype that a checkpoint is stored in beside the one that it is computed in."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dit_lora.errors import DitLoraError
from dit_lora.guard.checks import CheckFinding
from dit_lora.numerics.finite import headroom

_FP16_MAX = torch.finfo(torch.float16).max

# The names of floating dtypes in a safetensors header (safetensors, `Dtype`).
_STORED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def stored_dtype(safetensors_files: Sequence[Path]) -> torch.dtype | None:
    """Return the floating dtype that most values of a checkpoint are stored in, from the headers alone."""
    counts: Counter[torch.dtype] = Counter()
    for file in safetensors_files:
        for dtype, count in _stored_values(file):
            if dtype in _STORED:
                counts[_STORED[dtype]] += count
    return counts.most_common(1)[0][0] if counts else None


def stored_precision(
    stored: torch.dtype | None, compute: torch.dtype, peak: float | None, *, saturates: bool = False
) -> list[CheckFinding]:
    """Judge whether a checkpoint stored in one dtype may be computed in another.

    `peak` is the largest magnitude of any module's output over a forward pass in `compute`, if it was
    probed. Weights stored in fp16 were trained under its limit of 65,504: where activations go beyond, the
    network relies on a saturation that bf16 and fp32 do not have (Sana), unless `saturates`: the model
    repeats it (`numerics.saturation`).
    """
    check = "stored precision"
    what = f"the weights are stored in {stored} and computed in {compute}"
    if stored is None:
        return [CheckFinding(check, True, "no floating weights are stored", fatal=False)]
    if compute is torch.float16 and stored is not torch.float16:
        words = f"{what}, whose limit of {_FP16_MAX:g} they were not trained for; use bf16 or fp32"
        return [CheckFinding(check, False, words, fatal=True)]
    if stored is not torch.float16 or compute is torch.float16:
        return [CheckFinding(check, True, what, fatal=False)]
    if saturates:
        words = (
            f"{what}, with fp16's limit of {_FP16_MAX:g} repeated where the network relies on it"
        )
        return [CheckFinding(check, True, words, fatal=False)]
    if peak is None:
        words = f"{what}; whether activations stay within fp16's {_FP16_MAX:g} was not probed"
        return [CheckFinding(check, False, words, fatal=False)]
    room = f"{headroom(peak, torch.float16):.3g} times"
    if not peak <= _FP16_MAX:  # NaN is beyond
        words = (
            f"{what}, and activations reach {peak:.3g}, beyond fp16's {_FP16_MAX:g}: the network was "
            f"trained with values that saturate there, which {compute} does not repeat, so it would "
            f"compute another function; clamp to +-{_FP16_MAX:g} where it did, or use a checkpoint "
            "published in bf16 or fp32"
        )
        return [CheckFinding(check, False, words, fatal=True)]
    words = f"{what}; activations were probed on one batch and reach {peak:.3g}, {room} below fp16's limit"
    coarser = compute is torch.bfloat16
    if coarser:
        words += "; bf16 rounds eight times more coarsely than the weights were trained with"
    return [CheckFinding(check, not coarser, words, fatal=False)]


def _stored_values(file: Path) -> list[tuple[str, int]]:
    """Return the dtype in a safetensors header, and the number of values, of each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118  (it is no dict)
            return [(one.get_dtype(), math.prod(one.get_shape())) for one in slices]
    except (OSError, SafetensorError) as error:
        raise DitLoraError(f"cannot read the header of {file}: {error}; fetch it again") from error
