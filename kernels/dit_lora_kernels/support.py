"""Say whether Triton kernels can run here, stand in for Triton where it is not installed, and hold what ops share."""

import functools
import importlib.metadata
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def _installed(module: str) -> Any:
    """Return the module, None if it is not installed."""
    try:
        return import_module(module)
    except ImportError:  # references and CPU paths work without it
        return None


# Without Triton the kernels below are never launched, but the modules that define them must still import: `jit`
# leaves a function as it is, and `constexpr` need only be something that an annotation can name.
triton: Any = _installed("triton") or SimpleNamespace(jit=lambda kernel: kernel)
tl: Any = _installed("triton.language") or SimpleNamespace(constexpr=object)


class Support(NamedTuple):
    """The way in which kernels can run here: `mode` gpu, interpreter or none, and the versions or the lack that say so."""

    mode: str
    reason: str


def triton_support() -> Support:
    """Return what Triton would do in this process, judged by its version and the device; compile nothing."""
    if isinstance(triton, SimpleNamespace):
        return Support("none", "triton is not installed")
    version = importlib.metadata.version("triton")
    if triton.knobs.runtime.interpret:
        return Support("interpreter", f"triton {version} with TRITON_INTERPRET=1, for tests")
    if not torch.cuda.is_available():
        return Support("none", f"triton {version} finds no GPU")
    return Support("gpu", f"triton {version} on {torch.cuda.get_device_name()}")


def launches(tensor: Tensor) -> bool:
    """Return whether a kernel runs on this tensor's device: on a GPU, or anywhere in Triton's interpreter."""
    if isinstance(triton, SimpleNamespace):
        return False
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that an op computes and sums in: fp64 for fp64 inputs, else fp32."""
    # fp64 is there for gradcheck, whose finite differences drown in fp32's rounding.
    return torch.float64 if dtype is torch.float64 else torch.float32


def accumulator(dtype: torch.dtype) -> Any:
    """Return `wide_dtype(dtype)` as a kernel's compile-time argument, a Triton dtype."""
    return tl.float64 if wide_dtype(dtype) is torch.float64 else tl.float32


# A tensor, or one that may be missing: what comes in missing goes out missing, and the type says which.
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def readable_rows(tensor: MaybeTensor) -> MaybeTensor:
    """Return the tensor itself if its last dimension is contiguous, else a contiguous copy; any shape, any dtype.

    Kernels take every stride but the last, which they assume to be 1.
    """
    # A last dimension of one element may have any stride: nothing is ever multiplied by it.
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def packed(tensor: MaybeTensor) -> MaybeTensor:
    """Return the tensor, of any shape and dtype, contiguous: itself if it is so already."""
    return None if tensor is None else tensor.contiguous()


P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """Run the launcher with its first tensor's GPU as the current one.

    Triton launches on the current device, whatever device the pointers that it is given lie on.
    """

    @functools.wraps(launcher)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        with torch.cuda.device_of(first):
            return launcher(*args, **kwargs)

    return run
