"""What ptxas makes of every kernel for Hopper (sm_90), without a GPU: registers, occupancy, loads in flight.

`python kernels/bench/sm90.py [--op OP ...] [--json]`. Launchers run on tensors of the meta device, and Triton's own
`run` compiles what they launch, specialised as on a GPU, for a driver that only says sm_90. Nothing is timed.
"""

import argparse
import json
import math
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import sm90_cases
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# CUDA C programming guide, "technical specifications per compute capability", 9.0; allocation units of its occupancy
# calculator: 256 registers a warp in each of four partitions, 128 bytes of shared memory and 1 KiB a block reserved.
WARPS, BLOCKS, PARTITION_REGISTERS, SHARED = 64, 32, 16384, 233472
COLUMNS = ("programs", "warps", "registers", "spills", "shared", "blocks", "occupancy", "in_flight")
TITLES = (
    "programs", "warps", "registers", "spills, B", "shared, B", "blocks an SM", "occupancy, %",
    "in flight: B a thread", "KiB an SM",
)  # fmt: skip


class _Hopper:
    """The three answers of a driver that Triton asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def _recorded() -> Iterator[list[tuple[str, int, Any]]]:
    """Compile in place of launching; yield a list that gets each launch's kernel, programs and binary."""
    launched: list[tuple[str, int, Any]] = []
    run = JITFunction.run

    def compiles(kernel: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        made = run(kernel, *args, grid=grid, **options | {"warmup": True})
        launched.append((kernel.__name__, math.prod(grid), made))

    driver.set_active(_Hopper())
    JITFunction.run = compiles
    try:
        yield launched
    finally:
        JITFunction.run = run


def compiled(name: str, launch: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """Yield what ptxas made of each kernel that `launch` launches."""
    with _recorded() as launched:
        launch()
    for kernel, programs, made in launched:
        yield {"case": name, "kernel": kernel, "programs": programs} | _facts(made)


def _facts(made: Any) -> dict[str, Any]:
    """Return a binary's registers, spills and shared bytes, the occupancy they allow, and global accesses' widths."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    warps, shared = made.metadata.num_warps, made.metadata.shared
    blocks = blocks_an_sm(found["REG"], warps, shared)
    return {
        "warps": warps,
        "registers": found["REG"],
        "spills": found["STACK"] + found["LOCAL"],
        "shared": shared,
        "blocks": blocks,
        "occupancy": round(100 * blocks * warps / WARPS),
        "in_flight": in_flight(sass),
        "loads": _widths(made.asm["ptx"], "ld"),
        "stores": _widths(made.asm["ptx"], "st"),
    }


def blocks_an_sm(registers: int, warps: int, shared: int) -> int:
    """Return how many blocks of so many warps an SM of Hopper holds at once; 0 for more than it has."""
    a_warp = -(-registers * 32 // 256) * 256
    by_registers = PARTITION_REGISTERS // a_warp * 4 // warps
    by_shared = SHARED // (-(-shared // 128) * 128 + 1024)
    return min(BLOCKS, WARPS // warps, by_registers, by_shared)


_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def in_flight(sass: str) -> int:
    """Return the most bytes of global loads that a thread has under way: in loops that load, once they run.

    A walk through the listing in its order: a load is under way until an instruction names a register that it fills,
    an asynchronous copy until a wait for its group. Branches are not followed.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;", sass)
    lines = [(int(at, 16), text) for at, text in found]
    branches = [(at, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for at, text in lines]
    # A loop is a branch back, but for the trap at the end.
    loops = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
    bodies = [[t for at, t in lines if start <= at <= end] for start, end in loops]
    loading = [body for body in bodies if any("LDG" in text for text in body)]
    if not loading:
        return max(_under_way([text for _, text in lines]), default=0)
    # Eight times round, of which the last is like all that follow: pipelines here are at most five deep.
    return max(max(list(_under_way(body * 8))[-len(body) :]) for body in loading)


def _under_way(lines: list[str]) -> Iterator[int]:
    """Yield the bytes under way after each instruction."""
    pending: list[tuple[range, int]] = []
    groups = [0]  # of asynchronous copies; the last is open
    for text in lines:
        named = {int(n) for n in re.findall(r"\bR(\d+)", text)}
        pending = [load for load in pending if named.isdisjoint(load[0])]
        load = re.search(r"\b(LDGSTS|LDG)\.(\S+) (?:P\w+, )?\[?R(\d+)", text)
        if wait := re.search(r"\bDEPBAR\.LE SB0, 0x([0-9a-f]+)", text):
            groups = groups[max(len(groups) - 1 - int(wait[1], 16), 0) :]
        elif "LDGDEPBAR" in text:
            groups.append(0)
        elif load:
            size = next((_BYTES[w] for w in load[2].split(".") if w in _BYTES), 4)
            if load[1] == "LDGSTS":
                groups[-1] += size
            else:
                first = int(load[3])
                pending.append((range(first, first + max(size // 4, 1)), size))
        yield sum(size for _, size in pending) + sum(groups)


def _widths(ptx: str, kind: str) -> list[int]:
    """Return the bytes of each global access, in the order of the PTX."""
    found = re.findall(rf"{kind}\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    return [int(vector or 1) * int(bits) // 8 for vector, bits in found]


def _cuobjdump(*args: str) -> str:
    """Return what Triton's own cuobjdump prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, *args], capture_output=True, text=True, check=True).stdout


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of all rows, with what it was made by."""
    lines = [
        f"triton {triton.__version__}, Python {platform.python_version()}, {date.today().isoformat()}, "
        f"`{shlex.join(['python', 'kernels/bench/sm90.py', *sys.argv[1:]])}`",
        "",
        "| " + " | ".join(("op", "case", "kernel", *TITLES)) + " |",
        "|---|---|---|" + "---:|" * len(TITLES),
    ]
    for row in rows:
        an_sm = row["in_flight"] * row["blocks"] * row["warps"] * 32 / 1024
        names = (row["op"], row["case"], f"`{row['kernel']}`")
        cells = (*names, *(str(row[column]) for column in COLUMNS), f"{an_sm:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Compile the cases that the command line names and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", default=list(sm90_cases.CASES), metavar="OP")
    parser.add_argument("--case", default="", metavar="WORDS", help="cases with these words alone")
    parser.add_argument("--json", action="store_true", help="an object a line, with all accesses")
    given = parser.parse_args(argv)
    chosen = [
        (op, name, launch) for op in given.op for name, launch in sm90_cases.CASES[op].items() if given.case in name
    ]
    rows = ({"op": op} | row for op, name, launch in chosen for row in compiled(name, launch))
    if given.json:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        sys.stdout.write(markdown(list(rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
