"""Distinguish elements corrupted in memory from weights that a high learning rate has driven away.

A learning rate that is too high moves all elements of a tensor; a flipped bit moves one. So an element counts as
corrupted if it is far larger than the rest of its tensor, than the tensor's peak in the last snapshot, and than
tensors of the same kind.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from dit_lora.config.optimizers import collect_optimizer_names
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.finite import can_hold_nonfinite, read_scalars

_OUTLIER_FACTOR = 1e3
"""Factor over the largest other element. Gradient moments within a tensor differ by less."""
_NEGLIGIBLE_PEAK = 1e-30
"""Peaks up to this are ignored: they move no weight. Moments get this small if gradients vanish."""
_ELEMENTS_PER_OUTLIER = 200
"""At most one element in this many counts as corrupted, but always at least one per tensor."""


def describe_corrupted_tensors(
    current_tensors: Mapping[str, Tensor], snapshot_peaks: Mapping[str, float]
) -> list[str]:
    """Describe the tensors in which a few finite elements were corrupted in memory.

    Args:
        current_tensors: Weights, moments and averages by name.
        snapshot_peaks: Their peaks in the last snapshot; a name that is missing is compared only with the other
            tensors.
    """
    # Tensors with one element have no others to compare with.
    tensors = {
        name: get_local_tensor(tensor.detach())
        for name, tensor in current_tensors.items()
        if get_local_tensor(tensor).numel() > 1
    }
    peaks = read_scalars(compute_largest_magnitudes(tensors))
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for name, peak in peaks.items():
        kinds[_get_tensor_kind(name)].append(peak)
    # With only one or two tensors, a corrupted one would change the median itself.
    usual = {kind: median(sizes) if len(sizes) > 2 else 0.0 for kind, sizes in kinds.items()}
    squares = collect_optimizer_names(lambda record: record.squared_state)
    descriptions = []
    for name, peak in peaks.items():
        # Second moments are squares, and so is the factor between them.
        factor = _OUTLIER_FACTOR**2 if name.endswith(squares) else _OUTLIER_FACTOR
        reference = max(snapshot_peaks.get(name, 0.0), usual[_get_tensor_kind(name)])
        # NaN and Inf are skipped too: this is about finite values.
        if not max(factor * reference, _NEGLIGIBLE_PEAK) < peak < float("inf"):
            continue
        # From here on only for tensors with a suspicious peak: `topk` needs a pass over the whole tensor.
        magnitudes = tensors[name].abs().flatten().float()
        # If more than a few are large, it is not memory corruption.
        max_corrupted = max(1, len(magnitudes) // _ELEMENTS_PER_OUTLIER)
        # The largest element that remains if as many as may be corrupted are left out.
        largest_usual = float(magnitudes.topk(max_corrupted + 1).values[-1])
        if peak > factor * largest_usual:
            count = int((magnitudes > factor * max(largest_usual, reference)).sum())
            descriptions.append(
                f"{name}: {count} of {len(magnitudes)} elements reach {peak:.3g}, the others {largest_usual:.3g}"
            )
    return descriptions


def compute_largest_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest magnitude of each tensor: an fp32 scalar on its device, without a synchronization."""
    named = {
        name: get_local_tensor(tensor.detach())
        for name, tensor in tensors.items()
        if can_hold_nonfinite(tensor) and get_local_tensor(tensor).numel()
    }
    # One call for all tensors; the maximum norm cannot overflow.
    peaks = torch._foreach_norm(list(named.values()), float("inf")) if named else ()
    return {name: peak.float() for name, peak in zip(named, peaks, strict=True)}


def _get_tensor_kind(name: str) -> str:
    """Kind of a saved tensor, from its name: `ema`, `weight`, or a moment such as `exp_avg`.

    For example, `adapter/block.weight/exp_avg` is of kind `exp_avg`.
    """
    # A weight's average: what follows is the weight's name.
    if name.startswith("ema/"):
        return "ema"
    return name.rpartition("/")[2] if "/" in name else "weight"
