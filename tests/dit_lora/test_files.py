"""Whole or not there."""

import errno
from pathlib import Path

import pytest

from dit_lora.files import write_whole


def test_it_replaces_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_whole(path, "naïve")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.txt"
    write_whole(path, "old")

    def fill(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left") as error:
        write_whole(path, "something longer")
    assert error.value.filename == str(path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]
