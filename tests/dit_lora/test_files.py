"""Whole or not there, and lines that stay whole."""

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dit_lora.config.data import DataConfig
from dit_lora.config.load import load_recipe
from dit_lora.data.chat.json_records import read_records
from dit_lora.data.sources.scan import scan_sources
from dit_lora.data.sources.tables import read_text
from dit_lora.environment.versions import read_launch_config
from dit_lora.errors import DitLoraError
from dit_lora.files import (
    append_line,
    list_files,
    open_regular_file,
    overwrite_file_atomically,
    read_file_inside_folder,
    read_json_lines,
    require_regular_files,
    set_shared_permissions,
    write_atomically,
    write_folder_atomically,
)
from dit_lora.models.videochat2.released import read_released_weights


def test_it_replaces_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomically(path, "naïve")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    write_atomically(path, "old")

    def fill(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(path, "something longer")
    assert error.value.filename == str(path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux lists descriptors there")
def test_a_pipe_and_a_descriptor_are_written_to_and_stay(tmp_path: Path) -> None:
    """What `/dev/stdout` is a link to among them; a rename would put a file in the link's place."""
    pipe, contents = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: contents.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, "through")
    reader.join(10)
    assert contents == [b"through"]
    with (tmp_path / "out.txt").open("w+b") as file:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_atomically(tmp_path / "stdout", "whole")
        write_atomically(Path(f"/proc/self/fd/{file.fileno()}"), ", twice")
        assert (tmp_path / "out.txt").read_text() == "whole, twice"
    assert (tmp_path / "stdout").is_symlink()


def test_a_line_is_never_joined_to_one_that_a_killed_process_tore(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, '{"step": 1}')
    with path.open("ab") as file:
        file.write(b'{"step": 2, "words": "na\xc3')  # in the middle of a letter too
    append_line(path, '{"step": 3}')
    append_line(path, '{"step": 4}')
    objects, damaged = read_json_lines(path)
    assert objects == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert len(damaged) == 1
    assert read_json_lines(tmp_path / "nowhere.jsonl") == ([], [])


def test_a_disk_that_takes_a_part_of_a_line_is_left_with_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 1}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            append_line(path, '{"step": 2}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(path)
    assert path.read_text() == '{"step": 1}\n'


def test_a_users_file_keeps_its_permissions_and_a_new_one_has_those_of_the_umask(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        overwrite_file_atomically(tmp_path / "new", b"x")
        overwrite_file_atomically(tmp_path / "old", b"x")
        (tmp_path / "old").chmod(0o604)
        overwrite_file_atomically(tmp_path / "old", b"y")
        for name in ("private", "shared"):
            (tmp_path / f"{name}.safetensors").touch()
        (tmp_path / "private.safetensors").chmod(0o600)
        (tmp_path / "shared.safetensors").chmod(0o604)
        set_shared_permissions(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    weights = {"private.safetensors": 0o640, "shared.safetensors": 0o604}
    assert modes == {"new": 0o640, "old": 0o604, **weights}


def test_a_staged_folder_gets_its_name_only_when_complete(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    (tmp_path / "new" / ".out.partial" / "left_by_a_kill").mkdir(parents=True)
    with write_folder_atomically(folder) as staged:
        (staged / "file").write_text("first")
        assert not folder.exists()
    with pytest.raises(FileNotFoundError), write_folder_atomically(folder, replace=True) as staged:
        (staged / "no_folder" / "file").write_text("second")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "first"
    with write_folder_atomically(folder, replace=True) as staged:
        (staged / "other").touch()
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert [path.name for path in folder.iterdir()] == ["other"]


def test_files_below_a_folder_are_opened_through_no_link(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    outside.mkdir()
    for directory in (folder / "a", outside):
        (directory / "file").write_text("text")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    (tmp_path / "named").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    assert read_file_inside_folder(folder, folder / "a" / "file") == b"text"
    # The folder itself is the user's to name.
    assert read_file_inside_folder(tmp_path / "named", tmp_path / "named" / "a" / "file") == b"text"
    for name, reason in {
        "link/file": "is a link",
        "file": "is a link",
        "pipe": "not a regular file",
        "a": "Is a directory",
        "a/../../outside/file": "not a file below",
    }.items():
        with pytest.raises(OSError, match=reason):
            read_file_inside_folder(folder, folder / name)
    with pytest.raises(OSError, match="4 bytes, more than the limit of 3"):
        read_file_inside_folder(folder, folder / "a" / "file", 3)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular_file(folder / "pipe")
    with pytest.raises(DitLoraError, match="pipe is not a regular file"):
        require_regular_files(tmp_path)


def test_links_are_not_followed_where_no_file_is_opened_relative_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "file").write_bytes(b"text")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "a")
    assert read_file_inside_folder(tmp_path / "run", tmp_path / "run" / "a" / "file") == b"text"
    with pytest.raises(OSError, match="is a link"):
        read_file_inside_folder(tmp_path / "run", tmp_path / "run" / "link" / "file")


def test_a_file_is_not_written_through_a_link_that_waits_for_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    path = tmp_path / "report.html"
    path.with_name(f".{path.name}.{os.getpid()}.partial").symlink_to(outside)
    write_atomically(path, "ours")
    assert (outside.read_text(), path.read_text()) == ("theirs", "ours")
    path.unlink()
    os.mkfifo(path)
    write_atomically(path, "ours", allow_stream=False)
    assert path.read_text() == "ours"


def test_folders_nested_without_end_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(80):
        folder /= "d"
    folder.mkdir(parents=True)
    (folder / "a.png").touch()
    (tmp_path / "b.png").touch()
    for read_folder in (
        lambda: list_files(tmp_path),
        lambda: scan_sources(DataConfig(path=str(tmp_path), height=32, width=32)),
    ):
        with pytest.raises(DitLoraError, match="more than 32 levels of folders"):
            read_folder()
    assert [path.name for path in list_files(folder.parent)] == ["a.png"]


@pytest.mark.parametrize(
    "read",
    [load_recipe, read_launch_config, lambda path: list(read_records(path)), read_text, read_released_weights],
    ids=["recipe", "Accelerate config", "annotations", "table", ".pth"],
)
def test_a_named_pipe_or_a_folder_in_place_of_a_users_file_is_one_line(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    """Without its writer, a pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path, "(is not a regular|Is a directory)"),
    ):
        with pytest.raises(DitLoraError, match=reason) as error:
            read(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
