"""A machine that fails during a run: it ends with a message and the last good step saved, and resumes from there."""

import errno
import json
import os
import signal
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import TensorBoardTracker
from runs import lines, same_adapter, trajectory

from dit_lora.data import storage
from dit_lora.data.cache.cache import TensorCache
from dit_lora.errors import DitLoraError
from dit_lora.report.run import background
from dit_lora.training import journal
from dit_lora.training.tasks.diffusion import validation
from dit_lora.training.tasks.diffusion.task import DiffusionTask

Main = Callable[[list[str]], None]


@pytest.fixture
def ended(lora_main: Main, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run until the machine fails, as `patch` arranges; returns the output. The resumed run ends as a clean run."""

    def run(patch: Callable[[pytest.MonkeyPatch], None], *overrides: str) -> str:
        clean, broken = (f"run.dir={tmp_path / name}" for name in ("clean", "run"))
        lora_main([*args, *overrides, clean])
        with monkeypatch.context() as inner:
            patch(inner)
            with pytest.raises(DitLoraError) as error:
                lora_main([*args, *overrides, broken])
        assert error.value.exit_code == 2
        assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
        lora_main([*args, *overrides, broken, "train.resume=auto"])
        assert same_adapter(tmp_path / "run", tmp_path / "clean")
        assert trajectory(tmp_path / "run") == trajectory(tmp_path / "clean")
        assert lines(tmp_path / "run", "events.jsonl") == []  # no sample is blamed
        return str(error.value)

    return run


def test_a_data_worker_that_is_killed(ended: Callable[..., str]) -> None:
    def kill(patch: pytest.MonkeyPatch) -> None:
        read, reads, trainer = TensorCache.read, count(), os.getpid()

        def killed(cache: TensorCache, key: str, spec: Any) -> Any:
            if os.getpid() != trainer and next(reads) == 12:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does for want of memory
            return read(cache, key, spec)

        patch.setattr(TensorCache, "read", killed)

    message = ended(kill, "data.workers=1")
    assert "a process that reads data has ended: DataLoader worker" in message
    assert "lower data.workers or data.prefetch" in message
    assert "is saved in" in message


def test_a_disk_that_does_not_give_what_it_has(ended: Callable[..., str], tmp_path: Path) -> None:
    """No sample is to blame, and none is left out."""

    def fail(patch: pytest.MonkeyPatch) -> None:
        read, reads = os.preadv, count()

        def failed(handle: int, buffers: Sequence[Any], offset: int) -> int:
            if next(reads) >= 12:
                raise OSError(errno.EIO, "Input/output error")
            return read(handle, buffers, offset)

        patch.setattr(os, "preadv", failed)
        patch.setattr(storage, "MAX_WAIT_S", 0.3)

    message = ended(fail)
    assert f"waited 0.3 s for the folder {tmp_path / 'cache' / 'videos'}" in message
    assert "Input/output error" in message
    assert "is saved in" in message
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()


def test_a_disk_that_is_full_for_a_moment_loses_no_line(ended: Callable[..., str]) -> None:
    """At the third step; the run ends at the fourth, when all ranks know."""

    def fill(patch: pytest.MonkeyPatch) -> None:
        append, calls = journal.append_line, count(1)

        def full(path: Path, text: str) -> None:
            if path.name == "metrics.jsonl" and next(calls) in (3, 4):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            append(path, text)

        patch.setattr(journal, "append_line", full)

    first_line, second_line = ended(fill).splitlines()
    assert first_line.endswith("metrics.jsonl: No space left on device")
    assert second_line.startswith("step 4 is saved in ")


def test_what_only_looks_at_a_run_never_ends_it(
    lora_main: Main,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Samples run out of memory, the eval loss out of disk, tracker and report fail: the adapter is the same."""
    options = [
        "train.steps=4",
        "validation.every=2",
        'validation.prompts=["a disc"]',
        "validation.inference_steps=1",
    ]
    clean, broken = (f"run.dir={tmp_path / name}" for name in ("clean", "run"))
    lora_main([*args, *options, clean])
    host_memory = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't")
    disk = OSError(errno.ENOSPC, "No space left on device")

    def failing(error: Exception) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    monkeypatch.setattr(validation, "_write_samples", failing(host_memory))
    monkeypatch.setattr(DiffusionTask, "compute_eval_loss", failing(disk))
    monkeypatch.setattr(TensorBoardTracker, "log", failing(ZeroDivisionError("theirs")))
    monkeypatch.setattr(background, "write_run_page", failing(MemoryError()))
    capsys.readouterr()
    lora_main([*args, *options, broken, 'run.trackers=["tensorboard"]'])
    assert same_adapter(tmp_path / "run", tmp_path / "clean")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    output = capsys.readouterr().err
    for line in (
        "samples are skipped from here on: out of memory; training continues",
        # Those of the base, at step 0, are in the cache.
        "skipped: samples of steps 2, 4: out of memory",
        "skipped: eval losses of steps 0, 2, 4: OSError: [Errno 28] No space left on device",
        "warning: run.trackers: tensorboard is not used any more: ZeroDivisionError: theirs",
        "warning: cannot write the report: MemoryError",
        "verified: ",
    ):
        assert line in output
