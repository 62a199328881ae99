"""Locks a run's folder for one process, on one host or several; a killed process leaves no lock behind.

The lock is the kernel's (flock), so it ends with its holder. Not every network filesystem forwards it to other hosts.
Therefore the file names its holder, and its mtime is updated every `BEAT` seconds: a lock of another host is live if
it was updated within `STALE` seconds. A requeued Slurm job is recognized by its number, and need not wait for that.

filelock (4.2) does not replace this. Its `SoftFileLease` records host, pid and heartbeat, but takes the lock from a
live process of the same host that is paused for longer than the lease, always waits a whole lease for a dead host, and
does not recognize requeued jobs.
"""

import errno
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

from dit_lora.environment.operating_system import HAS_FILE_LOCKS, lock_file, read_proc, run_in_forked_children
from dit_lora.errors import DitLoraError
from dit_lora.files import open_file_inside_folder, read_file_inside_folder
from dit_lora.parsing import parse_json

LOCK_FILE = "run.lock"
BEAT, STALE = 10.0, 90.0
"""Seconds between heartbeats, and seconds without one after which a process of another host counts as dead."""
_TRIES, _PAUSE = 10, 0.2
"""Tries, and seconds between them: a process that inspects a lock holds it for an instant."""
_NO_FLOCK_ERRNOS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class LockHolder:
    """Identity of the process that a run's lock file names."""

    host: str
    boot: str
    """The id of the host's kernel boot; hosts may share a name."""
    namespace: str
    """The namespace of its process ids: each container has its own."""
    pid: int
    born: float
    """Start time of the process, by its host's clock: process ids are reused."""
    since: str
    token: str
    """A random token, unique to this lock."""
    job: str = ""
    """Slurm's job number; empty without Slurm."""
    restarts: int = 0
    """Number of times that Slurm has requeued the job."""

    @classmethod
    def from_this_process(cls) -> "LockHolder":
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            boot=read_proc("/proc/sys/kernel/random/boot_id"),
            namespace=read_proc("/proc/self/ns/pid"),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(8),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
        )

    def runs_on_same_kernel(self, other_holder: "LockHolder") -> bool:
        """True if two processes run on one kernel, as containers of one machine do, whatever their host names."""
        return self.boot == other_holder.boot if self.boot else self.host == other_holder.host

    def was_requeued_as(self, other_holder: "LockHolder") -> bool:
        """True if `other_holder` is Slurm's restart of this job, which happens only after this process has ended."""
        return bool(self.job) and self.job == other_holder.job and self.restarts < other_holder.restarts

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host} (since {self.since}{job})"


class RunLock:
    """The lock of one run's folder. `say` tells the user why a start must wait."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.path = folder / LOCK_FILE
        self._say = say
        self._file_descriptor = -1
        self._created_folders: list[Path] = []
        self._stop_event = threading.Event()
        self._takeover_error: DitLoraError | None = None
        self._holder: LockHolder | None = None

    def acquire(self) -> None:
        """Create the run's folder if necessary, and hold its lock. Waits only if the holder may be alive elsewhere.

        Raises `DitLoraError` if another process trains there. An earlier lock of this process is released.
        """
        # flock also conflicts within a process: without the release this run would be refused.
        earlier = _held_locks.get(self._real_path)
        if earlier is not None:
            earlier.release()
        folder = self.path.parent
        try:
            self._created_folders = [part for part in (folder, *folder.absolute().parents) if not part.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            holder = self._lock_file()
            # The lock is held: name this process as its holder.
            os.ftruncate(self._file_descriptor, 0)
            os.pwrite(self._file_descriptor, json.dumps(asdict(holder)).encode(), 0)
        except OSError as error:
            self._remove_lock()
            raise DitLoraError(f"cannot write run.dir {folder}: {self.path}: {error.strerror}") from error
        self._holder = holder
        _held_locks[self._real_path] = self
        # A daemon thread: it must not keep a finished process alive.
        threading.Thread(target=self._update_heartbeat, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Release the run's lock. A folder that was created for it and is otherwise empty is deleted."""
        if self._file_descriptor < 0:
            return
        self._stop_event.set()
        _held_locks.pop(self._real_path, None)
        self._remove_lock()

    def _remove_lock(self) -> None:
        """Release the run's lock and delete its file, and folders created for it."""
        with suppress(OSError):
            if self._file_descriptor >= 0 and self._is_same_file():
                self.path.unlink()
        self._close_lock_file()
        # Fails if the folder is not empty: a run is in it.
        with suppress(OSError):
            # The innermost folder comes first.
            for folder in self._created_folders:
                folder.rmdir()

    def get_run_folder_takeover_error(self) -> DitLoraError | None:
        """Error saying that another process has taken the run's folder, believing this one dead; None if none has."""
        return self._takeover_error

    @property
    def _real_path(self) -> str:
        return os.path.realpath(self.path)

    def _lock_file(self) -> LockHolder:
        """Open and lock the run's lock file, once the process that it names is known to be dead."""
        this_process = LockHolder.from_this_process()
        for _ in range(_TRIES):
            # Without O_TRUNC: the file still names the last holder. Python keeps it out of child programs.
            self._file_descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            locked = _try_lock(self._file_descriptor)
            # Another process holds it, perhaps only to look at it: try again.
            if locked is False:
                self._close_lock_file()
                time.sleep(_PAUSE)
                continue
            # Its holder released it in between.
            if not self._is_same_file():
                self._close_lock_file()
                continue
            # A host to which the filesystem does not forward locks can only read the file's text.
            holder = read_holder(self.path.parent)
            if holder is not None and not self._has_holder_ended(holder, this_process, is_granted=locked is True):
                self._close_lock_file()
                raise self._make_in_use_error(holder)
            # Another process may have replaced the file meanwhile.
            if self._is_same_file():
                return this_process
            self._close_lock_file()
        raise self._make_in_use_error(read_holder(self.path.parent))

    def _has_holder_ended(self, holder: LockHolder, this_process: LockHolder, *, is_granted: bool) -> bool:
        """True if the process named in the lock file has ended. `is_granted`: the kernel granted the lock."""
        # On one machine the kernel's lock is proof; without it, look for the process itself.
        if holder.runs_on_same_kernel(this_process):
            if is_granted:
                return True
            # Process ids can be compared only within one namespace.
            if holder.namespace == this_process.namespace:
                return not _is_running(holder)
        if holder.was_requeued_as(this_process):
            self._say(f"run.dir {self.path.parent}: Slurm has requeued this job, last on {holder.host}")
            return True
        return not self._has_heartbeat(holder)

    def _has_heartbeat(self, holder: LockHolder) -> bool:
        """True if the run's lock shows a heartbeat; waits as long as one may take."""
        # The rest of `STALE` by the file server's clock, because hosts' clocks may differ.
        last_beat = self._read_mtime()
        # At most `STALE`, even if the file's time is in the future.
        wait = min(STALE, STALE - (_read_server_time(self.path.parent) - last_beat))
        if wait <= 0:
            return False
        self._say(
            f"run.dir {self.path.parent} was held by {holder} {STALE - wait:.0f} s ago: waiting {wait:.0f} s "
            f"to see whether it is running (if it is not, remove {self.path})"
        )
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(min(1.0, wait))
            if not self._is_same_file():
                return False
            if self._read_mtime() != last_beat:
                return True
        return False

    def _update_heartbeat(self) -> None:
        """Update the heartbeat of the run's lock, and check that the lock still belongs to this process."""
        while not self._stop_event.wait(BEAT):
            # The disk may be unavailable for a while.
            with suppress(OSError):
                # The heartbeat: sets the mtime to the present time.
                os.utime(self._file_descriptor)
                holder = read_holder(self.path.parent)
                if holder is not None and self._holder is not None and holder.token != self._holder.token:
                    self._takeover_error = DitLoraError(
                        f"run.dir {self.path.parent} was taken over by {holder}, because this process seemed to have "
                        "ended; nothing more is written to it"
                    )
                    return

    def _read_mtime(self) -> float:
        """Modification time of the lock file. It is opened for that, because NFS caches attributes."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            return os.fstat(handle).st_mtime
        finally:
            os.close(handle)

    def _is_same_file(self) -> bool:
        """True if the open lock file is still the file at its path."""
        try:
            return os.path.samestat(os.fstat(self._file_descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _make_in_use_error(self, holder: LockHolder | None) -> DitLoraError:
        holder_text = f"{holder}" if holder else "another process"
        return DitLoraError(
            f"run.dir {self.path.parent} is in use by {holder_text}; wait for it, stop it, or choose another "
            f"run.dir. If it has certainly ended, remove {self.path}"
        )

    def _close_lock_file(self) -> None:
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
        self._file_descriptor = -1


def read_holder(folder: Path) -> LockHolder | None:
    """The process that a run's lock names; None without a lock, or if it is unreadable."""
    try:
        record = parse_json(read_file_inside_folder(folder, folder / LOCK_FILE))
        return LockHolder(**{entry.name: record[entry.name] for entry in fields(LockHolder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_run_active(folder: Path) -> bool | None:
    """True if the process that a run's lock names is still training; None without a lock, or if it is unknown."""
    path, holder = folder / LOCK_FILE, read_holder(folder)
    if holder is None:
        return None
    this_process = LockHolder.from_this_process()
    try:
        if time.time() - path.stat().st_mtime < STALE and not holder.runs_on_same_kernel(this_process):
            return True
        with open_file_inside_folder(folder, path) as file:
            # A shared lock for an instant: closing the file releases it.
            locked = _try_lock(file.fileno(), is_shared=True)
    except OSError:
        return None
    if locked is False:
        return True
    # On the same kernel a granted lock proves that the holder has ended; elsewhere it proves nothing.
    return False if locked and holder.runs_on_same_kernel(this_process) else None


def _try_lock(handle: int, *, is_shared: bool = False) -> bool | None:
    """True if the kernel granted the file lock; None if the system or the filesystem has no locks."""
    if not HAS_FILE_LOCKS:
        return None
    try:
        lock_file(handle, is_shared=is_shared)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK_ERRNOS:
            return None
        raise
    return True


def _is_running(holder: LockHolder) -> bool:
    """True if this host runs the named process, and not a later one with the same id."""
    try:
        # Start times are rounded, so allow for a second.
        return abs(psutil.Process(holder.pid).create_time() - holder.born) < 1
    except psutil.NoSuchProcess:
        return False
    # A process of another user exists, but cannot be inspected.
    except psutil.Error:
        return True


def _read_server_time(folder: Path) -> float:
    """The present time by the clock of the machine that stores the folder."""
    probe = folder / f".{LOCK_FILE}.{os.getpid()}.clock"
    # The machine that stores the file sets its time.
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


_held_locks: dict[str, RunLock] = {}
"""Locks that this process holds."""


def _close_locks_in_child() -> None:
    """Close the run locks in a forked worker, which may outlive this process by seconds and must not hold them."""
    for lock in _held_locks.values():
        lock._close_lock_file()
    _held_locks.clear()


run_in_forked_children(_close_locks_in_child)
