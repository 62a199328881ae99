"""The device's time in a step: one step under torch.profiler, its kernels in few kinds."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

KERNELS = Path(__file__).parents[1] / "kernels" / "dit_lora_kernels"
OURS, OTHER = "ours", "other pointwise"
# By parts of names, the first that is met; ours are told by their whole names before. A CPU's are names of ops.
_KINDS = (
    ("attention", "flash|fmha|cudnn_generated|sdpa|attention|softmax"),
    ("products", "gemm|cutlass|nvjet|xmma|cublas|splitk|gemv|::mm|::addmm|::bmm|::baddbmm|scaled_mm"),
    ("compiled", "^triton_"),
    ("convolution", "conv(?!ert)"),
    ("optimizer", "multi_tensor|fused_adam|_foreach"),
    ("copies", "memcpy|memset|copy_kernel|catarray|::copy_|::cat$|::fill_|::zero_"),
)  # fmt: skip
_SHOWN = 12


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds of the device in one step."""

    by_kind: dict[str, float]
    """The longest first."""
    launches: int
    """Kernels, copies and fills; on a CPU ops that took time of their own."""
    longest: list[tuple[str, float, int]]
    """Name, milliseconds and launches of the kernels that took longest together."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


def kernel_times(device: torch.device, step: Callable[[], object]) -> KernelTimes:
    """Run `step` once under the profiler, which slows the host and not the kernels."""
    activity = ProfilerActivity.CPU
    if device.type == "cuda":
        activity = ProfilerActivity.CUDA
        torch.cuda.synchronize(device)
    with profile(activities=[activity]) as profiled:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kinds, names, launches = Counter[str](), Counter[str](), Counter[str]()
    for event in profiled.events() or []:
        milliseconds = _milliseconds(event, device)
        if milliseconds is not None:
            kinds[kind_of(event.name)] += milliseconds
            names[event.name] += milliseconds
            launches[event.name] += 1
    longest = [(n[:100], round(t, 3), launches[n]) for n, t in names.most_common(_SHOWN)]
    by_kind = {kind: round(total, 3) for kind, total in kinds.most_common()}
    return KernelTimes(by_kind, launches.total(), longest)


def _milliseconds(event: FunctionEvent, device: torch.device) -> float | None:
    """Milliseconds that the event itself took on the device; None if it is not work of that device."""
    # An optimizer's annotation is an event on the GPU too, and spans kernels that are counted by themselves.
    if event.is_user_annotation or event.device_type.name != device.type.upper():
        return None
    on_gpu = device.type == "cuda"
    duration = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
    return duration / 1e3 if duration > 0 else None


def kind_of(name: str) -> str:
    """Classify a kernel by its name."""
    if name in _our_kernels():
        return OURS
    return next((kind for kind, part in _KINDS if re.search(part, name.lower())), OTHER)


@cache
def _our_kernels() -> frozenset[str]:
    """Names of our package's Triton functions, which are the kernels' names, and of our ops."""
    text = "\n".join(path.read_text() for path in KERNELS.rglob("*.py"))
    compiled = re.findall(r"^@triton\.jit[^\n]*\ndef (\w+)\(", text, flags=re.MULTILINE)
    ops = re.findall(r"^@op\(\"(\w+)\"", text, flags=re.MULTILINE)
    return frozenset(compiled) | {f"dit_lora::{name}" for name in ops}
