"""Tolerances for comparing two correct computations of the same values, before, during and after a run.

All are relative to the reference, as ratios of root mean squares or norms. `parity` compares a kernel's modules and
gradients with their reference before the first step, and during the run. The start and end of a run compare the
model's output with and without its kernels. `verify` compares outputs without kernels on both sides, so it allows only
rounding.
"""

import math
from collections.abc import Collection

import torch

# In fp32 two correct orders of the same sums are 1e-5 apart. In bf16 they were up to 0.015 in 24 blocks of CogVideoX,
# and 0.12 in the gradient of a query before ReLU, where another sample's scale made 0.04 to 0.14: in bf16 only
# gross errors can be detected, and the comparison in fp32 finds the others.
OUTPUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""The limit for a module's output with a kernel and without it, by the dtype that it computes in."""
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""The limit for a parameter's gradient, likewise."""
BLOCK_TOLERANCE = 2e-4
"""The limit for one block's outputs and gradients in fp32, on equal inputs and relative to what the block adds to its
input: an error of 0.1 % in one op is 1e-3 of that. So parity refuses a block that would fail the check of the whole
model at the end of a run."""
KERNEL_TOLERANCE = OUTPUT_TOLERANCE[torch.float32]
"""The limit for a kernel's own error in any dtype; the rest of a difference must be rounding."""
FP8_TOLERANCE = 0.05
"""The limit for changes by fp8 products, of a block and, times the root of the number of blocks, of a model. A product
of random operands was 0.037 off (docs/kernels.md)."""
END_OF_RUN_FACTOR = 2.0
"""The end of a run may differ by this factor more than its start, because its weights have changed."""

# Of one operation. fp32 sums of thousands of terms lose some bits, and cuDNN's convolutions take TF32.
_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-19}
_TF32_ROUNDOFF = 2.0**-11
_SAFETY_FACTOR = 4.0


def compute_rounding_tolerance(dtypes: Collection[torch.dtype], devices: Collection[str], num_blocks: int) -> float:
    """How far the outputs of two correct computations of a model may differ, for these dtypes and devices.

    Four times u sqrt(blocks), where u is the unit roundoff of the coarsest dtype. Measurements are in docs/verify.md.
    """
    # The coarsest dtype dominates the difference.
    unit = max(_UNIT_ROUNDOFF[dtype] for dtype in dtypes)
    if set(devices) != {"cpu"}:
        unit = max(unit, _TF32_ROUNDOFF)
    # Rounding errors of blocks are independent: they add up as a random walk.
    return _SAFETY_FACTOR * unit * math.sqrt(max(1, num_blocks))
