"""One process a folder: live ones are told from dead ones, on this host and on others, and nobody waits in vain."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dit_lora.errors import DitLoraError
from dit_lora.report.run.files import RunReader
from dit_lora.training.session import run_lock
from dit_lora.training.session.run_lock import LOCK_FILE, LockHolder, RunLock, is_run_active, read_holder

HOLD = """
import os, sys, time
from pathlib import Path
from dit_lora.training.session.run_lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
child = os.fork()  # as a worker process of a DataLoader
print(child, flush=True) if child else None
time.sleep(60)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock, and has a forked child that outlives it."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        yield holder
    finally:
        holder.kill()
        holder.wait()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def elsewhere(tmp_path: Path) -> LockHolder:
    """The holder of a lock that a process of another host left in the folder."""
    holder = replace(LockHolder.from_this_process(), host="node7", boot="another", pid=1, job="88", token="t")
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(holder)))
    return holder


def age(folder: Path, seconds: float) -> None:
    modified_at = time.time() - seconds
    os.utime(folder / LOCK_FILE, (modified_at, modified_at))


def test_a_second_process_is_refused_by_pid_and_host_and_a_killed_one_hinders_nobody(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    (tmp_path / "status.json").write_text('{"state": "running"}')
    with held_elsewhere(tmp_path) as other_process:
        before = (tmp_path / LOCK_FILE).read_bytes()
        named = read_holder(tmp_path)
        assert named is not None
        with pytest.raises(DitLoraError) as error:
            RunLock(tmp_path).acquire()
        assert f"is in use by process {other_process.pid} on {named.host} (since" in str(error.value)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 2
        assert (tmp_path / LOCK_FILE).read_bytes() == before
        assert is_run_active(tmp_path) is True
        assert RunReader(tmp_path).read().state == "running"
        other_process.kill()
        other_process.wait()
        assert is_run_active(tmp_path) is False
        assert RunReader(tmp_path).read().state == "silent"
        messages: list[str] = []
        lock = RunLock(tmp_path, messages.append)
        lock.acquire()
        assert messages == []  # it does not wait
        lock.release()
    assert is_run_active(tmp_path) is None


def test_a_paused_process_keeps_its_folder_however_old_its_last_beat_is(tmp_path: Path) -> None:
    """A lease such as filelock's would expire: the paused process would then resume in another run's folder."""
    with held_elsewhere(tmp_path) as other_process:
        other_process.send_signal(signal.SIGSTOP)
        age(tmp_path, 1000)
        assert is_run_active(tmp_path) is True
        with pytest.raises(DitLoraError, match=f"is in use by process {other_process.pid} on"):
            RunLock(tmp_path).acquire()


def test_letting_go_leaves_nothing_and_a_process_may_take_what_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    first_lock, second = RunLock(folder), RunLock(folder)
    first_lock.acquire()
    second.acquire()  # a notebook's next run
    first_lock.release()
    assert is_run_active(folder) is True
    second.release()
    assert list(tmp_path.iterdir()) == []  # the folders that it had made, too
    folder.mkdir(parents=True)
    second.acquire()
    (folder / "metrics.jsonl").touch()
    second.release()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_disk_without_room_for_it_is_said_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DitLoraError, match=r"cannot write run\.dir .*run\.lock: No space left"):
        RunLock(tmp_path / "runs" / "a").acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_live_process_of_another_host_is_refused_though_its_flock_does_not_reach_here(
    tmp_path: Path, elsewhere: LockHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    age(tmp_path, 5)
    monkeypatch.setattr(time, "sleep", lambda seconds: age(tmp_path, 1))  # it beats
    with pytest.raises(DitLoraError, match=r"process 1 on node7 .*Slurm job 88.*, remove .*run.lock"):
        RunLock(tmp_path, messages.append).acquire()
    assert "waiting 85 s to see whether it is running" in messages[0]


def test_a_dead_process_of_another_host_gives_way_once_it_is_silent(
    tmp_path: Path, elsewhere: LockHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if it was silent long enough; else after the rest of that time."""
    monkeypatch.setattr(run_lock, "STALE", 1.0)
    for seconds, at_least in ((2.0, 0.0), (0.5, 0.4)):
        (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(elsewhere)))
        age(tmp_path, seconds)
        began = time.monotonic()
        lock = RunLock(tmp_path)
        lock.acquire()
        assert at_least <= time.monotonic() - began < at_least + 1.5
        assert read_holder(tmp_path) != elsewhere
        lock.release()


@pytest.mark.parametrize(("job", "restarts", "waits"), [("88", "1", False), ("88", "", True)])
def test_a_job_that_slurm_requeued_on_another_node_goes_on_at_once(
    tmp_path: Path,
    elsewhere: LockHolder,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    restarts: str,
    waits: bool,
) -> None:
    """Another step of the same job, which is not a restart, may run at the same time."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(run_lock, "STALE", 1.0)
    messages: list[str] = []
    lock = RunLock(tmp_path, messages.append)
    lock.acquire()
    lock.release()
    assert [("waiting" in line) for line in messages] == [waits]


def test_who_was_held_for_dead_learns_that_the_folder_is_anothers(
    tmp_path: Path, elsewhere: LockHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    age(tmp_path, 1000)
    lock = RunLock(tmp_path)
    lock.acquire()
    begun = (tmp_path / LOCK_FILE).stat().st_mtime
    time.sleep(0.2)
    assert (tmp_path / LOCK_FILE).stat().st_mtime > begun
    assert lock.get_run_folder_takeover_error() is None
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(elsewhere)))
    deadline = time.monotonic() + 100
    while lock.get_run_folder_takeover_error() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "was taken over by process 1 on node7" in str(lock.get_run_folder_takeover_error())
    lock.release()


def test_where_there_is_no_flock_a_process_id_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a later process that has the id of a dead one."""
    monkeypatch.setattr(run_lock, "HAS_FILE_LOCKS", False)
    holder = LockHolder.from_this_process()
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(holder, token="t"))))
    with pytest.raises(DitLoraError, match=f"process {holder.pid} on"):
        RunLock(tmp_path).acquire()
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(holder, born=holder.born - 100))))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
