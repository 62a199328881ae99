"""Errors that a user can act on, and the exit codes that go with them.

Exit codes: 0 done, 1 the thing checked is wrong, 2 bad usage or input, 3 the guard stopped the run,
130 interrupted, 143 preempted and resumable.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dit_lora.terminal import indented, one_line, printable

# What a user's disk or network can do to a run; any other OSError is a defect and keeps its traceback.
_OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

_RANK_0_SECONDS = 3.0


class DitLoraError(Exception):
    """Says what was wrong, what was received and what to do; it is shown without a traceback."""

    exit_code = 2
    collective = False
    """True if every rank raises it at the same point, after agreeing on it."""
    shown = False
    label = "error"


class CheckFailedError(DitLoraError):
    """The thing that was asked to be checked is wrong."""

    exit_code = 1


class InterruptedRunError(DitLoraError):
    """The run was asked to stop and saved its state first."""

    collective = True
    label = "stopped"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def listed(summary: str, offenders: Sequence[str]) -> str:
    """Return one line of summary, then every offender on a line of its own."""
    return "\n".join([summary, *(f"  - {offender}" for offender in offenders)])


def unwritable(error: OSError) -> DitLoraError:
    """Return the error that says what the disk did not take."""
    where = error.filename or "a file of the run"
    return DitLoraError(f"cannot write {where}: {error.strerror or error}")


def show(error: DitLoraError) -> None:
    """Write the message to stderr, once.

    Rank 0 speaks for all. An error that ranks have not agreed on may be one rank's alone: another rank waits
    for rank 0 to say it and end, when the launcher stops everybody, and speaks if that does not happen.
    """
    if error.shown:
        return
    error.shown = True
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        if error.collective:
            return
        time.sleep(_RANK_0_SECONDS)
    where = "" if rank == "0" else f" on rank {rank}"
    sys.stderr.write(f"{error.label}{where}: {indented(error)}\n")
    sys.stderr.flush()


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn a `DitLoraError`, or a disk that cannot be written, into a message on stderr and an exit code."""
    try:
        yield
    except DitLoraError as error:
        show(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        where = error.filename or "a file of the run or the cache"
        sys.stderr.write(
            printable(
                f"error: cannot read or write {one_line(where)}: {error.strerror}; checkpoints and cache entries "
                "already written are whole\n"
            )
        )
        sys.exit(DitLoraError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
