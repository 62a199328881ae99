"""Fused Triton kernels for diffusion transformers; needs torch and triton alone.

The import name is dit_lora_kernels and `kernels/` is a source root without an `__init__.py`: `kernels` is
Hugging Face's import name, and Diffusers and Transformers import it.
"""

from dit_lora_kernels.support import Support, triton_support

__all__ = ["Support", "triton_support"]
