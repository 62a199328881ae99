"""Gradient norms for the guard from one kernel, after a check against PyTorch at the run's own tensor sizes."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from dit_lora.errors import DitLoraError
from dit_lora_kernels import triton_support
from dit_lora_kernels.finite_norm import finite_norms, finite_norms_reference

NormFunction = Callable[[Sequence[torch.Tensor], Sequence[int], int], torch.Tensor]
"""(tensors, group of each, number of groups) to the norm of each group, fp64; finite if every element is finite."""


def choose_norm_function(
    mode: Literal["auto", "on", "off"], trained_tensors: Sequence[torch.Tensor]
) -> tuple[NormFunction | None, str | None]:
    """Choose how gradient norms of these tensors are computed.

    Kernel and PyTorch are compared on random values of each tensor's shape, and on an Inf in the last element of the
    last tensor.

    Args:
        mode: `auto` uses the kernel on a GPU if it agrees with PyTorch; `on` also without a GPU, with its reference.
        trained_tensors: The tensors whose gradients are measured.

    Returns:
        The kernel, or None for PyTorch; and, under `auto`, the reason why the kernel is not used.

    Raises:
        DitLoraError: The mode is `on`, and kernel and PyTorch differ.
    """
    if mode == "off" or not trained_tensors:
        return None, None
    # `auto` uses the kernel only on a GPU; `on` also runs without one, with the reference.
    support = triton_support()
    if mode == "auto" and support.mode != "gpu":
        return None, support.reason
    difference = _find_norm_difference(trained_tensors)
    if difference is None:
        return finite_norms, None
    # `auto` reports the reason and continues; `on` must not silently train with another norm.
    if mode == "on":
        raise DitLoraError(f"kernels.finite_norm: {difference}; set it to auto or off")
    return None, difference


def _find_norm_difference(trained_tensors: Sequence[torch.Tensor]) -> str | None:
    """How the kernel's norms of random gradients differ from PyTorch's; None if they agree."""
    generator = torch.Generator(trained_tensors[0].device).manual_seed(0)
    values = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)
        for t in trained_tensors
    ]
    # Two groups, mixed, so that a norm in the wrong group's place is seen.
    groups = [index % 2 for index in range(len(values))]
    kernel_norms = finite_norms(values, groups, 2)
    expected = finite_norms_reference(values, groups, 2)
    if not torch.allclose(kernel_norms, expected, rtol=1e-4, atol=0.0):
        return f"its norms are {kernel_norms.tolist()}, and those of PyTorch {expected.tolist()}"
    # A wrong size or mask in the kernel would miss the very last element.
    last_tensor = values[-1].flatten()
    last_tensor[-1] = torch.inf
    values[-1] = last_tensor.view_as(values[-1])
    if torch.isfinite(finite_norms(values, groups, 2)[groups[-1]]):
        return "an Inf in the last gradient is not seen"
    return None
