"""Tells an element that memory has altered from weights that a learning rate has driven away.

A learning rate that is too high moves all elements of a tensor; a flipped bit moves one. So an element is taken as
altered where it is far beyond the rest of its own tensor, beyond what the tensor reached in the last snapshot, and
beyond what tensors of its kind reach.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from dit_lora.config.optimizers import of_all
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.finite import has_values, read_scalars

_FAR = 1e3
"""Factor beyond the largest of the others. Moments of gradients differ by less between elements of a tensor."""
_NOTHING = 1e-30
"""Peaks up to this move no weight. Vanishing gradients reach it, and some of their elements round to 0 earlier."""
_FEW = 200
"""At most one element in so many is taken as altered, and at least one of any tensor."""


def altered(now: Mapping[str, Tensor], before: Mapping[str, float]) -> list[str]:
    """Describe the tensors of which a few finite elements were altered.

    `now` are weights, moments and averages by name, `before` the `peaks` that they had in the last snapshot; a name
    that it lacks is compared with the others alone.
    """
    tensors = {n: local(t.detach()) for n, t in now.items() if local(t).numel() > 1}
    peaks = read_scalars(stacked_peaks(tensors))
    usual = _usual(peaks)
    squares = of_all(lambda record: record.squares)
    descriptions = []
    for name, peak in peaks.items():
        # Second moments are squares, and so is the factor between them.
        far = _FAR**2 if name.endswith(squares) else _FAR
        others = max(before.get(name, 0.0), usual[_kind(name)])
        if not max(far * others, _NOTHING) < peak < float("inf"):
            continue
        magnitudes = tensors[name].abs().flatten().float()
        # Where more than a few are large, memory has not done it.
        few = max(1, len(magnitudes) // _FEW)
        rest = float(magnitudes.topk(few + 1).values[-1])
        if peak > far * rest:
            count = int((magnitudes > far * max(rest, others)).sum())
            descriptions.append(
                f"{name}: {count} of {len(magnitudes)} elements reach {peak:.3g}, the others {rest:.3g}"
            )
    return descriptions


def stacked_peaks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor's largest magnitude, an fp32 scalar where the tensor is; the host reads nothing."""
    named = {n: local(t.detach()) for n, t in tensors.items() if has_values(t) and local(t).numel()}
    peaks = torch._foreach_norm(list(named.values()), float("inf")) if named else ()
    return {name: peak.float() for name, peak in zip(named, peaks, strict=True)}


def _kind(name: str) -> str:
    """Return what tells weights, averages and each moment apart in a name such as `adapter/block.weight/exp_avg`."""
    if name.startswith("ema/"):
        return "ema"
    return name.rpartition("/")[2] if "/" in name else "weight"


def _usual(peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the median of the largest magnitudes of each kind; of one tensor alone, nothing is usual."""
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for name, peak in peaks.items():
        kinds[_kind(name)].append(peak)
    return {kind: median(sizes) if len(sizes) > 2 else 0.0 for kind, sizes in kinds.items()}
