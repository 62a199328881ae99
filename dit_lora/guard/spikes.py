"""Spikes: values far above what their series has lately been, by median and MAD, which outliers do not move."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from dit_lora.errors import DitLoraError

# The median absolute deviation of a normal distribution is its standard deviation / 1.4826: 1 / Phi^-1(3/4).
_MAD_TO_DEVIATION = 1.4826
# A MAD is at least this share of the median, so that a constant series does not alarm on rounding.
_MAD_FLOOR = 1e-3


@dataclass(frozen=True)
class Spike:
    """One value above its series' limit, or not finite, and what it was judged by."""

    name: str
    value: float
    median: float
    mad: float
    """The median absolute deviation scaled to a standard deviation, or its floor: the unit of `threshold`."""
    threshold: float
    count: int
    """Number of values that the median is of."""

    @property
    def words(self) -> str:
        """The spike in words: `grad_norm 31.2 is 14.1 MAD above its median 1.22 over 200 steps`."""
        median = f"its median {self.median:.3g} over {self.count} steps"
        if not math.isfinite(self.value):
            return f"{self.name} is {self.value}; {median}"
        distance = (self.value - self.median) / self.mad
        return f"{self.name} {self.value:.3g} is {distance:.1f} MAD above {median}"


@dataclass
class _Series:
    healthy: deque[float]
    spikes: list[float] = field(default_factory=list)
    """The finite spikes since the last healthy value."""


class SpikeDetector:
    """Judges each value of a named series by the `window` healthy ones before it; series are independent.

    A spike exceeds median + `threshold` x 1.4826 x MAD. Nothing is judged before `warm_up` values are known.
    A spike is not healthy, so it does not raise the limit; but `warm_up` of them in a row are the series'
    new level. The state is a function of the values observed, in their order.
    """

    def __init__(self, *, window: int, threshold: float, warm_up: int = 20) -> None:
        if not 1 <= warm_up <= window:
            raise DitLoraError(
                f"warm_up must be from 1 to window, else nothing is ever judged; got warm_up {warm_up}, "
                f"window {window}"
            )
        self._window = window
        self._threshold = threshold
        self._warm_up = warm_up
        self._series: dict[str, _Series] = {}

    def observe(self, name: str, value: float) -> Spike | None:
        """Judge the next value of a series and remember it.

        One that is not finite is a spike and leaves no trace: it neither raises a limit nor is a level.
        """
        series = self._series.setdefault(name, _Series(deque(maxlen=self._window)))
        level = self._level(series)
        spike = None
        # `not <=`, since NaN is not greater than anything.
        if level is not None and not value <= self._limit(*level):
            spike = Spike(name, value, *level, self._threshold, len(series.healthy))
        if math.isfinite(value):
            self._remember(series, value, is_spike=spike is not None)
        return spike

    def forget(self) -> None:
        """Forget every series."""
        self._series.clear()

    def limit(self, name: str) -> float | None:
        """Return the value above which the next will be a spike; None while that is not known."""
        series = self._series.get(name)
        level = self._level(series) if series else None
        return self._limit(*level) if level else None

    def _remember(self, series: _Series, value: float, *, is_spike: bool) -> None:
        if not is_spike:
            series.spikes.clear()
            series.healthy.append(value)
            return
        series.spikes.append(value)
        # So many in a row are no accident: the series has moved.
        if len(series.spikes) == self._warm_up:
            series.healthy = deque(series.spikes, maxlen=self._window)
            series.spikes.clear()

    def _level(self, series: _Series) -> tuple[float, float] | None:
        """Return median and scaled MAD; None in warm-up, or if most values are 0, which gives no scale to judge by."""
        if len(series.healthy) < self._warm_up:
            return None
        median = statistics.median(series.healthy)
        mad = statistics.median(abs(value - median) for value in series.healthy)
        scale = max(_MAD_TO_DEVIATION * mad, _MAD_FLOOR * abs(median))
        return (median, scale) if scale else None

    def _limit(self, median: float, mad: float) -> float:
        return median + self._threshold * mad
