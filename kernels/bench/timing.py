"""Times, peak memory and launches of one call, on a GPU by its own clock, on a CPU by the host's.

On a GPU every sample starts with cold caches: a buffer of three times the L2 is read before it (had it been written,
the L2 would write it back within the sample), and then the GPU waits three times as long as the host was seen to
take to enqueue the call, so that a time is the GPU's work and not the host's; what a launch costs the host is not in
it, which is why launches are counted beside it.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

REPETITIONS = 2
_FEWEST_CYCLES = 1_000_000  # about half a millisecond
_FEWEST, _MOST = 5, 100
_FLUSH_CPU = 2**26  # more than the L2 of a core; a shared L3 may be larger

Call = Callable[[], object]


class Times(NamedTuple):
    """Milliseconds of all samples of all repetitions; `spread` is the relative difference of repetitions' medians."""

    p20: float
    p50: float
    p80: float
    spread: float


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = _FLUSH_CPU
        if device.type == "cuda":
            size = 3 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.ones(size // 4, dtype=torch.float32, device=device)
        self._cycles_a_second = self._sleep_rate() if device.type == "cuda" else 0.0

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def samples(self, call: Call, seconds: float) -> list[float]:
        """Return the milliseconds of as many calls as fit in the seconds, `_FEWEST` to `_MOST` of them."""
        # The first call compiles and fills caches of the allocator; the second tells how many fit.
        call()
        self.wait()
        began = time.perf_counter()
        call()
        enqueued = time.perf_counter() - began
        self.wait()
        cycles = max(int(3 * enqueued * self._cycles_a_second), _FEWEST_CYCLES)
        began = time.perf_counter()
        self._sample(call, 1, cycles)
        each = time.perf_counter() - began
        return self._sample(call, min(_MOST, max(_FEWEST, int(seconds / each))), cycles)

    def _sleep_rate(self) -> float:
        """Return the cycles of `torch.cuda._sleep` that pass in a second."""
        torch.cuda._sleep(_FEWEST_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(20 * _FEWEST_CYCLES)
        end.record()
        self.wait()
        return 20 * _FEWEST_CYCLES / (start.elapsed_time(end) / 1e3)

    def _sample(self, call: Call, count: int, cycles: int) -> list[float]:
        """Return the milliseconds of `count` calls, each after cold caches; the GPU waits `cycles` first."""
        if self.device.type != "cuda":
            times = []
            for _ in range(count):
                self._flush.sum()
                began = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - began))
            return times
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        # Nothing waits within the loop: the GPU sleeps while the host enqueues, and then has all launches of a call.
        for start, end in pairs:
            self._flush.sum()
            torch.cuda._sleep(cycles)
            start.record()
            call()
            end.record()
        self.wait()
        return [start.elapsed_time(end) for start, end in pairs]

    def copy_rate(self) -> float:
        """Return the bytes a second that a copy within the device reads and writes."""
        size = 2**30 if self.device.type == "cuda" else 2**26
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        samples = self.samples(lambda: target.copy_(source), 0.5)
        return 2e3 * size / statistics.median(samples)  # each byte twice, of milliseconds

    def peak_bytes(self, call: Call) -> int | None:
        """Return the bytes that a call allocates at most, beside what was there; None on a CPU."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before

    def launches(self, call: Call) -> int | None:
        """Return how many kernels a call launches, copies and fills among them; None on a CPU."""
        if self.device.type != "cuda":
            return None
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            self.wait()
        # The GPU's work, and not the host's calls that asked for it.
        on_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_gpu for event in profiled.events() or [])


def summarize(repetitions: list[list[float]]) -> Times:
    """Return quantiles over all samples, and the largest difference between the repetitions' medians."""
    together = sorted(sample for samples in repetitions for sample in samples)
    p20, p50, p80 = (together[round(q * (len(together) - 1))] for q in (0.2, 0.5, 0.8))
    medians = [statistics.median(samples) for samples in repetitions]
    return Times(p20, p50, p80, (max(medians) - min(medians)) / p50)
