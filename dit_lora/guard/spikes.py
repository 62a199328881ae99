"""Find spikes: values far above the recent values of their series, by median and MAD, which are robust to outliers."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from dit_lora.errors import DitLoraError

# The median absolute deviation of a normal distribution is its standard deviation / 1.4826: 1 / Phi^-1(3/4).
_MAD_TO_DEVIATION = 1.4826
# Minimum MAD as a fraction of the median, so that rounding in a constant series is not a spike.
_MIN_RELATIVE_MAD = 1e-3


@dataclass(frozen=True)
class Spike:
    """A value of a monitored series above its limit, or not finite, with the statistics it was compared with."""

    name: str
    value: float
    median: float
    mad: float
    """The median absolute deviation scaled to a standard deviation, or its floor: the unit of `threshold`."""
    threshold: float
    count: int
    """Number of values that the median was computed from."""

    @property
    def message(self) -> str:
        """Describe a spike: `grad_norm 31.2 is 14.1 MAD above its median 1.22 over 200 steps`."""
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
    """Compares each value of a named series with the `window` healthy values before it; series are independent.

    A spike exceeds median + `threshold` x 1.4826 x MAD. Nothing is reported before `warm_up` values are known. A spike
    is not healthy, so it does not raise the limit; but `warm_up` spikes in a row become the series' new level. The
    state depends only on the observed values and their order.
    """

    def __init__(self, *, window: int, threshold: float, warm_up: int = 20) -> None:
        if not 1 <= warm_up <= window:
            limits = f"warm_up {warm_up}, window {window}"
            raise DitLoraError(f"warm_up must be between 1 and window; got {limits}")
        self._window, self._threshold, self._warm_up = window, threshold, warm_up
        self._series: dict[str, _Series] = {}

    def add_value_and_detect(self, name: str, value: float) -> Spike | None:
        """Add the next value of a series; returns a spike if it is one, else None.

        A value that is not finite is a spike and is not stored, so it neither raises a limit nor counts towards a new
        level.
        """
        series = self._series.setdefault(name, _Series(deque(maxlen=self._window)))
        level = self._compute_median_and_mad(series)
        spike = None
        # `not <=`, since NaN is not greater than anything.
        if level is not None and not value <= self._compute_limit(*level):
            spike = Spike(name, value, *level, self._threshold, len(series.healthy))
        # NaN and Inf would spoil the median for the whole window.
        if not math.isfinite(value):
            return spike
        if spike is None:
            series.spikes.clear()
            series.healthy.append(value)
            return None
        series.spikes.append(value)
        # This many in a row are not outliers: the series has a new level.
        if len(series.spikes) == self._warm_up:
            series.healthy = deque(series.spikes, maxlen=self._window)
            series.spikes.clear()
        return spike

    def clear_all_series(self) -> None:
        """Forget all values of all monitored series."""
        self._series.clear()

    def get_spike_limit(self, name: str) -> float | None:
        """Value above which a series' next value is a spike; None if that is not known yet."""
        series = self._series.get(name)
        level = self._compute_median_and_mad(series) if series else None
        return self._compute_limit(*level) if level else None

    def _compute_median_and_mad(self, series: _Series) -> tuple[float, float] | None:
        """Median and scaled MAD of a series; None in warm-up, or if most values are 0, which gives no scale."""
        if len(series.healthy) < self._warm_up:
            return None
        median = statistics.median(series.healthy)
        mad = statistics.median(abs(value - median) for value in series.healthy)
        # In units of a standard deviation. The minimum keeps rounding of a constant series from counting.
        scale = max(_MAD_TO_DEVIATION * mad, _MIN_RELATIVE_MAD * abs(median))
        return (median, scale) if scale else None

    def _compute_limit(self, median: float, mad: float) -> float:
        return median + self._threshold * mad
