"""Files that are whole or not there, and files that grow by whole lines."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from dit_lora.parsing import parse_json


def write_whole(path: Path, data: bytes | str, mode: int | None = None) -> None:
    """Write a file by one rename: a failure or a kill leaves the old one, never half of the new.

    Text is UTF-8. Several processes may write the same path; the last one wins whole. A device, a pipe or
    `/dev/stdout` is written to, and not put away. `mode` are the file's permissions; by default the umask decides.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    if isinstance(data, str):
        data = data.encode("utf-8", errors="backslashreplace")
    try:
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
            return
        partial.write_bytes(data)
        if mode is not None:
            partial.chmod(mode)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def replace_contents(path: Path, data: bytes) -> None:
    """Write a user's file by one rename, and keep its permissions. Of a link, the file that it leads to is replaced."""
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    write_whole(target, data, mode)


def share_weights(folder: Path) -> None:
    """Give the safetensors files below a folder the permissions of any new file: safetensors makes them 0600."""
    private = [
        file
        for file in folder.rglob("*.safetensors")
        if not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o600
    ]
    if not private:
        return
    # A new file shows what the umask, or the folder's access list, gives: to ask for the umask would change it.
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in private:
        file.chmod(mode)


def _is_stream(path: Path) -> bool:
    """Return True for a device or pipe, and for an open file by its descriptor: a rename would replace Linux's
    entry for it.
    """
    places = (os.path.realpath(path.parent), os.readlink(path) if path.is_symlink() else "")
    is_descriptor = any(f"{place}/".startswith("/proc/") for place in places)
    return path.exists() and not path.is_dir() and (is_descriptor or not path.is_file())


def append_line(path: Path, text: str) -> None:
    """Append one line, on a line of its own whatever a killed writer left of the last one; raises `OSError`.

    A disk that takes only a part of it is left with none of it.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
    data = (b"\n" if torn else b"") + text.encode("utf-8", errors="backslashreplace") + b"\n"
    try:
        with path.open("ab", buffering=0) as file:
            if file.write(data) < len(data):
                file.write(data[file.tell() - end :])  # says why
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, end)
        error.filename = str(path)
        raise


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON-lines file, and how many of its lines are none: a killed process tears them."""
    if not path.exists():
        return [], 0
    objects, torn = [], 0
    for line in path.read_bytes().splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        elif line.strip():
            torn += 1
    return objects, torn
