"""CogVideoX-5B's second norm (D 3072), Sana's (2240), DiT's (1152) and Wan-14B's (5120, fp32 tables), in bf16."""

import triton.language as tl
from sm90_compile import Case

from dit_lora_kernels.ada_norm import MAX_ROWS, _backward_kernel, _block, _forward_kernel

POINTERS = {
    "forward": _forward_kernel.arg_names[:11],
    "backward": _backward_kernel.arg_names[:14],
}


def case(
    name: str, kernel: str, channels: int, *, without: str = "", table: str = "*bf16", rows: int = 1
) -> Case:
    function = _forward_kernel if kernel == "forward" else _backward_kernel
    pointers = POINTERS[kernel]
    fp32 = ("mean_ptr", "rstd_ptr", "ones_ptr", "hats_ptr", "dgate_ptr")
    tables = ("gate_ptr", "shift_ptr", "scale_ptr")
    signature = dict.fromkeys(function.arg_names, "i32")
    signature |= {
        name: "*fp32" if name in fp32 else table if name in tables else "*bf16" for name in pointers
    }
    block = _block(channels, sums=rows > 1)
    constants = {f"{word}_ptr": None for word in without.split()}
    constants |= {"ACC": tl.float32, "BLOCK_D": block["BLOCK_D"]}
    constants |= {"EPS": 1e-5} if kernel == "forward" else {"ROWS": rows}
    integers = [n for n in function.arg_names if n not in pointers and n not in constants]
    rows_only = ("T", "G", "L", "S", "CHUNKS")
    aligned = [n for n in (*pointers, *integers) if n not in constants and n not in rows_only]
    return Case(name, function, signature, constants, block["num_warps"], tuple(aligned))


SUMS = "ones hats dgate"
CASES = [
    case("cogvideox forward", "forward", 3072),
    case("cogvideox forward, no y", "forward", 3072, without="y gate residual"),
    case("dit forward", "forward", 1152, without="weight bias"),
    case("sana forward", "forward", 2240, without="weight bias"),
    case("wan forward", "forward", 5120, without="weight bias", table="*fp32"),
    case("ltx forward", "forward", 2048, without="weight bias mean"),
    case("cogvideox backward", "backward", 3072, without=f"y {SUMS}"),
    case("cogvideox backward, no y", "backward", 3072, without=f"y gate dy {SUMS}"),
    case("cogvideox backward with tables", "backward", 3072, rows=MAX_ROWS),
    case("dit backward with tables", "backward", 1152, without="weight", rows=MAX_ROWS),
    case("sana backward", "backward", 2240, without=f"weight y {SUMS}"),
    case(
        "wan backward with tables", "backward", 5120, without="weight", table="*fp32", rows=MAX_ROWS
    ),
]
