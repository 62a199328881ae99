"""On a system without fcntl, resource and /proc, each call has its plain fallback."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from dit_lora.environment import operating_system


@pytest.fixture
def without_posix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where the system has none of these."""
    for name in ("fcntl", "resource"):
        monkeypatch.setitem(sys.modules, name, None)
    for owner, name in ((os, "sched_getaffinity"), (os, "register_at_fork"), (signal, "pthread_sigmask")):
        monkeypatch.delattr(owner, name)
    # A second module from the same file, so that others keep theirs.
    spec = importlib.util.spec_from_file_location("operating_system_without_posix", operating_system.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_fcntl_and_resource_calls_do_the_plain_thing(without_posix: ModuleType, tmp_path: Path) -> None:
    assert not without_posix.HAS_FILE_LOCKS
    assert not without_posix.CAN_LIMIT_CHILDREN
    with (tmp_path / "lock").open("w") as lock_file, (tmp_path / "lock").open("w") as other_file:
        without_posix.lock_file(lock_file.fileno())
        without_posix.lock_file(other_file.fileno())
    assert without_posix.count_usable_cpus() == os.cpu_count()
    assert without_posix.get_peak_memory_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    without_posix.limit_address_space(0)  # would stop this process
    assert without_posix.get_max_open_files() > 1000
    with without_posix.block_interrupts():
        pass
    without_posix.run_in_forked_children(pytest.fail)


def test_a_locked_file_is_refused_to_another_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock_file, (tmp_path / "lock").open("w") as other_file:
        operating_system.lock_file(lock_file.fileno())
        with pytest.raises(BlockingIOError):
            operating_system.lock_file(other_file.fileno(), is_shared=True)


def test_interrupts_are_blocked_only_inside() -> None:
    def list_blocked() -> set[int]:
        return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    with operating_system.block_interrupts():
        assert signal.SIGINT in list_blocked()
    assert signal.SIGINT not in list_blocked()
