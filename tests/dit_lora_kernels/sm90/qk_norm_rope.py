"""Kernels of qk_norm_rope at the heads of real models; activations and weights bf16, tables and rstd fp32."""

from typing import Any

from sm90_compile import Case

from dit_lora_kernels.qk_norm_rope import _backward_kernel, _forward_kernel
from dit_lora_kernels.support import tl

BF16 = ("x_ptr", "grad_ptr", "source_ptr", "out_ptr", "dx_ptr", "weight_ptr", "bias_ptr")
GIVEN = "given"
DEFAULTS = {
    "NORM": "rms",
    "EPS": 1e-6,
    "ACROSS": False,
    "HALVES": False,
    "TABLES": 1,
    "PER_HEAD": False,
    "EACH": 1,
    "ACC": tl.float32,
    "bias_ptr": None,
    "dweight_ptr": None,
    "dbias_ptr": None,
}


def _case(kernel: Any, name: str, heads: int, width: int, **changed: Any) -> Case:
    """RMSNorm with a weight, one interleaved table, backward from the output; `changed` says what differs."""
    block_h, block = 1 << (heads - 1).bit_length(), 1 << (width // 2 - 1).bit_length()
    sizes = {"H": heads, "D": width, "BLOCK_H": block_h, "BLOCK": block}
    constants = {
        key: value
        for key, value in {**DEFAULTS, **sizes, **changed}.items()
        if key in kernel.arg_names and value != GIVEN
    }
    pointers = [n for n in kernel.arg_names if n.endswith("_ptr")]
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature |= {n: "*bf16" if n in BF16 else "*fp32" for n in pointers}
    aligned = tuple(
        n
        for n in kernel.arg_names
        if n not in constants and n.endswith(("_ptr", "_batch", "_token", "_head"))
    )
    warps = min(max(block_h * block // 256, 1), 16)
    return Case(name, kernel, signature, constants, num_warps=warps, aligned=aligned)


COGVIDEOX = {"NORM": "layer", "bias_ptr": GIVEN}  # 48 heads of 64, a prefix of text
WAN = {"ACROSS": True}  # 40 heads of 128
LTX = {"ACROSS": True, "PER_HEAD": True}  # 32 heads of 64, tables of H*D
NO_NORM = {"NORM": "none", "weight_ptr": None, "source_ptr": None, "rstd_ptr": None}
TRAINED = {"rstd_ptr": None, "dweight_ptr": GIVEN, "EACH": 64}

CASES = [
    _case(_forward_kernel, "forward cogvideox", 48, 64, **COGVIDEOX),
    _case(_forward_kernel, "forward wan", 40, 128, **WAN),
    _case(_forward_kernel, "forward halves", 32, 128, HALVES=True),
    _case(_backward_kernel, "backward cogvideox", 48, 64, **COGVIDEOX),
    _case(_backward_kernel, "backward wan", 40, 128, **WAN),
    _case(_backward_kernel, "backward ltx", 32, 64, **LTX),
    _case(_backward_kernel, "backward no norm", 24, 128, **NO_NORM),
    _case(
        _backward_kernel,
        "backward cogvideox trained",
        48,
        64,
        **COGVIDEOX | TRAINED | {"dbias_ptr": GIVEN},
    ),
    _case(_backward_kernel, "backward wan trained", 40, 128, **WAN | TRAINED),
]
