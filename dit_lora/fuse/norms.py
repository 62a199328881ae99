"""The guard's gradient norms by one kernel, once it has shown on the run's own sizes that it sees what torch sees."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from dit_lora.errors import DitLoraError
from dit_lora_kernels import triton_support
from dit_lora_kernels.finite_norm import finite_norms, finite_norms_reference

Norms = Callable[[Sequence[torch.Tensor], Sequence[int], int], torch.Tensor]
"""(tensors, the group of each, how many groups) to the groups' norms, fp64; finite if every element is."""


def choose_norms(
    mode: Literal["auto", "on", "off"], trained: Sequence[torch.Tensor]
) -> tuple[Norms | None, str | None]:
    """What computes norms of these tensors' gradients, None for PyTorch; and, under `auto`, why the kernel does not.

    Compared on random values of each tensor's shape, and on an Inf in the last element of the last. Raises
    `DitLoraError` if `on` was asked for and they differ.
    """
    if mode == "off" or not trained:
        return None, None
    support = triton_support()
    if mode == "auto" and support.mode != "gpu":
        return None, support.reason
    wrong = _difference(trained)
    if wrong is None:
        return finite_norms, None
    if mode == "on":
        raise DitLoraError(f"kernels.finite_norm: {wrong}; set it to auto or off")
    return None, wrong


def _difference(trained: Sequence[torch.Tensor]) -> str | None:
    generator = torch.Generator(trained[0].device).manual_seed(0)
    values = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)
        for t in trained
    ]
    groups = [index % 2 for index in range(len(values))]
    found, expected = (f(values, groups, 2) for f in (finite_norms, finite_norms_reference))
    if not torch.allclose(found, expected, rtol=1e-4, atol=0.0):
        return f"norms are {found.tolist()}, and PyTorch's are {expected.tolist()}"
    last = values[-1].flatten()
    last[-1] = torch.inf
    values[-1] = last.view_as(values[-1])
    if torch.isfinite(finite_norms(values, groups, 2)[groups[-1]]):
        return "an Inf in the last gradient is not seen"
    return None
