"""Compile a kernel for sm_90 on any machine and say what ptxas made of it.

A process of its own, because TRITON_INTERPRET is read when `@triton.jit` decorates:
`python tests/dit_lora_kernels/sm90_compile.py CASES.py` prints one JSON object a case of that file's `CASES`.
"""

import json
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Case:
    """One compilation: `signature` has Triton's type of each argument (`*bf16`, `i32`), by name."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    aligned: tuple[str, ...] = field(default=())
    """Arguments divisible by 16, as a launch would find them: pointers, row lengths."""


def compile_case(case: Case) -> dict[str, Any]:
    """Registers, bytes of spills, and the widths of its global loads and stores in bytes."""
    names = case.kernel.arg_names
    signature = {n: "constexpr" if n in case.constants else case.signature[n] for n in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned}
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case.num_warps}
    )
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "name": case.name,
        "registers": found["REG"],
        "spills": found["STACK"] + found["LOCAL"],
        "loads": _widths(ptx, "ld"),
        "stores": _widths(ptx, "st"),
    }


def _widths(ptx: str, kind: str) -> list[int]:
    """Bytes of each global access, in the order of the PTX."""
    found = re.findall(rf"{kind}\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    return [int(vector or 1) * int(bits) // 8 for vector, bits in found]


def _cuobjdump() -> str:
    root = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(root / "cuobjdump")


def main(path: str) -> None:
    for case in runpy.run_path(path)["CASES"]:
        print(json.dumps(compile_case(case)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
