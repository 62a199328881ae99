"""Checks of encoded clips and captions: not finite, out of range, or an outlier in the data set.

Shapes of one sample: latents (C, F, H, W) or (C, H, W), several encodings of a first image (K, C, F, H, W),
embeddings (T, D). C and D are channels. Samples may differ in every other size.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dit_lora.data.audit.finding import Finding
from dit_lora.data.cache.cache import MAX_ABS
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import can_hold_nonfinite, describe_bad_values

LOGVAR_RANGE = (-30.0, 20.0)
"""Range to which Diffusers clamps a posterior's logvar (`DiagonalGaussianDistribution`); others are invalid."""
MIN_OUTLIER_SCORE = 10.0
"""Distance from the median, in robust standard deviations (1.4826 MAD), above which a sample is an outlier.

Real clips have heavy tails, and each sample dozens of statistics: the usual 3.5 would report one sample in ten.
"""
MIN_FACTOR = 2.0
"""Ratio to the median below which a scale is never an outlier, however similar the other samples are."""
MIN_SHIFT = 1.0
"""Distance from the median, in standard deviations of the channel, below which a mean is never an outlier."""
MIN_LOGVAR_DISTANCE = 2 * math.log(MIN_FACTOR**3)
"""Distance from the median below which a logvar is no outlier: a factor of 8 in std. Many values are at the clamp."""
MIN_SAMPLES = 5
"""Minimum number of samples for a meaningful median and deviation."""
MAX_CHANNELS = 128
"""Maximum number of channels with separate statistics per sample, as for latents; above it, one for all channels."""
_TINY = torch.finfo(torch.float32).tiny

TensorKind = Literal["latent", "logvar", "embedding"]
Tensors = Mapping[str, torch.Tensor]


@dataclass
class TensorStats:
    """Statistics of one encoded tensor over the data set (fp64), and a few numbers of each sample (fp32)."""

    name: str
    kind: TensorKind
    num_values: int = 0
    """Number of values per channel."""
    abs_max: float = 0.0
    abs_max_sample: str = ""
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Mean over the set, (C,)."""
    squared_deviations: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Sums of squared distances from the mean, (C,)."""
    sample_ids: list[str] = field(default_factory=list)
    rows: array = field(default_factory=lambda: array("f"))
    """Per sample: the largest magnitude (of a logvar, the largest value), then means and stds, each (C,) or (1,)."""

    @property
    def std(self) -> torch.Tensor:
        """Population standard deviation of an encoded tensor over the data set, by channel, (C,)."""
        return (self.squared_deviations / max(1, self.num_values)).sqrt()

    def add(self, sample_id: str, tensor: torch.Tensor) -> None:
        """Add one sample's tensor to the statistics; raises `DitLoraError` if its number of channels differs."""
        # Accumulate in fp64: the set may have billions of values, and fp32 sums would lose digits.
        values_CN = _flatten_by_channel(tensor, self.kind).double()
        channels, count = values_CN.shape
        squares, mean = torch.var_mean(values_CN, dim=1, correction=0)
        squares = squares * count
        if not self.sample_ids:
            self.mean, self.squared_deviations = torch.zeros_like(mean), torch.zeros_like(mean)
        if channels != len(self.mean):
            raise DitLoraError(
                f"{self.name} of {sample_id} has {channels} channels, and of the samples before it "
                f"{len(self.mean)}: give the encodings of one model"
            )
        # Chan, Golub and LeVeque 1979, eq. 2.1: works for any sizes, and has no sum of squares that could cancel.
        total, shift = self.num_values + count, mean - self.mean
        self.squared_deviations += squares + shift.square() * (self.num_values * count / total)
        self.mean += shift * (count / total)
        self.num_values = total
        largest = float(values_CN.abs().max())
        if largest > self.abs_max or not self.sample_ids:
            self.abs_max, self.abs_max_sample = largest, sample_id
        # Above the limit, keep one mean and one deviation for the whole sample, so that memory stays bounded.
        if channels > MAX_CHANNELS:
            variance, mean = torch.var_mean(values_CN, correction=0)
            squares, mean, count = variance.reshape(1), mean.reshape(1), 1
        self.sample_ids.append(sample_id)
        self.rows.append(float(values_CN.max()) if self.kind == "logvar" else largest)
        self.rows.extend(mean.tolist())
        self.rows.extend((squares / count).sqrt().tolist())

    def find_outliers(self) -> Iterator[tuple[str, Finding]]:
        """Yield each sample whose tensor deviates from the others, with a finding about its worst statistic."""
        if len(self.sample_ids) < MIN_SAMPLES:
            return
        # (samples, 1 + 2 C): the largest value, C means, C standard deviations; C is 1 above `MAX_CHANNELS`.
        rows = torch.frombuffer(self.rows, dtype=torch.float32).double()
        top, channels = rows.reshape(len(self.sample_ids), -1).tensor_split([1], dim=1)
        means, stds = channels.chunk(2, dim=1)
        if self.kind == "logvar":
            parts = [
                _Statistic("largest value", top, MIN_LOGVAR_DISTANCE),
                _Statistic("mean", means, MIN_LOGVAR_DISTANCE),
            ]
        else:
            # Scales are compared by ratio, that is on a logarithmic scale.
            factor = math.log(MIN_FACTOR)
            parts = [
                _Statistic("largest magnitude", _log(top), factor, is_log=True),
                _Statistic("mean", means, MIN_SHIFT, _median(stds).clamp(min=_TINY)),
                _Statistic("standard deviation", _log(stds), factor, is_log=True),
            ]
        # One (samples, C) tensor for each statistic.
        scores = [part.compute_scores() for part in parts]
        is_outlier = torch.cat(scores, dim=1).amax(dim=1) > MIN_OUTLIER_SCORE
        code = "embedding_outlier" if self.kind == "embedding" else "latent_outlier"
        for row in torch.nonzero(is_outlier).flatten().tolist():
            # The message quotes the statistic with the highest score, and counts the others.
            worst = max(range(len(parts)), key=lambda index: float(scores[index][row].max()))
            count = sum(int((score[row] > MIN_OUTLIER_SCORE).sum()) for score in scores)
            more = f", and {count - 1} more of its statistics" if count > 1 else ""
            message = f"{self.name}: {parts[worst].describe(row, scores[worst][row])}{more}"
            remedy = "look at the clip" if self.kind != "embedding" else "look at the caption"
            yield (self.sample_ids[row], Finding(code, message, "warn", f"{remedy}; keep it if it is intended"))

    def as_dict(self) -> dict[str, Any]:
        """Convert the statistics of an encoded tensor to plain numbers for JSON, with mean and std by channel."""
        return {
            "kind": self.kind,
            "samples": len(self.sample_ids),
            "values_per_channel": self.num_values,
            "abs_max": self.abs_max,
            "abs_max_file": self.abs_max_sample,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }


@dataclass(frozen=True)
class _Statistic:
    """One statistic (such as the mean) of every sample and channel, (samples, C), on the scale used for comparison."""

    name: str
    values: torch.Tensor
    min_distance: float
    """Minimum distance of an outlier from the median, in units of `unit`."""
    unit: torch.Tensor | float = 1.0
    """Unit of distances, (1, C)."""
    is_log: bool = False

    def compute_scores(self) -> torch.Tensor:
        """Robust deviations of a statistic from its median, (samples, C); 0 if a distance is below `min_distance`."""
        distances = (self.values - _median(self.values)).abs() / self.unit
        # For a normal distribution, 1.4826 times the median absolute deviation equals the standard deviation.
        spread = 1.4826 * _median(distances)
        # In a small set the spread of one channel may be small by chance: use at least the channels' median spread.
        spread = torch.maximum(spread, spread.median()).clamp(min=_TINY)
        return torch.where(distances > self.min_distance, distances / spread, torch.zeros_like(distances))

    def describe(self, row: int, scores: torch.Tensor) -> str:
        """Message about the channel of one sample that deviates most in this statistic."""
        channel = int(scores.argmax())
        channel_text = f" of channel {channel}" if self.values.shape[1] > 1 else ""
        pair = torch.stack([self.values[row, channel], _median(self.values)[0, channel]])
        # Undo the logarithm, so that the message shows plain values; the smallest float stands for 0.
        if self.is_log:
            pair = torch.where(pair > math.log(_TINY), pair.exp(), 0.0)
        value, usual = pair.tolist()
        return f"the {self.name}{channel_text} is {value:.3g}, and {usual:.3g} in the median sample"


def check_encoded(samples: Iterable[tuple[str, Tensors]]) -> tuple[dict[str, list[Finding]], dict[str, Any]]:
    """Check the encodings of a whole data set for bad values and outliers.

    Holds one sample at a time, and keeps at most 257 floats per tensor and sample. Rejected tensors do not
    count in the statistics. Tensors without floating-point values, such as masks, are skipped.

    Returns:
        Findings by sample id, and the statistics of each tensor over the set (`TensorStats.as_dict`).
    """
    findings: dict[str, list[Finding]] = {}
    stats: dict[str, TensorStats] = {}
    for sample, tensors in samples:
        for name, tensor in tensors.items():
            if not can_hold_nonfinite(tensor):
                continue
            # A bad value would spoil the statistics of the whole set.
            bad = _check_values(name, tensor)
            if bad:
                findings.setdefault(sample, []).append(bad)
            else:
                stats.setdefault(name, TensorStats(name, _infer_kind(name))).add(sample, tensor)
    # Outliers are known only after all samples have been added.
    for tensor_stats in stats.values():
        for sample, finding in tensor_stats.find_outliers():
            findings.setdefault(sample, []).append(finding)
    return findings, {name: tensor_stats.as_dict() for name, tensor_stats in stats.items()}


def _infer_kind(name: str) -> TensorKind:
    """Guess the kind of an encoded tensor (latent, logvar or embedding) from its name."""
    if name.endswith("logvar"):
        return "logvar"
    return "latent" if "latent" in name else "embedding"


def _check_values(name: str, tensor: torch.Tensor) -> Finding | None:
    """Finding about an encoded tensor with non-finite or out-of-range values; None if it can be used."""
    part = "embedding" if _infer_kind(name) == "embedding" else "latent"
    subject = "caption" if part == "embedding" else "clip"
    remedy = f"look at the {subject}; encode it in fp32 or bf16, or remove the sample"
    message = describe_bad_values(name, tensor)
    if message:
        return Finding(f"{part}_non_finite", message, "reject", remedy)
    message = describe_bad_values(name, tensor, MAX_ABS)
    # A logvar has a narrower range than other tensors, so it is checked separately.
    low, high = float(tensor.min()), float(tensor.max())
    if not message and _infer_kind(name) == "logvar" and (low < LOGVAR_RANGE[0] or high > LOGVAR_RANGE[1]):
        message = f"{name} reaches from {low:.3g} to {high:.3g}, beyond {LOGVAR_RANGE}"
    return Finding(f"{part}_out_of_range", message, "reject", remedy) if message else None


def _flatten_by_channel(tensor: torch.Tensor, kind: TensorKind) -> torch.Tensor:
    """Reshape one sample's encoded tensor to (C, N): values by channel."""
    tensor = tensor.detach().cpu()
    # Embeddings have their channels last: (T, D) becomes (D, T).
    if kind == "embedding" or tensor.ndim < 3:
        return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).T
    # C is the first of the last four dimensions: (K, C, F, H, W), (C, F, H, W) or (C, H, W).
    return tensor.movedim(max(0, tensor.ndim - 4), 0).flatten(1)


def _median(values: torch.Tensor) -> torch.Tensor:
    """Median of a statistic over the samples, (1, C)."""
    return values.median(dim=0, keepdim=True).values


def _log(values: torch.Tensor) -> torch.Tensor:
    """Logarithm of scales for comparison; a scale of 0 counts as the smallest normal float."""
    return values.clamp(min=_TINY).log()
