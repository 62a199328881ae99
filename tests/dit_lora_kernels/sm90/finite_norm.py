"""The kernel of finite_norm for every dtype, and for tensors that start or end off 16 bytes."""

from sm90_compile import Case

from dit_lora_kernels.finite_norm import CHUNK, _chunk_kernel
from dit_lora_kernels.support import tl


def case(name: str, element: tl.dtype, *, aligned: bool, wide: tl.dtype = tl.float32) -> Case:
    signature = {"table_ptr": "*i64", "norms_ptr": "*fp32"}
    constants = {"CHUNK": CHUNK, "ELEMENT": element, "ALIGNED": aligned, "ACC": wide}
    return Case(name, _chunk_kernel, signature, constants, 4, tuple(signature))


CASES = [
    case("fp32", tl.float32, aligned=True),
    case("bf16", tl.bfloat16, aligned=True),
    case("fp16", tl.float16, aligned=True),
    case("fp64", tl.float64, aligned=True, wide=tl.float64),
    case("fp32 unaligned", tl.float32, aligned=False),
]
