"""Kernels of silu_dwconv_glu at Sana-1.6B's sizes (C 5600), in bf16 and fp32."""

from typing import Any

from sm90_compile import Case

from dit_lora_kernels.silu_dwconv_glu import (
    MAX_ROWS,
    PAIRS,
    _convolution_kernel,
    _filter_kernel,
    _input_kernel,
)
from dit_lora_kernels.support import tl


def case(name: str, kernel: Any, dtype: str, num_warps: int, **constants: Any) -> Case:
    names = kernel.arg_names
    pointers = [n for n in names if n.endswith("_ptr")]
    strides = [n for n in names if n[-2:] in ("_b", "_y", "_x")]
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(pointers, f"*{dtype}")
    if "partial_ptr" in signature:
        signature["partial_ptr"] = "*fp32"
    channels = [n for n in names if n in ("C", "C2")]
    aligned = (*pointers, *strides, *channels)
    constants["ACC"] = tl.float32
    return Case(f"{name} {dtype}", kernel, signature, constants, num_warps, aligned)


TILE = {"ROWS": MAX_ROWS, "PAIRS": PAIRS}
CASES = [
    made
    for dtype in ("bf16", "fp32")
    for made in (
        case(
            "forward", _convolution_kernel, dtype, 8, BLOCK_C=128, BIAS=True, BACKWARD=False, **TILE
        ),
        case("dc", _convolution_kernel, dtype, 8, BLOCK_C=128, BIAS=True, BACKWARD=True, **TILE),
        case("dh", _input_kernel, dtype, 4, BLOCK_C=256, **TILE),
        case("filter", _filter_kernel, dtype, 4, BLOCK_C=64, STEPS=16, PIXELS=16),
    )
]
