"""Waits for files that cannot be read: the storage is at fault (a remount, the network), not a sample."""

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo, make_one_line

T = TypeVar("T")


class UnreadableError(DitLoraError):
    """Raised if the machine cannot read existing data, or has lost a reading process; no sample is the cause."""

    def __init__(self, message: str) -> None:
        # A DataLoader raises the error again with the worker's traceback, which ends with the original message.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


MAX_WAIT_S = 60.0
"""Seconds for which a run retries a read. NFS and SMB clients recover within a minute of a remount."""
_POLL_S = 0.25

# 0 by default: commands and pages that only show files report a missing one immediately.
_max_wait_s = 0.0

# One byte of memory that forked data workers share, so that only one of them prints the message.
_WAIT_FLAG = mmap.mmap(-1, 1)


@contextmanager
def wait_for_storage() -> Iterator[None]:
    """Make reads wait for unreachable files inside the context, so that a network failure loses no samples."""
    global _max_wait_s
    # Restore the earlier value afterwards, so that the context can be nested.
    before, _max_wait_s = _max_wait_s, MAX_WAIT_S
    try:
        yield
    finally:
        _max_wait_s = before


def enable_waiting_in_worker(_worker: int) -> None:
    """Make this data worker wait for unreachable files, as the run that started it does."""
    global _max_wait_s
    _max_wait_s = MAX_WAIT_S


def waits_for_storage() -> bool:
    """True if this process waits for unreachable files."""
    return _max_wait_s > 0


def read_with_retry(read: Callable[[], T], folder: Path) -> T:
    """Call `read` until it raises no `OSError`; inside `wait_for_storage`, for up to `MAX_WAIT_S` after the first.

    The start and the end of the wait are each printed to stderr once.

    Args:
        read: Reads from the storage. Errors other than `OSError` belong to the file and pass through.
        folder: Folder to name in messages if the error names no file.

    Raises:
        UnreadableError: The storage did not come back; the message names the folder.
    """
    first_failure_s: float | None = None
    while True:
        try:
            result = read()
        except OSError as error:
            now = time.monotonic()
            location, problem = _describe_location(error, folder)
            # First failure inside `wait_for_storage`: start the clock and announce the wait.
            if first_failure_s is None and _max_wait_s:
                first_failure_s = now
                # Another worker may have announced the wait already.
                if not _WAIT_FLAG[0]:
                    _WAIT_FLAG[0] = 1
                    _print_line(f"waiting up to {_max_wait_s:g} s for the folder {location}: cannot read {problem}")
            # Outside a run, or after the longest wait: give up.
            elif first_failure_s is None or now - first_failure_s >= _max_wait_s:
                waited = f"waited {_max_wait_s:g} s for the folder {location}; no sample is left out because of it"
                advice = f"; {waited}, make it readable again" if _max_wait_s else ""
                raise UnreadableError(f"cannot read {problem}{advice}") from error
            time.sleep(_POLL_S)
            continue
        # Announce the end of the wait, unless another worker has done so.
        if first_failure_s is not None and _WAIT_FLAG[0]:
            # The next failure may be announced again.
            _WAIT_FLAG[0] = 0
            seconds = time.monotonic() - first_failure_s
            _print_line(f"the files can be read again after {seconds:.1f} s; nothing is left out")
        return result


def make_missing_file_error(path: Path) -> OSError:
    """Error of opening `path`; if it can be opened by now, the error for a file that does not exist."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return error
    # The file is readable again, so there is no error of the system that could be returned.
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _describe_location(error: OSError, folder: Path) -> tuple[str, str]:
    """Folder that may become reachable again, and the file that could not be read with the reason, as texts."""
    reason = error.strerror or str(error) or type(error).__name__
    # Errors of an open file have no name, so name the folder that the caller gave.
    if not isinstance(error.filename, str):
        return str(folder), reason
    return str(Path(error.filename).parent), f"{error.filename}: {reason}"


def _print_line(line: str) -> None:
    # Begin a new line: the current one may contain a progress bar.
    echo(f"\n{make_one_line(line)}", err=True)
