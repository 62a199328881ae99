"""Spikes in random series: healthy heavy tails, injected spikes, drift, shifts of level, NaN."""

import math
import random
import statistics
import time

import pytest

from dit_lora.errors import DitLoraError
from dit_lora.guard.spikes import Spike, SpikeDetector

NON_FINITE = [math.nan, math.inf, -math.inf]


def heavy_tailed(count: int, seed: int, *, median: float = 1.3, sigma: float = 0.3) -> list[float]:
    draws = random.Random(seed)
    return [median * draws.lognormvariate(0.0, sigma) for _ in range(count)]


def alarms(detector: SpikeDetector, values: list[float], name: str = "loss") -> list[int]:
    return [index for index, value in enumerate(values) if detector.add_value_and_detect(name, value)]


@pytest.fixture
def detector() -> SpikeDetector:
    return SpikeDetector(window=200, threshold=8)


@pytest.mark.parametrize("seed", range(4))
def test_healthy_heavy_tails_hardly_alarm(detector: SpikeDetector, seed: int) -> None:
    """Measured over 40 seeds of 5,000 values: 0.2 alarms on average, 2 at most."""
    assert len(alarms(detector, heavy_tailed(5000, seed))) <= 4


def test_every_injected_spike_is_found_and_nothing_else(detector: SpikeDetector) -> None:
    values = heavy_tailed(1000, 1)
    spike_steps = [20, 21, 300, 555, 556, 557, 999]
    for index in spike_steps:
        values[index] = 7.5
    assert alarms(detector, values) == spike_steps


def test_a_spike_says_by_what_it_was_judged(detector: SpikeDetector) -> None:
    values = heavy_tailed(350, 2)
    assert alarms(detector, values, "grad_norm") == []
    window = values[-200:]
    median = statistics.median(window)
    mad = 1.4826 * statistics.median(abs(value - median) for value in window)
    assert detector.get_spike_limit("grad_norm") == pytest.approx(median + 8 * mad, rel=1e-12)
    spike = detector.add_value_and_detect("grad_norm", 31.234)
    assert spike == Spike("grad_norm", 31.234, pytest.approx(median), pytest.approx(mad), 8, 200)


def test_the_words_of_a_spike_give_its_distance_and_its_past() -> None:
    spike = Spike("loss 0-249", 31.23, median=1.22, mad=2.128, threshold=8, count=187)
    assert spike.message == "loss 0-249 31.2 is 14.1 MAD above its median 1.22 over 187 steps"
    spike = Spike("grad_norm", math.nan, median=1.22, mad=2.128, threshold=8, count=20)
    assert spike.message == "grad_norm is nan; its median 1.22 over 20 steps"


def test_the_limit_is_where_spikes_begin(detector: SpikeDetector) -> None:
    alarms(detector, heavy_tailed(100, 3))
    limit = detector.get_spike_limit("loss")
    assert limit is not None
    spike = detector.add_value_and_detect("loss", math.nextafter(limit, math.inf))
    assert spike is not None
    assert detector.add_value_and_detect("loss", limit) is None


def test_a_value_far_below_is_no_spike(detector: SpikeDetector) -> None:
    alarms(detector, heavy_tailed(100, 4))
    assert detector.add_value_and_detect("loss", -50.0) is None
    assert detector.add_value_and_detect("loss", 1e-9) is None


def test_a_spike_does_not_raise_the_limit_and_a_healthy_value_moves_it(
    detector: SpikeDetector,
) -> None:
    alarms(detector, heavy_tailed(60, 5))
    limit = detector.get_spike_limit("loss")
    for _ in range(19):
        assert detector.add_value_and_detect("loss", 40.0)
        assert detector.get_spike_limit("loss") == limit
    assert detector.add_value_and_detect("loss", 3.1) is None
    assert detector.get_spike_limit("loss") != limit


def test_nothing_is_judged_before_warm_up() -> None:
    detector = SpikeDetector(window=50, threshold=8, warm_up=30)
    values = heavy_tailed(30, 6)
    assert detector.get_spike_limit("loss") is None
    for value in values[:29]:
        assert detector.add_value_and_detect("loss", value) is None
        assert detector.get_spike_limit("loss") is None
    assert detector.add_value_and_detect("loss", 900.0) is None
    assert detector.get_spike_limit("loss") is not None
    spike = detector.add_value_and_detect("loss", 900.0)
    assert spike is not None
    assert spike.count == 30


def test_a_slow_drift_is_followed(detector: SpikeDetector) -> None:
    """To tenfold within 2,000 values; measured: thirtyfold gives no alarm either."""
    values = heavy_tailed(2000, 7, sigma=0.1)
    assert alarms(detector, [10 ** (i / 2000) * value for i, value in enumerate(values)]) == []


def test_values_older_than_the_window_are_forgotten() -> None:
    detector, fresh_detector = (SpikeDetector(window=40, threshold=8) for _ in range(2))
    recent = heavy_tailed(40, 8)
    alarms(detector, heavy_tailed(100, 9, median=5.0))
    assert alarms(detector, recent) == alarms(fresh_detector, recent) == []
    assert detector.get_spike_limit("loss") == fresh_detector.get_spike_limit("loss")


def test_a_level_that_stays_is_adopted_after_warm_up_values(detector: SpikeDetector) -> None:
    alarms(detector, heavy_tailed(200, 10))
    higher = heavy_tailed(120, 11, median=60.0)
    assert alarms(detector, higher) == list(range(20))
    fresh_detector = SpikeDetector(window=200, threshold=8)
    alarms(fresh_detector, higher)
    assert detector.get_spike_limit("loss") == fresh_detector.get_spike_limit("loss")


def test_two_levels_one_right_after_the_other_are_both_adopted(detector: SpikeDetector) -> None:
    alarms(detector, heavy_tailed(200, 22))
    for median in (60.0, 3e3):
        level = [median * (1 + index / 500) for index in range(20)]
        assert alarms(detector, level) == list(range(20))
    assert alarms(detector, level) == []


def test_one_healthy_value_between_spikes_is_no_new_level(detector: SpikeDetector) -> None:
    alarms(detector, heavy_tailed(200, 12))
    values = [1.3 if index % 20 == 19 else 60.0 for index in range(100)]
    assert alarms(detector, values) == [i for i, value in enumerate(values) if value == 60.0]


@pytest.mark.parametrize("value", NON_FINITE[:2])
def test_a_value_that_is_not_finite_is_a_spike(detector: SpikeDetector, value: float) -> None:
    """NaN is not greater than a limit, and must not pass for that."""
    alarms(detector, heavy_tailed(50, 13))
    spike = detector.add_value_and_detect("loss", value)
    assert spike is not None
    assert f"loss is {value};" in spike.message


@pytest.mark.parametrize("value", NON_FINITE)
def test_a_value_that_is_not_finite_leaves_no_trace(value: float) -> None:
    """Neither in warm-up, nor in the window, nor as one of the spikes that make a new level."""
    detector, clean_detector = (SpikeDetector(window=200, threshold=8) for _ in range(2))
    values = [*heavy_tailed(60, 14), *heavy_tailed(30, 15, median=60.0)]
    for number in values:
        detector.add_value_and_detect("loss", value)
        assert detector.add_value_and_detect("loss", number) == clean_detector.add_value_and_detect("loss", number)
        assert detector.get_spike_limit("loss") == clean_detector.get_spike_limit("loss")


def test_a_constant_series_does_not_alarm_on_rounding(detector: SpikeDetector) -> None:
    constant = [0.7, math.nextafter(0.7, 1)] + [0.7] * 50
    assert alarms(detector, [*constant, 0.7 * (1 + 1e-6)]) == []
    assert detector.get_spike_limit("loss") == pytest.approx(0.7 * 1.008)
    assert detector.add_value_and_detect("loss", 0.71)


def test_a_series_of_zeros_gives_no_limit_to_clip_by(detector: SpikeDetector) -> None:
    assert alarms(detector, [0.0] * 40) == []
    assert detector.get_spike_limit("loss") is None
    assert detector.add_value_and_detect("loss", 0.4) is None
    assert detector.get_spike_limit("loss") is None
    assert alarms(detector, heavy_tailed(60, 16)) == []
    assert detector.get_spike_limit("loss") is not None


def test_series_are_judged_by_their_own_past(detector: SpikeDetector) -> None:
    low, high = heavy_tailed(80, 17), heavy_tailed(80, 18, median=90.0)
    for low_value, high_value in zip(low, high, strict=True):
        assert detector.add_value_and_detect("loss 0-249", low_value) is None
        assert detector.add_value_and_detect("loss 250-499", high_value) is None
    assert detector.add_value_and_detect("loss 0-249", 90.0)
    assert detector.add_value_and_detect("loss 250-499", 90.0) is None
    assert detector.get_spike_limit("loss 500-749") is None


@pytest.mark.parametrize("cut", [7, 101, 310])
def test_history_rebuilds_the_state(cut: int) -> None:
    """Cut in warm-up, at a spike, and within the streak that becomes a new level."""
    values = [*heavy_tailed(300, 19), *heavy_tailed(100, 20, median=60.0)]
    values[100], values[150] = 80.0, math.nan
    running, resumed = (SpikeDetector(window=200, threshold=8) for _ in range(2))
    alarms(running, values[:cut])
    alarms(resumed, values[:cut])
    for value in values[cut:]:
        running.get_spike_limit("loss")  # to ask changes nothing
        assert repr(resumed.add_value_and_detect("loss", value)) == repr(running.add_value_and_detect("loss", value))
    assert resumed.get_spike_limit("loss") == running.get_spike_limit("loss")


@pytest.mark.parametrize("warm_up", [0, 51])
def test_a_warm_up_that_the_window_cannot_hold_is_refused(warm_up: int) -> None:
    with pytest.raises(DitLoraError, match=f"got warm_up {warm_up}, window 50"):
        SpikeDetector(window=50, threshold=8, warm_up=warm_up)


def test_an_observation_costs_far_below_a_millisecond(detector: SpikeDetector) -> None:
    """Measured: 0.04 ms at a window of 200; the fastest of five, since the machine is shared."""
    values = heavy_tailed(300, 21)
    alarms(detector, values)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        alarms(detector, values[:100])
        seconds.append((time.perf_counter() - start) / 100)
    assert min(seconds) < 0.5e-3
