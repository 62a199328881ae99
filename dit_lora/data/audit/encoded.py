"""Encoded clips and captions judged: not finite, beyond their range, or unlike the rest of the set.

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
from dit_lora.data.cache import MAX_ABS
from dit_lora.errors import DitLoraError
from dit_lora.numerics.finite import describe_bad, has_values

LOGVAR_RANGE = (-30.0, 20.0)
"""Diffusers clamps a posterior's logvar to it (`DiagonalGaussianDistribution`): beyond it, it is none."""
OUTLIER = 10.0
"""Robust standard deviations (1.4826 MAD) from the set's median at which a sample is named. The statistics of
real clips have heavy tails, and each sample has dozens of them: the customary 3.5 would name every tenth."""
LEAST_FACTOR = 2.0
"""A scale is no outlier below this many times the median, however alike the other samples are."""
LEAST_SHIFT = 1.0
"""A channel's mean is no outlier within this many of its own standard deviations of the median."""
LEAST_LOGVAR = 2 * math.log(LEAST_FACTOR**3)
"""The same for a logvar: eight times the posterior's standard deviation. It is most of it at a clamp or far off."""
LEAST_SAMPLES = 5
"""Below it, a median and its deviations say too little of a set."""
CHANNELS = 128
"""Statistics of each sample are kept by channel up to this many, which latents have, and else over all of them."""
_TINY = torch.finfo(torch.float32).tiny

Kind = Literal["latent", "logvar", "embedding"]
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Stats:
    """One tensor's values over the set, fp64, and a few numbers of each sample."""

    name: str
    kind: Kind
    values: int = 0
    """Per channel."""
    abs_max: float = 0.0
    abs_max_sample: str = ""
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """(C,)"""
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Sums of squared distances from the mean, (C,)."""
    samples: list[str] = field(default_factory=list)
    rows: array = field(default_factory=lambda: array("f"))
    """A sample after the other: its largest magnitude (of a logvar, its largest value), means and standard
    deviations, each of the latter (C,) or (1,)."""

    @property
    def std(self) -> torch.Tensor:
        """Of the population, (C,)."""
        return (self.squares / max(1, self.values)).sqrt()

    def add(self, sample: str, tensor: torch.Tensor) -> None:
        """Take in one sample whose values are finite; raises for another number of channels."""
        values_CN = _by_channel(tensor, self.kind).double()
        channels, count = values_CN.shape
        squares, mean = torch.var_mean(values_CN, dim=1, correction=0)
        squares = squares * count
        if not self.samples:
            self.mean, self.squares = torch.zeros_like(mean), torch.zeros_like(mean)
        if channels != len(self.mean):
            raise DitLoraError(
                f"{self.name} of {sample} has {channels} channels, and of the samples before it "
                f"{len(self.mean)}: give the encodings of one model"
            )
        # Chan, Golub and LeVeque 1979, eq. 2.1: exact for any sizes, with no sum of squares to cancel.
        total, shift = self.values + count, mean - self.mean
        self.squares += squares + shift.square() * (self.values * count / total)
        self.mean += shift * (count / total)
        self.values = total
        largest = float(values_CN.abs().max())
        if largest > self.abs_max or not self.samples:
            self.abs_max, self.abs_max_sample = largest, sample
        if channels > CHANNELS:
            whole, mean = torch.var_mean(values_CN, correction=0)
            squares, mean, count = whole.reshape(1), mean.reshape(1), 1
        self.samples.append(sample)
        self.rows.append(float(values_CN.max()) if self.kind == "logvar" else largest)
        self.rows.extend(mean.tolist())
        self.rows.extend((squares / count).sqrt().tolist())

    def outliers(self) -> Iterator[tuple[str, Finding]]:
        """Samples that stand out from the others, each with its worst statistic."""
        if len(self.samples) < LEAST_SAMPLES:
            return
        rows = torch.frombuffer(self.rows, dtype=torch.float32).double()
        top, means, stds = _split(rows.reshape(len(self.samples), -1))
        if self.kind == "logvar":
            parts = [
                _Statistic("largest value", top, LEAST_LOGVAR),
                _Statistic("mean", means, LEAST_LOGVAR),
            ]
        else:
            factor = math.log(LEAST_FACTOR)
            parts = [
                _Statistic("largest magnitude", _log(top), factor, log=True),
                _Statistic("mean", means, LEAST_SHIFT, _median(stds).clamp(min=_TINY)),
                _Statistic("standard deviation", _log(stds), factor, log=True),
            ]
        scores = [part.scores() for part in parts]
        found = torch.cat(scores, dim=1).amax(dim=1) > OUTLIER
        code = "embedding_outlier" if self.kind == "embedding" else "latent_outlier"
        for row in torch.nonzero(found).flatten().tolist():
            worst = max(range(len(parts)), key=lambda index: float(scores[index][row].max()))
            count = sum(int((score[row] > OUTLIER).sum()) for score in scores)
            more = f", and {count - 1} more of its statistics" if count > 1 else ""
            words = f"{self.name}: {parts[worst].words(row, scores[worst][row])}{more}"
            remedy = "look at the clip" if self.kind != "embedding" else "look at the caption"
            yield (
                self.samples[row],
                Finding(code, words, "warn", f"{remedy}; keep it if it is meant"),
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: mean and standard deviation by channel over the set."""
        return {
            "kind": self.kind,
            "samples": len(self.samples),
            "values_per_channel": self.values,
            "abs_max": self.abs_max,
            "abs_max_file": self.abs_max_sample,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }


@dataclass(frozen=True)
class _Statistic:
    """One statistic of every sample and channel, (samples, C), on the scale that it is compared on."""

    name: str
    values: torch.Tensor
    least: float
    """In units of `unit`."""
    unit: torch.Tensor | float = 1.0
    """(1, C)"""
    log: bool = False

    def scores(self) -> torch.Tensor:
        """Robust deviations from the median, 0 where the distance is below `least`."""
        away = (self.values - _median(self.values)).abs() / self.unit
        spread = 1.4826 * _median(away)
        # In a small set some channel's spread is small by chance; that of the other channels bounds it.
        spread = torch.maximum(spread, spread.median()).clamp(min=_TINY)
        return torch.where(away > self.least, away / spread, torch.zeros_like(away))

    def words(self, row: int, scores: torch.Tensor) -> str:
        channel = int(scores.argmax())
        where = f" of channel {channel}" if self.values.shape[1] > 1 else ""
        pair = torch.stack([self.values[row, channel], _median(self.values)[0, channel]])
        if self.log:
            pair = torch.where(pair > math.log(_TINY), pair.exp(), 0.0)
        value, usual = pair.tolist()
        return f"the {self.name}{where} is {value:.3g}, and {usual:.3g} in the median sample"


def check_encoded(
    samples: Iterable[tuple[str, Tensors]],
) -> tuple[dict[str, list[Finding]], dict[str, Any]]:
    """Findings by sample id, and each tensor's statistics over the set (`Stats.as_dict`).

    Holds one sample at a time and at most 257 floats a tensor of each. What is rejected does not count in the
    statistics. Tensors without floating-point values, such as masks, are passed over.
    """
    found: dict[str, list[Finding]] = {}
    stats: dict[str, Stats] = {}
    for sample, tensors in samples:
        for name, tensor in tensors.items():
            if not has_values(tensor):
                continue
            bad = _unusable(name, tensor)
            if bad:
                found.setdefault(sample, []).append(bad)
            else:
                stats.setdefault(name, Stats(name, _kind(name))).add(sample, tensor)
    for one in stats.values():
        for sample, finding in one.outliers():
            found.setdefault(sample, []).append(finding)
    return found, {name: one.as_dict() for name, one in stats.items()}


def _kind(name: str) -> Kind:
    """By the names that the families' encoders give."""
    if name.endswith("logvar"):
        return "logvar"
    return "latent" if "latent" in name else "embedding"


def _unusable(name: str, tensor: torch.Tensor) -> Finding | None:
    part = "embedding" if _kind(name) == "embedding" else "latent"
    of = "caption" if part == "embedding" else "clip"
    remedy = f"look at the {of}; encode it in fp32 or bf16, or remove the sample"
    words = describe_bad(name, tensor)
    if words:
        return Finding(f"{part}_non_finite", words, "reject", remedy)
    words = describe_bad(name, tensor, MAX_ABS)
    low, high = float(tensor.min()), float(tensor.max())
    if not words and _kind(name) == "logvar" and (low < LOGVAR_RANGE[0] or high > LOGVAR_RANGE[1]):
        words = f"{name} reaches from {low:.3g} to {high:.3g}, beyond {LOGVAR_RANGE}"
    return Finding(f"{part}_out_of_range", words, "reject", remedy) if words else None


def _by_channel(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
    """(C, N)"""
    tensor = tensor.detach().cpu()
    if kind == "embedding" or tensor.ndim < 3:
        return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).T
    return tensor.movedim(max(0, tensor.ndim - 4), 0).flatten(1)


def _split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest, (samples, 1), and the means and standard deviations, each (samples, C)."""
    channels = rows.shape[1] // 2
    return rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]


def _median(values: torch.Tensor) -> torch.Tensor:
    """Over the samples, (1, C)."""
    return values.median(dim=0, keepdim=True).values


def _log(values: torch.Tensor) -> torch.Tensor:
    """Of a scale; that of a constant is 0."""
    return values.clamp(min=_TINY).log()
