"""Fused kernels in place of a model's own modules. This version fuses nothing yet: it says what it could."""

from dit_lora_kernels import Support, triton_support


def kernel_support() -> Support:
    """Whether fused kernels could run here, and why not."""
    return triton_support()
