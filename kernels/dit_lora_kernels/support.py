"""Whether Triton kernels can run here, how, and why not; stand-ins for Triton where it is not installed."""

import functools
import importlib.metadata
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves


def _installed(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:  # references and CPU paths work without it
        return None


triton: Any = _installed("triton") or SimpleNamespace(jit=lambda kernel: kernel)
tl: Any = _installed("triton.language") or SimpleNamespace(constexpr=object)


class Support(NamedTuple):
    """`mode` is `gpu`, `interpreter` or `none`; `reason` says how it was found."""

    mode: str
    reason: str


def triton_support() -> Support:
    """What Triton would do in this process, from its version and the device; nothing is compiled."""
    if isinstance(triton, SimpleNamespace):
        return Support("none", "triton is not installed")
    version = importlib.metadata.version("triton")
    if triton.knobs.runtime.interpret:
        return Support("interpreter", f"triton {version} with TRITON_INTERPRET=1, for tests")
    if not torch.cuda.is_available():
        return Support("none", f"triton {version} finds no GPU")
    return Support("gpu", f"triton {version} on {torch.cuda.get_device_name()}")


def launches(tensor: torch.Tensor) -> bool:
    """Whether a kernel runs on this tensor's device: on a GPU, or anywhere in Triton's interpreter."""
    if isinstance(triton, SimpleNamespace):
        return False
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def accumulator(dtype: torch.dtype) -> Any:
    """The Triton dtype that a kernel computes in: fp64 for fp64 inputs (gradcheck), else fp32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """The launcher, run with its first tensor's GPU as the current one, on which Triton would launch."""

    @functools.wraps(launcher)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        with torch.cuda.device_of(first):
            return launcher(*args, **kwargs)

    return run
