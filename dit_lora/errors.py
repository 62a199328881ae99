"""Errors that a user can act on, and their exit codes.

Exit codes: 0 done, 1 a check failed, 2 bad usage or input, 3 the guard stopped the run, 130 interrupted, 143 preempted
and resumable.
"""

import errno
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from dit_lora.terminal import indent_lines, make_one_line, make_printable

# Errors caused by the user's disk or network. Any other OSError is a defect and keeps its traceback.
_DISK_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    # A path of the user's that is of the wrong kind.
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
}

# Time for rank 0 to report an error before other ranks do.
_RANK_0_HEAD_START_S = 3.0


class DitLoraError(Exception):
    """Base error of the package, shown to users without a traceback: what was wrong, what was received, what to do."""

    exit_code = 2
    collective = False
    """True if all ranks raise it together."""
    is_shown = False
    label = "error"


class CheckFailedError(DitLoraError):
    """Raised if a check that the user asked for has failed."""

    exit_code = 1


class InterruptedRunError(DitLoraError):
    """Raised if the run was asked to stop; its state has been saved first."""

    collective = True
    label = "stopped"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def format_list(summary: str, items: Sequence[str]) -> str:
    """Format a summary line, followed by one indented line for each item."""
    return "\n".join([summary, *(f"  - {offender}" for offender in items)])


def join_first_items(items: Collection[object], limit: int) -> str:
    """Join the first `limit` items with commas and count the rest, as in `a, b and 3 more`."""
    # The rest is only counted: a message with thousands of names would hide its beginning.
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return ", ".join(str(item) for item in list(items)[:limit]) + more


def format_event_kind(kind: str) -> str:
    """The kind of a guard event as text, such as "non-finite loss" for `non_finite_loss`."""
    return kind.replace("_", " ").replace("non finite", "non-finite")


def format_remaining_count(items: Collection[object]) -> str:
    """Text such as ` (and 3 more)` for the number of items after the first; empty for a single item."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def make_write_error(error: OSError) -> DitLoraError:
    """The `DitLoraError` for an `OSError` from writing: it names the file and the reason."""
    where = error.filename or "a file of the run"
    return DitLoraError(f"cannot write {where}: {error.strerror or error}")


def print_error(error: DitLoraError) -> None:
    """Write the message of an error to stderr, once.

    Rank 0 reports an error for all ranks. An error that is not collective may have happened on one rank only. That
    rank waits, so that rank 0 can report first and the launcher can end all processes; if it is still running then, it
    reports the error itself.
    """
    if error.is_shown:
        return
    error.is_shown = True
    # Set by torchrun and accelerate launch.
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        if error.collective:
            return
        time.sleep(_RANK_0_HEAD_START_S)
    where = "" if rank == "0" else f" on rank {rank}"
    # One call with the whole message, so that messages of several ranks are not mixed within a line.
    sys.stderr.write(f"{error.label}{where}: {indent_lines(error)}\n")
    sys.stderr.flush()


@contextmanager
def report_errors_and_exit(interrupted: str = "interrupted") -> Iterator[None]:
    """Context manager that turns a `DitLoraError`, or an error of the disk, into a message and an exit code.

    `interrupted` is the message for Ctrl-C.
    """
    try:
        yield
    except DitLoraError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _DISK_ERRNOS:
            raise
        where = error.filename or "a file of the run or the cache"
        sys.stderr.write(
            make_printable(
                f"error: cannot read or write {make_one_line(where)}: {error.strerror}; checkpoints and cache "
                "entries that were written before are complete\n"
            )
        )
        sys.exit(DitLoraError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write(make_printable(f"{interrupted}\n"))
        # 128 + SIGINT, as shells report it.
        sys.exit(130)
