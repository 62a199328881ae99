"""Files that are whole or not there."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file by one rename: a failure or a kill leaves the old one, never half of the new.

    Text is UTF-8. Several processes may write the same path; the last one wins whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if isinstance(data, str):
            data = data.encode("utf-8", errors="backslashreplace")
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise
