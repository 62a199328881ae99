"""relu_linear_attention as Sana (D = 32, 70 heads) and SanaVideo (D = 112, 20 heads, RoPE) launch it in bf16."""

from typing import Any

from sm90_compile import Case

from dit_lora_kernels.relu_linear_attention import (
    BLOCK_S,
    key_grad_kernel,
    output_kernel,
    query_grad_kernel,
    state_kernel,
    tiling,
)
from dit_lora_kernels.support import tl

_WIDE = {"state_ptr", "z_ptr", "dstate_ptr", "dz_ptr", "cos_ptr", "sin_ptr"}


def _case(kernel: Any, d: int, rope: bool, precision: str, dtype: str = "bf16") -> Case:
    cut = tiling(4096, d)
    constants = {
        "D": d,
        "EPS": 1e-6,
        "ACC": tl.float64 if dtype == "fp64" else tl.float32,
        "PRECISION": precision,
        "BLOCK_S": BLOCK_S,
        "BLOCK_D": cut.block_d,
        "BLOCK_K": cut.block_k,
        "BLOCKS": cut.blocks,
    }
    if not rope:
        constants |= {"cos_ptr": None, "sin_ptr": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    runtime = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(runtime, "i32")
    for name in runtime:
        if name.endswith("_ptr"):
            signature[name] = "*fp32" if name in _WIDE and dtype != "fp64" else f"*{dtype}"
    return Case(
        name=f"{kernel.__name__} {dtype} D={d}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=cut.num_warps,
        aligned=tuple(name for name in runtime if name not in {"S", "H", "CHUNKS"}),
    )


_KERNELS = (output_kernel, query_grad_kernel, key_grad_kernel)
CASES = [
    _case(state_kernel, 32, False, "tf32"),
    *(_case(kernel, 32, False, "tf32x3") for kernel in _KERNELS),
    *(_case(kernel, 112, True, "tf32x3") for kernel in (state_kernel, *_KERNELS)),
]
