"""The reading of sm_90 builds: occupancy by Hopper's limits, loads in flight, and the tables in docs/benchmarks."""

import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "sm90.md"
COLUMNS = ("programs", "warps", "registers", "spills", "shared", "blocks", "occupancy", "in_flight")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `sm90`, imported as the script does."""
    monkeypatch.syspath_prepend(ROOT / "kernels" / "bench")
    monkeypatch.delitem(sys.modules, "sm90", raising=False)
    import sm90

    return sm90


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "blocks"),
    [
        (48, 8, 32, 5),
        (40, 4, 16, 12),
        (97, 8, 16384, 2),
        (96, 4, 26624, 5),
        (128, 4, 0, 4),
        (206, 4, 512, 2),
        (255, 8, 65536, 1),
        (32, 4, 100_000, 2),
        (32, 4, 294_912, 0),
        (16, 1, 0, 32),
    ],
)
def test_blocks_an_sm(script: Any, registers: int, warps: int, shared: int, blocks: int) -> None:
    """By CUDA's occupancy calculator for 9.0."""
    assert script.blocks_an_sm(registers, warps, shared) == blocks


def _listing(*instructions: str) -> str:
    return "\n".join(f"/*{16 * i:04x}*/  {text} ;" for i, text in enumerate(instructions))


def test_loads_in_flight(script: Any) -> None:
    straight = _listing(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "@P0 LDG.E.64 R8, desc[UR4][R2.64+0x10]",
        "LDG.E.U16 R10, desc[UR4][R2.64]",
        "IADD3 R20, R9, R1, RZ",
        "LDG.E R12, desc[UR4][R2.64]",
        "FADD R0, R6, R10",
        "EXIT",
    )
    assert script.in_flight(straight) == 26
    # Before its loop 64 bytes are under way; within it a copy of 16 and two groups of 16 that are waited for later.
    looped = _listing(
        *[f"LDG.E.128 R{n}, desc[UR4][R2.64]" for n in (4, 8, 12, 16)],
        "FADD R4, R8, R12",
        "DEPBAR.LE SB0, 0x1",
        "LDS R20, [R21]",
        "LDGSTS.E.BYPASS.128 [R22], desc[UR4][R2.64]",
        "LDGDEPBAR",
        "@P0 BRA 0x50",
        "EXIT",
    )
    assert script.in_flight(looped) == 32


def _tables() -> dict[str, list[dict[str, Any]]]:
    """The page's rows after the change, by Triton's version."""
    after = PAGE.read_text().split("\n## After\n")[1].split("\n## ")[0]
    rows_by_op: dict[str, list[dict[str, Any]]] = {}
    for line in after.splitlines():
        if head := re.match(r"triton (\d+\.\d+)", line):
            rows = rows_by_op[head[1]] = []
        elif line.startswith("| ") and not line.startswith("| op "):
            op, case, kernel, *numbers = line.strip("| ").split(" | ")
            names = {"op": op, "case": case, "kernel": kernel.strip("`")}
            rows.append(names | dict(zip(COLUMNS, map(int, numbers), strict=False)))
    return rows_by_op


@pytest.mark.thorough
def test_no_kernel_gets_worse(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    """Registers, spills and occupancy depend on the compiler: compared with the table of the same Triton, if any."""
    triton = ".".join(version("triton").split(".")[:2])
    tables = _tables()
    if triton not in tables:
        pytest.skip(f"no table of triton {triton} in {PAGE.name}, which has {', '.join(tables)}")
    ops = list(dict.fromkeys(row["op"] for row in tables[triton]))
    for op in ops:
        recorded_rows = [row for row in tables[triton] if row["op"] == op]
        for row, measured in zip(recorded_rows, sm90(op), strict=True):
            assert all(row[name] == measured[name] for name in ("case", "kernel")), (row, measured)
            assert measured["occupancy"] >= row["occupancy"], (row, measured)
            assert measured["in_flight"] >= row["in_flight"], (row, measured)
            assert measured["spills"] <= row["spills"], (row, measured)
            assert measured["registers"] <= row["registers"] + 8, (
                row,
                measured,
            )  # a step of occupancy


def test_low_occupancy_and_spills_have_a_reason() -> None:
    """In bf16; other dtypes are there for adapters' gradients and tests."""
    tables = _tables()
    assert set(tables) == {"3.6", "3.9"}
    reasons = PAGE.read_text().split("\n## Below 25 %, or with spills\n")[1]
    wide = re.compile(r"fp16|fp32|fp64")
    for triton, rows in tables.items():
        assert len(rows) == 54
        for row in rows:
            if (row["occupancy"] < 25 or row["spills"]) and not wide.search(row["case"]):
                assert f"{row['case']} `{row['kernel']}`" in reasons, (triton, row)
