"""The lists of mutants name what the sources have today: `run_mutants.py` breaks them and runs the tests."""

import runpy
from pathlib import Path

import pytest

import dit_lora_kernels

MUTANTS = Path(__file__).parent / "mutants"
# Of the op that they are named after.
PARTS = ("ada_norm_kernels", "qk_norm_rope_kernels")
OPS = sorted(path.stem for path in MUTANTS.glob("*.py"))


def test_every_op_has_a_list() -> None:
    sources = {path.stem for path in Path(dit_lora_kernels.__path__[0]).glob("*.py")}
    assert set(OPS) == sources - {"__init__", "support", *PARTS}


@pytest.mark.parametrize("op", OPS)
def test_each_mutant_changes_one_place_of_the_source(op: str) -> None:
    mutants = runpy.run_path(str(MUTANTS / f"{op}.py"))["MUTANTS"]
    assert len(mutants) >= 10
    assert len({(old, new) for _, old, new in mutants}) == len(mutants)
    folder = Path(dit_lora_kernels.__path__[0])
    files = [*folder.glob(f"{op}*.py"), folder / "support.py"]
    source = "".join(file.read_text() for file in files)
    for description, old, new in mutants:
        assert source.count(old) == 1, f"{description}: {old!r} occurs {source.count(old)} times"
        assert new != old, description
