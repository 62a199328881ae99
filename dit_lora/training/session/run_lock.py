"""One process trains in a run's folder: a lock that a killed process cannot leave behind, on one host or on several.

The lock is the kernel's (flock), so it ends with its holder. Not every network filesystem passes it on to other
hosts. The file therefore says who holds it, and its time is set anew every `BEAT` seconds: a lock of another host is
live if it beats within `STALE` seconds. A job that Slurm has requeued, known by its number, need not wait for that.

filelock (4.2) does not replace it. Its `SoftFileLease` records host, pid and heartbeat, but takes the lock from a live
process of the same host that is paused for longer than the lease, always waits a whole lease for a dead host, and does
not know requeued jobs.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dit_lora.errors import DitLoraError
from dit_lora.files import open_inside, read_inside
from dit_lora.parsing import parse_json

LOCK = "run.lock"
BEAT, STALE = 10.0, 90.0
"""Seconds between signs of life, and seconds without one after which a process of another host counts as dead."""
_TRIES, _PAUSE = 10, 0.2
"""Tries, and seconds between them: whoever looks at a lock holds it for an instant."""
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names."""

    host: str
    boot: str
    """The id of this start of the host's kernel; hosts may share a name."""
    namespace: str
    """The namespace of its process ids: containers have their own."""
    pid: int
    born: float
    """The time at which the process began, by its host: ids come again."""
    since: str
    token: str
    """A token of this lock and no other."""
    job: str = ""
    """Slurm's number of the job, if there is one."""
    restarts: int = 0
    """Number of times that Slurm has requeued the job."""

    @classmethod
    def own(cls) -> "Holder":
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            boot=_of_kernel("/proc/sys/kernel/random/boot_id"),
            namespace=_of_kernel("/proc/self/ns/pid"),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
        )

    def shares_kernel(self, other: "Holder") -> bool:
        """Return True if both run on one kernel, as containers of one machine do, whatever they call themselves."""
        return self.boot == other.boot if self.boot else self.host == other.host

    def was_requeued_as(self, other: "Holder") -> bool:
        """Return True if Slurm started `other` in its place, which it does after its end."""
        return bool(self.job) and self.job == other.job and self.restarts < other.restarts

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host} (since {self.since}{job})"


class RunLock:
    """The lock of one run's folder. `say` tells the user why a start has to wait."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.path = folder / LOCK
        self._say = say
        self._handle = -1
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._lost: DitLoraError | None = None
        self._own: Holder | None = None

    def acquire(self) -> None:
        """Make the folder, if need be, and hold its lock until `release`; at once where nobody does.

        Raises `DitLoraError` if another process trains there. An earlier lock of this process gives way.
        """
        earlier = _held.get(self._key)
        if earlier is not None:
            earlier.release()
        try:
            self._make_folder()
            own = self._take()
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(asdict(own)).encode(), 0)
        except OSError as error:
            self._remove()
            raise DitLoraError(
                f"run.dir {self.path.parent} cannot be written: {self.path}: {error.strerror}"
            ) from error
        self._own = own
        _held[self._key] = self
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Let the lock go; a folder that was made for it and has nothing else goes too."""
        if self._handle < 0:
            return
        self._ended.set()
        _held.pop(self._key, None)
        self._remove()

    def _remove(self) -> None:
        """Let go of what is held, and leave nothing of it."""
        with suppress(OSError):
            if self._handle >= 0 and self._is_in_place():
                self.path.unlink()
        self._close()
        with suppress(OSError):  # there is a run in it now
            for folder in self._made:
                folder.rmdir()

    def lost(self) -> DitLoraError | None:
        """Return the error that another process has taken the folder, which held this one for dead; None if none
        has.
        """
        return self._lost

    @property
    def _key(self) -> str:
        return os.path.realpath(self.path)

    def _make_folder(self) -> None:
        folder = self.path.parent
        self._made = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)

    def _take(self) -> Holder:
        """Open and lock the file, once whoever it names is known to be dead."""
        own = Holder.own()
        for _ in range(_TRIES):
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            locked = _flock(self._handle, fcntl.LOCK_EX)
            if locked is False:
                self._close()
                time.sleep(_PAUSE)
                continue
            if not self._is_in_place():  # its holder let it go in between
                self._close()
                continue
            # The lock says nothing to a host that it is not passed on to; the file's text does.
            named = holder_of(self.path.parent)
            if named is not None and not self._is_over(named, own, honoured=locked is True):
                self._close()
                raise self._refusal(named)
            # Another process may have put a file of its own in this one's place meanwhile.
            if self._is_in_place():
                return own
            self._close()
        raise self._refusal(holder_of(self.path.parent))

    def _is_over(self, named: Holder, own: Holder, *, honoured: bool) -> bool:
        """Return True if the process that a file names has ended; `honoured` says that the kernel gave the lock."""
        # On one machine the kernel's word is enough; without its lock, the process itself is looked for.
        if named.shares_kernel(own):
            if honoured:
                return True
            if named.namespace == own.namespace:
                return not _is_running(named)
        if named.was_requeued_as(own):
            self._say(
                f"run.dir {self.path.parent}: Slurm has requeued this job, last on {named.host}"
            )
            return True
        return not self._beats(named)

    def _beats(self, named: Holder) -> bool:
        """Return True if a lock shows a sign of life; waits until it would have."""
        last = self._time()
        wait = min(STALE, STALE - (_now_at(self.path.parent) - last))
        if wait <= 0:
            return False
        self._say(
            f"run.dir {self.path.parent} was held by {named} {STALE - wait:.0f} s ago: waiting {wait:.0f} s "
            f"to see whether that lives (remove {self.path} if you know that it does not)"
        )
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(min(1.0, wait))
            if not self._is_in_place():
                return False
            if self._time() != last:
                return True
        return False

    def _beat(self) -> None:
        """Show signs of life; look whether the lock is still this process's."""
        while not self._ended.wait(BEAT):
            with suppress(OSError):  # a disk that is away for a while
                os.utime(self._handle)
                named = holder_of(self.path.parent)
                if named is not None and self._own is not None and named.token != self._own.token:
                    self._lost = DitLoraError(
                        f"run.dir {self.path.parent} was taken by {named}, which held this process for dead; "
                        "nothing more is written to it"
                    )
                    return

    def _time(self) -> float:
        """Return when the file was last changed; it is opened for that, as NFS remembers what it was told before."""
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.fstat(handle).st_mtime
        finally:
            os.close(handle)

    def _is_in_place(self) -> bool:
        """Return True if the open file is the one that has the name."""
        try:
            return os.path.samestat(os.fstat(self._handle), self.path.stat())
        except FileNotFoundError:
            return False

    def _refusal(self, named: Holder | None) -> DitLoraError:
        who = f"{named}" if named else "another process"
        return DitLoraError(
            f"run.dir {self.path.parent} is in use by {who}: wait for it, stop it, or choose another run.dir; "
            f"if it is certain that it has ended, remove {self.path}"
        )

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def holder_of(folder: Path) -> Holder | None:
    """Return the process that a run's lock names; None without a lock, or where it names none."""
    try:
        record = parse_json(read_inside(folder, folder / LOCK))
        return Holder(**{entry.name: record[entry.name] for entry in fields(Holder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_live(folder: Path) -> bool | None:
    """Return True if the process that a run's lock names still trains; None without a lock, or where nothing can
    tell.
    """
    path, named = folder / LOCK, holder_of(folder)
    if named is None:
        return None
    own = Holder.own()
    try:
        if time.time() - path.stat().st_mtime < STALE and not named.shares_kernel(own):
            return True
        with open_inside(folder, path) as file:
            locked = _flock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return None
    if locked is False:
        return True
    return False if locked and named.shares_kernel(own) else None


def _flock(handle: int, kind: int) -> bool | None:
    """Return True if the lock was given; None where the filesystem has none."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _is_running(named: Holder) -> bool:
    """Return True if a process of this host is the named one, and no later one with its id."""
    try:
        return abs(psutil.Process(named.pid).create_time() - named.born) < 1
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # another user's
        return True


def _now_at(folder: Path) -> float:
    """Return the time by the clock of the machine that keeps the folder."""
    probe = folder / f".{LOCK}.{os.getpid()}.clock"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _of_kernel(path: str) -> str:
    """Return what a file or a link of /proc says; nothing where there is none."""
    try:
        return os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip()
    except OSError:
        return ""


_held: dict[str, RunLock] = {}
"""Locks that this process holds."""


def _forget_in_child() -> None:
    """Close the locks in a forked worker, which may outlive this process for seconds and must not keep them."""
    for lock in _held.values():
        lock._close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
