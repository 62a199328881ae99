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
    """Return what computes norms of these tensors' gradients, None for PyTorch; and, under `auto`, why no kernel does.

    Kernel and PyTorch are compared on random values of each tensor's shape, and on an Inf in the last element of the
    last. Raises `DitLoraError` if `on` was asked for and they differ.
    """
    if mode == "off" or not trained:
        return None, None
    # `auto` takes the kernel on a GPU alone; `on` runs without one too, by the reference.
    support = triton_support()
    if mode == "auto" and support.mode != "gpu":
        return None, support.reason
    wrong = _difference(trained)
    if wrong is None:
        return finite_norms, None
    # `auto` says why and goes on; who insists must not train with another norm than was asked for.
    if mode == "on":
        raise DitLoraError(f"kernels.finite_norm: {wrong}; set it to auto or off")
    return None, wrong


def _difference(trained: Sequence[torch.Tensor]) -> str | None:
    """Return in what the kernel's norms of made-up gradients differ from PyTorch's; None if they agree."""
    generator = torch.Generator(trained[0].device).manual_seed(0)
    values = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)
        for t in trained
    ]
    # Two groups, mixed, so that a norm in the wrong group's place is seen.
    groups = [index % 2 for index in range(len(values))]
    ours = finite_norms(values, groups, 2)
    expected = finite_norms_reference(values, groups, 2)
    if not torch.allclose(ours, expected, rtol=1e-4, atol=0.0):
        return f"norms are {ours.tolist()}, and PyTorch's are {expected.tolist()}"
    # The last element of all is what a wrong size or mask would miss.
    last = values[-1].flatten()
    last[-1] = torch.inf
    values[-1] = last.view_as(values[-1])
    if torch.isfinite(finite_norms(values, groups, 2)[groups[-1]]):
        return "an Inf in the last gradient is not seen"
    return None
