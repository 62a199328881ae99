"""Measures what this device reaches: a copy, products, attention each way and by backend, and one op's launch.

A minute on a GPU; on a CPU sizes are smaller. On a GPU times are its own: the host runs ahead while the GPU waits, and
caches are cold.
"""

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata, util
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from dit_lora.environment.ceilings import AttentionRate, Ceilings, ProductRate
from dit_lora.environment.gpu_state import gpu_state
from dit_lora.planning.work import Work

BACKWARD = 2.5
"""FLOPs of attention's backward over its forward's: five products for two."""
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# M, N and K of products of CogVideoX-5B (q, k and v; out; both of the feed-forward), Sana-1.6B and DiT-XL/2.
_PRODUCTS = (
    (17776, 9216, 3072),
    (17776, 3072, 3072),
    (17776, 12288, 3072),
    (17776, 3072, 12288),
    (8192, 11200, 2240),
    (16384, 4608, 1152),
)


_CYCLES = 2e9
"""A second of a GPU at its highest clock; at a lower one the GPU waits longer, which costs a measurement nothing."""


class Shape(NamedTuple):
    """One attention: (B, H, S, D) over (B, H, K, D)."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    masked: bool

    @property
    def words(self) -> str:
        return "x".join(map(str, self[:5]))


# CogVideoX-5B; Sana-1.6B over captions, with their mask and without; DiT-XL/2.
_ATTENTION = (
    Shape(1, 48, 17776, 17776, 64, masked=False),
    Shape(8, 20, 1024, 304, 112, masked=True),
    Shape(8, 20, 1024, 304, 112, masked=False),
    Shape(64, 16, 256, 256, 72, masked=False),
)
_ON_CPU = (Shape(1, 8, 512, 512, 64, masked=False), Shape(2, 4, 256, 64, 64, masked=True))
_QUICK = (Shape(1, 2, 64, 64, 32, masked=False), Shape(1, 2, 64, 16, 32, masked=True))


def device_name(device: torch.device) -> str:
    """Return the name under which a device's rates are kept."""
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    )


@dataclass
class Meter:
    """Times calls on one device; what fails is noted, and the rest goes on."""

    device: torch.device
    quick: bool = False
    """Take tiny sizes and few samples: to see that it runs."""
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = 2**20
        if self.device.type == "cuda":
            size = 3 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median of several calls."""
        samples = 3 if self.quick else 10 if self.device.type == "cuda" else 7
        call()
        self.wait()
        began = time.perf_counter()
        call()
        enqueued = time.perf_counter() - began
        self.wait()
        if self.device.type != "cuda":
            return statistics.median(_host_seconds(call) for _ in range(samples))
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(samples)
        ]
        for start, end in pairs:
            # Read and not written: dirty lines would be written back within what is timed.
            self._flush.max()
            # Thrice what the host took, so that the GPU finds all of the call's launches there.
            torch.cuda._sleep(int(_CYCLES * (3 * enqueued + 2e-4)))
            start.record()
            call()
            end.record()
        self.wait()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    def tried(self, name: str, measure: Callable[[], float]) -> float | None:
        """Return what `measure` does; None, and a note, where this device or PyTorch cannot."""
        try:
            return measure()
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            self.failed[name] = f"{type(error).__name__}: {_first_line(error)}"
            return None
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")[:160]


def _host_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """Return what a device reaches; `quick` takes tiny sizes, whose rates say nothing."""
    meter = Meter(device, quick)
    before = gpu_state(device.index or 0) if device.type == "cuda" else {}
    copy, products = _copy(meter), list(_products(meter))
    attention, launch = list(_attention(meter)), _launch(meter)
    after = gpu_state(device.index or 0) if device.type == "cuda" else {}
    return Ceilings(
        device=device_name(device),
        measured=datetime.date.today().isoformat(),
        copy=copy,
        launch=launch,
        products=products,
        attention=attention,
        failed=meter.failed,
        about={
            "torch": torch.__version__,
            "triton": metadata.version("triton") if util.find_spec("triton") else "none",
            "cudnn": str(torch.backends.cudnn.version()),
            "threads": str(torch.get_num_threads()),
            **{f"{name} before": value for name, value in before.items()},
            **{f"{name} after": value for name, value in after.items()},
        },
    )


def _copy(meter: Meter) -> float:
    size = 2**16 if meter.quick else 2**30 if meter.device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
    target = torch.empty_like(source)
    return 2 * size / meter.seconds(lambda: target.copy_(source))


def _products(meter: Meter) -> Iterator[ProductRate]:
    """Yield the rates of each size in each dtype that the device has."""
    scale = 256 if meter.quick else 1 if meter.device.type == "cuda" else 24
    for full in _PRODUCTS:
        m, n, k = (max(16, side // scale // 16 * 16) for side in full)
        size, flops = (m, n, k), 2 * m * n * k
        for dtype in (*_DTYPES, "fp8"):
            found = meter.tried(f"product of {dtype}", _product(meter, dtype, size))
            if found is not None:
                yield ProductRate(dtype, size, flops / found)


def _product(meter: Meter, dtype: str, size: tuple[int, int, int]) -> Callable[[], float]:
    """Return a function that times one product; fp8 has a scale for each row and column, as training would."""
    m, n, k = size

    def run() -> float:
        draws = torch.Generator(meter.device).manual_seed(0)
        x = torch.randn(m, k, generator=draws, device=meter.device)
        weight = torch.randn(n, k, generator=draws, device=meter.device)
        if dtype != "fp8":
            x, weight = x.to(_DTYPES[dtype]), weight.to(_DTYPES[dtype])
            return meter.seconds(lambda: linear(x, weight))
        narrow, narrow_weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(m, 1, device=x.device), torch.ones(1, n, device=x.device)
        return meter.seconds(
            lambda: torch._scaled_mm(
                narrow, narrow_weight.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )  # fmt: skip

    return run


def _attention(meter: Meter) -> Iterator[AttentionRate]:
    """Yield the rates of each shape by each backend that takes it; the first shape's own choice is always there."""
    on_gpu = meter.device.type == "cuda"
    shapes = _QUICK if meter.quick else _ATTENTION if on_gpu else _ON_CPU
    for shape in shapes:
        for name, backend in _BACKENDS.items():
            if backend is not None and not on_gpu and name != "flash":
                continue
            words = f"attention {shape.words}{', mask' if shape.masked else ''}, {name}"
            found: list[AttentionRate] = []

            def run(shape: Shape = shape, name: str = name, into: list[AttentionRate] = found) -> float:  # fmt: skip
                into.append(_attention_rate(meter, shape, name))
                return into[0].forward

            if meter.tried(words, run) is not None:
                yield found[0]


def _attention_rate(meter: Meter, shape: Shape, name: str) -> AttentionRate:
    device, dtype = meter.device, torch.bfloat16 if meter.device.type == "cuda" else torch.float32
    draws = torch.Generator(device).manual_seed(0)

    def heads(tokens: int) -> torch.Tensor:
        # As models have them in memory: tokens, then heads.
        size = (shape.batch, tokens, shape.heads, shape.width)
        drawn = torch.randn(size, generator=draws, device=device).to(dtype)
        return drawn.transpose(1, 2)

    query, key, value = (heads(n).requires_grad_() for n in (shape.queries, shape.keys, shape.keys))
    out, mask = heads(shape.queries), None
    if shape.masked:
        lengths = torch.arange(shape.batch, device=device)[:, None] * 7 + shape.keys // 3
        shown = torch.arange(shape.keys, device=device) < lengths
        mask = torch.where(shown, 0.0, -10000.0).to(dtype)[:, None, None].expand(-1, shape.heads, -1, -1)  # fmt: skip

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), (query, key, value), out)

    backend = _BACKENDS[name]
    chosen: AbstractContextManager[object] = nullcontext() if backend is None else sdpa_kernel(backend)  # fmt: skip
    with chosen:
        one, two = meter.seconds(forward), meter.seconds(both)
        same = all(torch.equal(a, b) for a, b in zip(both(), both(), strict=True))
    flops = 4 * shape.batch * shape.heads * shape.queries * shape.keys * shape.width
    # On a busy machine a forward alone may have taken longer than one with its backward.
    backward = max(two - one, 0.1 * two)
    return AttentionRate(shape.words, name, shape.masked, flops / one, BACKWARD * flops / backward, same)  # fmt: skip


def _launch(meter: Meter) -> float:
    """Return the host's seconds for an op, of layers so small that nothing else counts, forward and backward."""
    layers = [(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*(one for layer in layers for one in layer)).to(meter.device)
    x = torch.randn(4, 16, device=meter.device, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    with Work() as work:
        step()
    samples = []
    for _ in range(5 if meter.quick else 50):
        meter.wait()
        samples.append(_host_seconds(step))
    return statistics.median(samples) / work.ops
