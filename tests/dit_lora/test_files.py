"""Whole or not there."""

import errno
import os
import threading
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


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux lists descriptors there")
def test_a_pipe_and_a_descriptor_are_written_to_and_stay(tmp_path: Path) -> None:
    """What `/dev/stdout` is a link to among them; a rename would put a file in the link's place."""
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == [b"through"]
    with (tmp_path / "out.txt").open("w+b") as file:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_whole(tmp_path / "stdout", "whole")
        write_whole(Path(f"/proc/self/fd/{file.fileno()}"), ", twice")
        assert (tmp_path / "out.txt").read_text() == "whole, twice"
    assert (tmp_path / "stdout").is_symlink()
