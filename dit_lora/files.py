"""Files that are whole or not there, files that grow by whole lines, and files of folders that strangers wrote."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from dit_lora.errors import DitLoraError
from dit_lora.parsing import ParseError, parse_json

MAX_TEXT_BYTES = 2**28
"""The largest file that is read into memory whole as text. A tokenizer's JSON has 20 MB."""
MAX_LINE_BYTES = 2**24
"""The longest line of a JSON-lines file; a longer one is skipped as torn."""
MAX_LINES_BYTES = 2**33
"""The largest JSON-lines file."""
MAX_FOLDERS = 32
"""Folders within one another in a checkpoint, a result or a folder of samples."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe would wait for its writer


def write_whole(
    path: Path, data: bytes | str, mode: int | None = None, *, allow_stream: bool = True
) -> None:
    """Write a file by one rename: a failure or a kill leaves the old one, never half of the new.

    Text is UTF-8. Several processes may write the same path; the last one wins whole. A device, a pipe or
    `/dev/stdout` is written to, and not put away, unless `allow_stream` is false: then it is replaced as any file
    is. `mode` are the file's permissions; by default the umask decides.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    if isinstance(data, str):
        data = data.encode("utf-8", errors="backslashreplace")
    try:
        if allow_stream and _is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
            return
        partial.unlink(missing_ok=True)
        partial.touch(exist_ok=False)  # never through a link of that name
        partial.write_bytes(data)
        if mode is not None:
            partial.chmod(mode)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def replace_contents(path: Path, data: bytes) -> None:
    """Write a user's file with one rename and its permissions kept. If it is a link, its target is replaced."""
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    write_whole(target, data, mode)


def share_weights(folder: Path) -> None:
    """Give the safetensors files below a folder the permissions of any new file: safetensors makes them 0600."""
    private = [
        file
        for file in files_below(folder)
        if file.suffix == ".safetensors"
        and not file.is_symlink()
        and stat.S_IMODE(file.stat().st_mode) == 0o600
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


def open_regular(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; links are followed.

    Raises `OSError` for anything else, such as a named pipe, on which reading could wait for ever, and for a file
    of more than `max_bytes`.
    """
    return _regular(os.open(path, _OPEN), path, max_bytes)


def open_inside(folder: Path, path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file below a folder for reading; no link below the folder is followed.

    Raises `OSError` as `open_regular`, and for a path that is, or leads through, a link.
    """
    parts = path.relative_to(folder).parts
    if not parts or ".." in parts:
        raise OSError(errno.ENXIO, f"is not a file below {folder}", str(path))
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        error.filename = str(path)
        raise
    for place, part in enumerate(parts, start=1):
        flags = _OPEN | os.O_NOFOLLOW | (os.O_DIRECTORY if place < len(parts) else 0)
        try:
            inner = os.open(part, flags, dir_fd=handle)
        except OSError as error:
            error.filename = str(path)
            if os.path.islink(folder.joinpath(*parts[:place])):
                raise OSError(errno.ENXIO, "is a link, which is not followed", str(path)) from error
            raise
        finally:
            os.close(handle)
        handle = inner
    return _regular(handle, path, max_bytes)


def _regular(handle: int, path: Path, max_bytes: int | None) -> BufferedReader:
    status = os.fstat(handle)
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    elif max_bytes is not None and status.st_size > max_bytes:
        reason = f"has {status.st_size:,} bytes, and {max_bytes:,} are read at most"
    if reason:
        os.close(handle)
        raise OSError(errno.ENXIO, reason, str(path))
    return os.fdopen(handle, "rb")


def is_inside(folder: Path, path: Path, max_bytes: int | None = None) -> bool:
    """True for a file that `open_inside` opens."""
    try:
        open_inside(folder, path, max_bytes).close()
    except OSError:
        return False
    return True


def read_inside(folder: Path, path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file as `open_inside` opens it."""
    with open_inside(folder, path, max_bytes) as file:
        return file.read()


def read_regular(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file as `open_regular` opens it."""
    with open_regular(path, max_bytes) as file:
        return file.read()


def require_regular(folder: Path) -> None:
    """Raise `DitLoraError` if the folder or one of its folders holds a named pipe, a socket or a device.

    Libraries open whatever a checkpoint's folder holds by name, and would wait for ever. Links are followed.
    """
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise DitLoraError(f"{path} is not a regular file; remove it")


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted; links are followed to files, and not to folders.

    Raises `DitLoraError` if folders lie deeper within one another than `MAX_FOLDERS`.
    """
    found, level = list[Path](), [folder]
    for _ in range(MAX_FOLDERS):
        entries = [path for one in level for path in one.iterdir()]
        level = [path for path in entries if path.is_dir() and not path.is_symlink()]
        found += [path for path in entries if path.is_file()]
        if not level:
            return sorted(found)
    raise DitLoraError(f"{folder} has more than {MAX_FOLDERS} folders within one another")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raises `OSError`, or `ParseError` that names the file.

    The file must be a regular one, of at most `MAX_TEXT_BYTES`.
    """
    try:
        return parse_json(read_regular(path))
    except ParseError as error:
        raise ParseError(f"{path} is not valid JSON: {error}") from error


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON-lines file, and how many of its lines are none: a killed process tears them.

    Raises `OSError` for a link and for anything but a regular file.
    """
    objects, torn = list[dict[str, Any]](), 0
    try:
        file = open_inside(path.parent, path, MAX_LINES_BYTES)
    except FileNotFoundError:
        return [], 0
    with file:
        for line in bounded_lines(file):
            value = json_object(line)
            if value is not None:
                objects.append(value)
            elif line.strip():
                torn += 1
    return objects, torn


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is longer than `MAX_LINE_BYTES`, pieces of that length."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line holds; None for anything else."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
