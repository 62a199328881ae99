"""Fused Triton kernels for diffusion transformers; needs only torch and triton.

The import name is dit_lora_kernels, and `kernels/` is a source root without an `__init__.py`: `kernels` is Hugging
Face's import name, which Diffusers and Transformers import.
"""

from dit_lora_kernels.support import Support, triton_support

__all__ = ["Support", "triton_support"]
