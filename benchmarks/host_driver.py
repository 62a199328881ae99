"""Stands in for a GPU's driver: Triton does all that it does for a launch, for tensors on a CPU, but the launch.

A product of half-precision tensors with its sum in fp32 is one call there, which a CPU lacks: an fp32 product of the
same shape stands in for it. Compiled for sm_90, which needs no GPU. Not run is the code after Triton has chosen a
compiled kernel: `CudaLauncher`, which takes the pointers from the tensors, and `cuLaunchKernel`. Outputs of kernels
keep their old values.
"""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from dit_lora_kernels import lora_linear

_MODULES = (
    "ada_norm",
    "finite_norm",
    "qk_norm_rope",
    "relu_linear_attention",
    "silu_dwconv_glu",
)


class _Launcher:
    """A compiled kernel's launcher that launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class NoDriver:
    """One H200, as far as Triton asks."""

    launcher_cls = _Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 232_448},
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda _module: None,
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@functools.cache
def _wide_operands(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 matrices of zeros."""
    return torch.zeros(rows, inner), torch.zeros(inner, columns)


def _wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Stand-in for `torch.mm(left, right, out_dtype=torch.float32)` that gives zeros."""
    return torch.mm(*_wide_operands(*left.shape, right.shape[1]))


def launch_on_cpu() -> None:
    """Let every op of ours take the way of a GPU's tensors from now on, up to the driver."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET: an interpreted kernel is no launch")
    # Its interface is that of Triton's own drivers, of which these methods are what a launch asks.
    triton.runtime.driver.set_active(NoDriver())  # type: ignore[arg-type]
    for name in _MODULES:
        module = importlib.import_module(f"dit_lora_kernels.{name}")
        module.launches = lambda _tensor: True  # type: ignore[attr-defined]
    lora_linear._weight_gradient = _wide_product
