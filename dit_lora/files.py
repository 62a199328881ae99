"""Files that are whole or not there."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file by one rename: a failure or a kill leaves the old one, never half of the new.

    Text is UTF-8. Several processes may write the same path; the last one wins whole. A device, a pipe or
    `/dev/stdout` is written to, and not put away.
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
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def _is_stream(path: Path) -> bool:
    """Also an open file by its descriptor, as Linux lists them: a rename would put another in the list's place."""
    places = (os.path.realpath(path.parent), os.readlink(path) if path.is_symlink() else "")
    is_descriptor = any(f"{place}/".startswith("/proc/") for place in places)
    return path.exists() and not path.is_dir() and (is_descriptor or not path.is_file())
