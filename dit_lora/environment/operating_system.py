"""Calls that only some operating systems have, each with a plain fallback.

`fcntl` and `resource` are on Linux and macOS, `/proc` is on Linux only, and Windows has none of them. Nothing here
needs torch.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Both are missing on Windows. The functions below ask for them, so that callers need no test of the platform.
try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None  # type: ignore[assignment]

HAS_FILE_LOCKS = fcntl is not None
"""True if `lock_file` locks. Without it, two processes that write the same file are not kept apart."""
CAN_LIMIT_CHILDREN = resource is not None and hasattr(os, "fork")
"""True if a forked child process can be given limits on its memory."""
_NVIDIA_SMI_SECONDS = 10


def lock_file(handle: int, *, is_shared: bool = False, waits: bool = False) -> None:
    """Lock an open file until it is closed or its process ends. Does nothing without `HAS_FILE_LOCKS`.

    Args:
        handle: The file's descriptor.
        is_shared: Whether other processes may hold a shared lock too.
        waits: Whether to wait for another process's lock.

    Raises:
        BlockingIOError: Another process holds the lock, and `waits` is False.
        OSError: The filesystem has no locks.
    """
    # The kernel's lock ends with its process, however that ends; a lock file would stay.
    if HAS_FILE_LOCKS:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        fcntl.flock(handle, kind if waits else kind | fcntl.LOCK_NB)


def count_usable_cpus() -> int:
    """Number of CPU cores that this process may use; the machine's cores if the system has no affinity masks."""
    # Containers and Slurm give a process fewer cores than the machine has. Only Linux has these masks.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_peak_memory_bytes() -> int:
    """Peak resident memory of this process, or its present resident memory where the peak is not known."""
    if resource is None:
        memory = psutil.Process().memory_info()
        # Windows only.
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def limit_address_space(extra_bytes: int) -> None:
    """Limit this process's address space to what it uses now and `extra_bytes`. Without `/proc` it has no limit."""
    statm = Path("/proc/self/statm")
    if resource is None or not statm.exists():
        return
    # The first field of statm is the size of the address space in pages.
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, hard))


def get_max_open_files() -> int:
    """The limit on the number of open files of this process."""
    # An estimate, for closing copies of open files after a fork, which systems without `resource` do not have.
    return 4096 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def read_proc(path: str) -> str:
    """Content of a file, or target of a link, in /proc; empty if there is none."""
    # Namespaces are links, such as /proc/self/ns/pid, and everything else is a file.
    try:
        return os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip()
    except OSError:
        return ""


def get_process_age_s(pid: int) -> float:
    """Seconds since a process started."""
    try:
        # psutil is off by up to a second on Linux: the boot time in /proc is in whole seconds.
        # After the process name, which may contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process.
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except OSError:
        return time.time() - psutil.Process(pid).create_time()


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block Ctrl-C in this thread, and in processes started meanwhile, which inherit that."""
    # Windows has no masks: there a Ctrl-C reaches the new process too.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_forked_children(function: Callable[[], None]) -> None:
    """Call `function` in every process that is forked from this one. Windows does not fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def list_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them; empty without any."""
    # Set by a scheduler or the user: other GPUs of the machine are not ours to use.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    # By their ids, because CUDA and nvidia-smi may number the GPUs in different orders. Torch is not needed for this.
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # it is not installed, or finds no driver
        return []
    # One id in each line.
    return listed.stdout.split()
