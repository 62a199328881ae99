"""Files that strangers may have written are read to a result or one line of error: the quick part of the fuzzing."""

from pathlib import Path

import pytest

from benchmarks.fuzz.__main__ import fuzz
from benchmarks.fuzz.parsers import PARSERS, Parser


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_ends_in_a_result_or_one_line(name: str, tmp_path: Path) -> None:
    assert [str(finding) for finding in fuzz(name, range(30), 0, tmp_path)] == []


def test_what_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "a.json").write_text('{"needed": 1, "steps": [1, 2]}')

    def careless(folder: Path) -> bool:
        if b"needed" not in (folder / "a.json").read_bytes():
            raise KeyError("needed")
        return True

    monkeypatch.setitem(PARSERS, "careless", Parser(write, careless, required=("needed",)))
    finding_names = {finding.problem for finding in fuzz("careless", range(60), 0, tmp_path)}
    assert "certain damage was accepted" in finding_names
    assert any(name.startswith("KeyError at") for name in finding_names)
