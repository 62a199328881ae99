"""Wait for files that cannot be read: that is a fault of the storage (a remount, a network), not of a sample."""

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo, one_line

T = TypeVar("T")


class UnreadableError(DitLoraError):
    """Error of a machine that cannot read what is there, or has lost who reads it: no fault of a sample."""

    def __init__(self, message: str) -> None:
        # A DataLoader raises the error again with the worker's traceback as message, which ends
        # with the original one.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


MAX_WAIT_S = 60.0
"""Seconds for which a run tries a read again. NFS and SMB clients come back within a minute of a remount."""
_POLL_S = 0.25

# Commands and pages that only show files report a missing one at once.
_max_wait_s = 0.0

# One byte of shared memory: data workers are forked, and one of them speaks for all.
_IS_WAITING = mmap.mmap(-1, 1)


@contextmanager
def waiting() -> Iterator[None]:
    """Wait for files within: a run must not lose samples to a network that is away for a moment."""
    global _max_wait_s
    before, _max_wait_s = _max_wait_s, MAX_WAIT_S
    try:
        yield
    finally:
        _max_wait_s = before


def wait_in_worker(_worker: int) -> None:
    """Wait for files in this data worker, as the run that started it does."""
    global _max_wait_s
    _max_wait_s = MAX_WAIT_S


def is_waiting() -> bool:
    """Return True if files are waited for in this process."""
    return _max_wait_s > 0


def read_stored(read: Callable[[], T], folder: Path) -> T:
    """Call `read` until it raises no `OSError`; within `waiting`, for `MAX_WAIT_S` seconds after the first one.

    What is waited for is written to stderr once, and so is the end of the wait.

    Args:
        read: Reads from the storage. Errors other than `OSError` are the file's own and pass through.
        folder: Folder to name where the error names no file.

    Raises:
        UnreadableError: The storage did not come back; the message names the folder.
    """
    began: float | None = None
    while True:
        try:
            result = read()
        except OSError as error:
            now = time.monotonic()
            if began is None and _max_wait_s:
                began = now
                _say_once(error, folder)
            elif began is None or now - began >= _max_wait_s:
                raise UnreadableError(_message(error, folder)) from error
            time.sleep(_POLL_S)
            continue
        if began is not None:
            _say_it_is_back(time.monotonic() - began)
        return result


def missing_file(path: Path) -> OSError:
    """Return the error of opening `path`; where it can be opened by now, the error of a file that is not there."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return error
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _names(error: OSError, folder: Path) -> tuple[str, str]:
    """Return the folder that is waited for, and what could not be read, with the system's reason."""
    reason = error.strerror or str(error) or type(error).__name__
    if not isinstance(error.filename, str):
        return str(folder), reason
    return str(Path(error.filename).parent), f"{error.filename}: {reason}"


def _message(error: OSError, folder: Path) -> str:
    where, what = _names(error, folder)
    if not _max_wait_s:
        return f"cannot read {what}"
    return (
        f"cannot read {what}; waited {_max_wait_s:g} s for the folder {where}: no sample is left out for that, make it "
        "readable again"
    )


def _say_once(error: OSError, folder: Path) -> None:
    if _IS_WAITING[0]:
        return
    _IS_WAITING[0] = 1
    where, what = _names(error, folder)
    _say(f"waiting up to {_max_wait_s:g} s for the folder {where}: cannot read {what}")


def _say_it_is_back(seconds: float) -> None:
    if _IS_WAITING[0]:
        _IS_WAITING[0] = 0
        _say(f"the files can be read again after {seconds:.1f} s; nothing is left out")


def _say(line: str) -> None:
    # A progress bar may stand in the current line.
    echo(f"\n{one_line(line)}", err=True)
