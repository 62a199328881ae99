"""Atomic file writes, JSON-lines files, and safe reading of folders from untrusted sources."""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dit_lora.errors import DitLoraError
from dit_lora.parsing import ParseError, parse_json

MAX_TEXT_BYTES = 2**28
"""Size limit of a text file that is read completely. A tokenizer's JSON has 20 MB."""
MAX_LINE_BYTES = 2**24
"""Length limit of a line in a JSON-lines file; longer lines count as damaged."""
MAX_LINES_BYTES = 2**33
"""Size limit of a JSON-lines file."""
MAX_FOLDER_DEPTH = 32
"""Maximum depth of folders in a checkpoint, a result or a folder of samples."""
# Without O_NONBLOCK, opening a named pipe waits for a writer.
_LINK_REASON = "is a link, and links are not followed"
# Windows has O_BINARY instead.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def write_atomically(path: Path, data: bytes | str, mode: int | None = None, *, allow_stream: bool = True) -> None:
    """Write a file atomically, by renaming: after a failure or a kill the old file is still there, complete.

    Args:
        path: Several processes may write to it; the last one wins.
        data: Text is encoded as UTF-8.
        mode: File permissions; by default the umask decides.
        allow_stream: Write into a device, a pipe or `/dev/stdout` instead of replacing it. If false, replace it too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: renaming is atomic only within a file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    if isinstance(data, str):
        # Lone surrogates, from file names that are not UTF-8, become escapes.
        data = data.encode("utf-8", errors="backslashreplace")
    try:
        if allow_stream and _is_stream(path):
            with path.open("ab") as stream:
                stream.write(data)
            return
        # A killed process with the same id may have left it.
        partial.unlink(missing_ok=True)
        partial.touch(exist_ok=False)  # fails if somebody has put a link there
        partial.write_bytes(data)
        if mode is not None:
            partial.chmod(mode)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        # The user knows the file by this name, not by the temporary one.
        error.filename = str(path)
        raise


def write_json(path: Path, values: Mapping[str, Any] | list[Any]) -> None:
    """Write an indented JSON file atomically; raises `OSError`."""
    # JSON's encoder takes dicts, and no other mappings.
    content = dict(values) if isinstance(values, Mapping) else values
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk: a rename lasts once its folder is synced, and syncing a file does not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def overwrite_file_atomically(path: Path, data: bytes) -> None:
    """Overwrite a user's file atomically and keep its permissions. If it is a link, its target is overwritten."""
    # Renaming onto a link would replace the link.
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    write_atomically(target, data, mode)


def set_shared_permissions(folder: Path) -> None:
    """Give the safetensors files in a folder the permissions of new files; safetensors creates them with 0600."""
    private = [
        file
        for file in list_files(folder)
        if file.suffix == ".safetensors" and not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o600
    ]
    # Usually there is nothing to change, and no file is created.
    if not private:
        return
    # Create a file to see the permissions that umask or access lists give: reading the umask would change it.
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in private:
        file.chmod(mode)


@contextmanager
def write_folder_atomically(output_folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `output_folder`, which is renamed to it on success and removed on failure.

    With `replace`, a folder of that name is removed first, once the new one is complete.
    """
    # Next to the output, so that the final rename stays on one file system and is atomic.
    staged = output_folder.with_name(f".{output_folder.name}.partial")
    # A killed process may have left its folder.
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise DitLoraError(f"cannot make {output_folder.parent}: {error.strerror}") from error
    try:
        yield staged
        # Before the rename, so that nobody sees the folder with other permissions.
        set_shared_permissions(staged)
        if replace:
            shutil.rmtree(output_folder, ignore_errors=True)
        staged.rename(output_folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _is_stream(path: Path) -> bool:
    """True if a path to write to is a device, a pipe, or an open file descriptor, which a rename would replace."""
    locations = (os.path.realpath(path.parent), os.readlink(path) if path.is_symlink() else "")
    is_descriptor = any(f"{location}/".startswith("/proc/") for location in locations)
    return path.exists() and not path.is_dir() and (is_descriptor or not path.is_file())


def append_line(path: Path, text: str) -> None:
    """Append one line to a file; raises `OSError`.

    If a killed process has left an incomplete last line, a new line is started. If the disk accepts only a part of the
    line, the file is truncated to its old length.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        # The last byte; empty for an empty file.
        torn = file.read(1) not in (b"", b"\n")
    data = (b"\n" if torn else b"") + text.encode("utf-8", errors="backslashreplace") + b"\n"
    try:
        # Unbuffered: one system call, so that lines of several processes do not mix.
        with path.open("ab", buffering=0) as file:
            if file.write(data) < len(data):
                file.write(data[file.tell() - end :])  # the second attempt raises the reason
    except OSError as error:
        with suppress(OSError):
            # Remove the part that was written.
            os.truncate(path, end)
        error.filename = str(path)
        raise


def open_regular_file(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; links are followed.

    Raises `OSError` for anything else, such as a named pipe, from which reading could block forever, and for a file
    larger than `max_bytes`.
    """
    return _wrap_regular_file(os.open(path, _OPEN_FLAGS), path, max_bytes)


def open_file_inside_folder(folder: Path, path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file in a folder for reading, without following any link inside the folder.

    Raises `OSError` as `open_regular_file` does, and for a path that is, or leads through, a link.
    """
    parts = path.relative_to(folder).parts
    if not parts or ".." in parts:
        raise OSError(errno.ENXIO, f"is not a file below {folder}", str(path))
    if os.open not in os.supports_dir_fd:
        # Windows opens no file relative to a folder. A link that is swapped in after this check is followed.
        if any(os.path.islink(folder.joinpath(*parts[:depth])) for depth in range(1, len(parts) + 1)):
            raise OSError(errno.ENXIO, _LINK_REASON, str(path))
        return open_regular_file(path, max_bytes)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        error.filename = str(path)
        raise
    # Open one folder after another, relative to its parent: a link cannot be swapped in between.
    for depth, part in enumerate(parts, start=1):
        flags = _OPEN_FLAGS | os.O_NOFOLLOW | (os.O_DIRECTORY if depth < len(parts) else 0)
        try:
            inner = os.open(part, flags, dir_fd=handle)
        except OSError as error:
            error.filename = str(path)
            if os.path.islink(folder.joinpath(*parts[:depth])):
                raise OSError(errno.ENXIO, _LINK_REASON, str(path)) from error
            raise
        finally:
            os.close(handle)
        handle = inner
    return _wrap_regular_file(handle, path, max_bytes)


def _wrap_regular_file(handle: int, path: Path, max_bytes: int | None) -> BufferedReader:
    try:
        # Read from the open file, which cannot be replaced any more.
        status = os.fstat(handle)
        _require_regular_status(status, str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            reason = f"has {status.st_size:,} bytes, more than the limit of {max_bytes:,}"
            raise OSError(errno.ENXIO, reason, str(path))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _require_regular_status(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise OSError(errno.ENXIO, os.strerror(errno.EISDIR) if is_folder else "is not a regular file", path)


def can_open_inside_folder(folder: Path, path: Path, max_bytes: int | None = None) -> bool:
    """True if a path is a regular file in a folder that can be opened without following a link inside the folder."""
    try:
        open_file_inside_folder(folder, path, max_bytes).close()
    except OSError:
        return False
    return True


def read_file_inside_folder(folder: Path, path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file in a folder without following any link inside it. Raises as `open_file_inside_folder`."""
    with open_file_inside_folder(folder, path, max_bytes) as file:
        return file.read()


def read_regular_file(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file; links are followed. Raises `OSError` for other kinds of files, or more than `max_bytes`."""
    with open_regular_file(path, max_bytes) as file:
        return file.read()


def read_regular_files(paths: Iterable[str]) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield the bytes of small regular files, and their status from before; links are followed.

    For thousands of files: it takes a third of the time of `Path.stat` and `read_regular_file`. Raises `OSError` for
    other kinds of files.
    """
    for path in paths:
        handle = os.open(path, _OPEN_FLAGS)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                _require_regular_status(status, path)
            # One byte more, for a file that grows meanwhile.
            data = os.read(handle, status.st_size + 1)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(handle)
        yield data, status


def compute_sha256(path: Path) -> str:
    """SHA-256 of a regular file in hexadecimal. Raises as `open_regular_file`."""
    with open_regular_file(path) as file:
        # Reads in blocks, so that a checkpoint never lies in memory.
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_regular_files(folder: Path) -> None:
    """Raise `DitLoraError` if the folder or one of its subfolders holds a named pipe, a socket or a device.

    Libraries open the files of a checkpoint by name, and would wait forever on a pipe. Links are followed.
    """
    # A checkpoint has one level of subfolders, one for each component.
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise DitLoraError(f"{path} is not a regular file; remove it")


def list_files(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, sorted. Links to files are followed, links to folders are not.

    Raises `DitLoraError` if folders are nested more than `MAX_FOLDER_DEPTH` deep.
    """
    files, level = list[Path](), [folder]
    for _ in range(MAX_FOLDER_DEPTH):
        # One level of folders at a time, so that the depth is bounded.
        entries = [path for parent in level for path in parent.iterdir()]
        level = [path for path in entries if path.is_dir() and not path.is_symlink()]
        files += [path for path in entries if path.is_file()]
        if not level:
            return sorted(files)
    raise DitLoraError(f"{folder} has more than {MAX_FOLDER_DEPTH} levels of folders")


def read_json(path: Path) -> Any:
    """Read a JSON file; raises `OSError`, or `ParseError` that names the file.

    The file must be a regular one of at most `MAX_TEXT_BYTES`.
    """
    try:
        return parse_json(read_regular_file(path))
    except ParseError as error:
        raise ParseError(f"{path} is not valid JSON: {error}") from error


class JsonLines(NamedTuple):
    """The content of a JSON-lines file. A blank line is neither an object nor damaged."""

    objects: list[dict[str, Any]]
    damaged: list[bytes]
    """The beginnings of lines that are not JSON objects. Killed processes leave such lines, which begin with `{`."""


def read_json_lines(path: Path, *, follow_links: bool = False) -> JsonLines:
    """Read a JSON-lines file; empty if it does not exist.

    Raises `OSError` for anything but a regular file, and for links unless `follow_links`.
    """
    lines = JsonLines([], [])
    try:
        file = (
            open_regular_file(path, MAX_LINES_BYTES)
            if follow_links
            else open_file_inside_folder(path.parent, path, MAX_LINES_BYTES)
        )
    except FileNotFoundError:
        return lines
    with file:
        for line in iterate_bounded_lines(file):
            value = parse_json_object(line)
            if value is not None:
                lines.objects.append(value)
            elif line.strip():
                # The beginning is enough to tell a torn line from another kind of file.
                lines.damaged.append(line.strip()[:80])
    return lines


def iterate_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Lines longer than `MAX_LINE_BYTES` come in pieces of that length."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def parse_json_object(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if it is anything else."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
