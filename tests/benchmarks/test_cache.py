"""The benchmark of the cache: both ways of reading read the same entries, and every figure is printed."""

from pathlib import Path
from typing import Any

import pytest
from launching import ROOT


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import cache as module

    return module


def test_reading_is_compared_and_holding_is_measured(
    cache: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = cache.write(tmp_path, cache.small, 100, 16)
    cells = cache.measure("small", tmp_path, keys, 4096, 3).strip("| ").split(" | ")
    assert cells[:3] == ["small", "0.00", "7"]
    assert all(float(cell.split()[0]) > 0 for cell in cells[3:])
    cache.hold(tmp_path)
    output = capsys.readouterr().out
    assert "opening 100 entries" in output
    assert output.count("\n| 1") == 3  # after 1, 10 and 100 reads


def test_a_damaged_entry_is_no_figure(cache: Any, tmp_path: Path) -> None:
    (key, *_) = cache.write(tmp_path, cache.small, 2, 2)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(cache.DitLoraError, match=r"digest differs|beyond|NaN"):
        cache.ours(tmp_path, clone=False)(key)
