"""Whether Triton kernels can run here, how, and why not."""

import importlib.metadata
from typing import NamedTuple

import torch


class Support(NamedTuple):
    """`mode` is `gpu`, `interpreter` or `none`; `reason` says how it was found."""

    mode: str
    reason: str


def triton_support() -> Support:
    """What Triton would do in this process, from its version and the device; nothing is compiled."""
    try:
        import triton
    except ImportError:
        return Support("none", "triton is not installed")
    version = importlib.metadata.version("triton")
    if triton.knobs.runtime.interpret:
        return Support("interpreter", f"triton {version} with TRITON_INTERPRET=1, for tests")
    if not torch.cuda.is_available():
        return Support("none", f"triton {version} finds no GPU")
    return Support("gpu", f"triton {version} on {torch.cuda.get_device_name()}")
