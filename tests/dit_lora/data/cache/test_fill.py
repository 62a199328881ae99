"""Many processes fill one cache: nothing is made twice, and nothing but a unit is lost when one dies."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_lora.data.cache import fill as filling
from dit_lora.data.cache.cache import TensorCache, make_entry_key
from dit_lora.data.cache.fill import (
    LOCKS,
    MAX_JOBS_PER_UNIT,
    BuildResult,
    CacheJob,
    fill_cache,
    list_unit_locks,
)
from dit_lora.data.cache.shards import list_shards
from dit_lora.data.media.video import ClipError
from dit_lora.errors import DitLoraError

FORK = multiprocessing.get_context("fork")
Encoder = Callable[[int], torch.Tensor]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(filling, "_MIN_UNITS", 1)  # units of the size that large sets have


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "videos")


def job(number: int) -> CacheJob:
    def make(encode: Encoder) -> dict[str, torch.Tensor]:
        return {"x": encode(number)}

    return CacheJob(f"{number}.mp4", make_entry_key({"number": number}), {"number": number}, make)


JOBS = [job(number) for number in range(5 * MAX_JOBS_PER_UNIT - 3)]
KEYS = [cache_job.key for cache_job in JOBS]


def encode(number: int) -> torch.Tensor:
    if number % 20 == 7:
        raise ClipError(f"{number}.mp4 is broken")
    return torch.full((3,), torch.nan if number % 20 == 9 else number)


def good(number: int) -> torch.Tensor:
    return torch.full((3,), float(number))


def run(
    cache: TensorCache,
    encoder: Encoder = good,
    jobs: Sequence[CacheJob] = JOBS,
    launch: str = "one",
    **values: Any,
) -> BuildResult:
    return fill_cache(cache, jobs, lambda: encoder, launch_id=launch, **values)


def is_right(cache: TensorCache, jobs: Sequence[CacheJob] = JOBS) -> bool:
    """Whether every entry is there, once, with its values, and no work is left lying about."""
    reopened = TensorCache(cache.root)
    results = [reopened.read(cache_job.key, {}) for cache_job in jobs]
    assert not [fault for _, fault in results if fault]
    assert [tensors["x"][0] for tensors, _ in results] == [cache_job.facts["number"] for cache_job in jobs]
    files = [path for path in cache.root.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.suffix != ".safetensors"} <= {"gate.lock"}
    return True


def test_all_is_made_in_shards_and_not_again(cache: TensorCache) -> None:
    loads: list[int] = []

    def load() -> Encoder:
        loads.append(1)
        return good

    assert fill_cache(cache, JOBS, load, launch_id="a") == BuildResult(num_written=len(JOBS))
    assert is_right(cache)
    assert len(list(list_shards(cache.root))) == 5
    assert fill_cache(cache, JOBS, load, launch_id="b") == BuildResult()
    assert len(loads) == 1
    cache.mark_bad(KEYS[20])
    assert fill_cache(cache, JOBS, load, launch_id="c") == BuildResult(num_written=1)
    assert cache.read(KEYS[20], {})[0]["x"][0] == 20
    stored_entry = next(entry for entry in cache.iter_entries() if entry.key == KEYS[20])
    assert (stored_entry.sample, stored_entry.facts) == ("20.mp4", {"number": 20})


def test_an_empty_list_makes_nothing_not_even_a_folder(cache: TensorCache) -> None:
    assert run(cache, jobs=[]) == BuildResult()
    assert not cache.root.exists()


def test_jobs_of_equal_keys_are_made_once(cache: TensorCache) -> None:
    encoded_numbers: list[int] = []

    def counted(number: int) -> torch.Tensor:
        encoded_numbers.append(number)
        return good(number)

    assert run(cache, counted, [*JOBS[:3], *JOBS[:2]]).num_written == 3
    assert encoded_numbers == [0, 1, 2]


def test_failures_are_all_told_and_stop_nobody(cache: TensorCache) -> None:
    filled = run(cache, encode)
    bad = [number for number in range(len(JOBS)) if number % 20 in (7, 9)]
    assert list(filled.failed) == [KEYS[number] for number in bad]
    assert filled.failed[KEYS[7]] == "7.mp4 is broken"
    assert "9.mp4: the encoder's output is not usable: x has 3 NaN" in filled.failed[KEYS[9]]
    assert filled.num_written == len(JOBS) - len(bad)
    assert cache.find_missing(KEYS) == list(filled.failed)


def test_what_failed_is_tried_once_a_launch_and_again_at_the_next(cache: TensorCache) -> None:
    first_process = run(cache, encode, launch="one")
    tried_numbers: list[int] = []

    def repaired(number: int) -> torch.Tensor:
        tried_numbers.append(number)
        return good(number)

    same_process = run(cache, repaired, launch="one")  # another process of it
    assert not tried_numbers
    assert same_process == BuildResult(num_written=0, failed=first_process.failed)
    assert run(cache, repaired, launch="two") == BuildResult(num_written=len(first_process.failed))
    assert [KEYS[number] for number in tried_numbers] == list(first_process.failed)


def test_progress_counts_what_is_there_what_failed_and_what_others_made(
    cache: TensorCache,
) -> None:
    run(cache, jobs=JOBS[:10])
    progress: list[tuple[int, int]] = []
    run(cache, encode, on_progress=lambda count, jobs: progress.append((count, jobs)))
    assert progress[0] == (10, len(JOBS))
    assert progress[-1] == (len(JOBS), len(JOBS))
    counts = [count for count, _ in progress]
    assert counts == sorted(counts)
    assert set(counts) == set(range(10, len(JOBS) + 1))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_keeps_what_was_finished(cache: TensorCache, error: type[BaseException]) -> None:
    def stop(number: int) -> torch.Tensor:
        if number == MAX_JOBS_PER_UNIT + 5:
            raise error
        return good(number)

    with pytest.raises(error):
        run(cache, stop)
    assert cache.find_missing(KEYS) == KEYS[MAX_JOBS_PER_UNIT + 5 :]
    assert not list_unit_locks(cache)
    assert run(cache).num_written == len(JOBS) - MAX_JOBS_PER_UNIT - 5
    assert is_right(cache)


def test_a_full_disk_stops_with_one_line_and_keeps_what_was_written(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, calls = os.fsync, [0]

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] > 4:  # a file and a folder a unit
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DitLoraError, match=r"^cannot write the cache entry of 32\.mp4 and 15 more .*No space left"):
        run(cache)
    monkeypatch.setattr(os, "fsync", sync)
    assert cache.find_missing(KEYS) == KEYS[2 * MAX_JOBS_PER_UNIT :]
    assert not list(cache.root.glob(".*.partial"))
    run(cache)
    assert is_right(cache)


def test_large_entries_are_not_all_held_before_they_are_written(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "MAX_UNIT_BYTES", 5 * 12)
    run(cache, jobs=JOBS[:12])
    assert len(list(list_shards(cache.root))) == 3  # of 5, 5 and 2
    assert is_right(cache, JOBS[:12])


def _slowly(root: Path, marks: Path, seconds: float) -> None:
    """A process that fills, and leaves a mark for every job that it makes."""

    def marked(number: int) -> torch.Tensor:
        with (marks / str(os.getpid())).open("a") as file:
            file.write(f"{number}\n")
        time.sleep(seconds)
        return good(number)

    run(TensorCache(root), marked, launch=str(os.getpid()))


def start(cache: TensorCache, marks: Path, seconds: float) -> BaseProcess:
    marks.mkdir(exist_ok=True)
    process = FORK.Process(target=_slowly, args=(cache.root, marks, seconds))
    process.start()
    return process


def made(marks: Path) -> list[int]:
    return [int(line) for path in marks.iterdir() for line in path.read_text().split()]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_two_launches_at_once_share_the_work_and_make_the_same_cache(cache: TensorCache, tmp_path: Path) -> None:
    marker_dir = tmp_path / "marks"
    processes = [start(cache, marker_dir, 0.004) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(made(marker_dir)) == list(range(len(JOBS)))  # each once
    assert len(list(marker_dir.iterdir())) > 1
    assert is_right(cache)
    single_cache = TensorCache(tmp_path / "alone")
    run(single_cache)
    names = [[path.name for path in list_shards(root)] for root in (cache.root, single_cache.root)]
    assert names[0] == names[1]


def test_a_killed_process_loses_its_unit_only_and_another_takes_it_over(cache: TensorCache, tmp_path: Path) -> None:
    marker_dir = tmp_path / "marks"
    process = start(cache, marker_dir, 0.05)
    wait_for(lambda: marker_dir.is_dir() and len(made(marker_dir)) > MAX_JOBS_PER_UNIT + 5)
    os.kill(process.pid or 0, signal.SIGSTOP)  # within its second unit, however slow the others are
    # Makes the rest, then waits for that unit.
    waiting_process = start(cache, tmp_path / "others", 0.0)
    wait_for(lambda: len(TensorCache(cache.root)) >= len(JOBS) - 2 * MAX_JOBS_PER_UNIT)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    waiting_process.join()
    assert waiting_process.exitcode == 0
    assert len(made(marker_dir)) + len(made(tmp_path / "others")) <= len(JOBS) + MAX_JOBS_PER_UNIT
    assert is_right(cache)


def test_after_a_kill_of_the_only_process_the_next_start_goes_on(cache: TensorCache, tmp_path: Path) -> None:
    process = start(cache, tmp_path / "marks", 0.01)
    wait_for(lambda: len(made(tmp_path / "marks")) > 2 * MAX_JOBS_PER_UNIT + 3)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert cache.find_missing(KEYS) == KEYS[2 * MAX_JOBS_PER_UNIT :]
    assert len(list_unit_locks(cache)) == 1
    (cache.root / f".{'0' * 32}.12345678.partial").write_bytes(b"half")  # killed within a write
    assert run(cache).num_written == len(JOBS) - 2 * MAX_JOBS_PER_UNIT
    assert cache.find_missing(KEYS) == []
    assert list((cache.root / LOCKS).iterdir()) == [cache.root / LOCKS / "gate.lock"]


def test_of_a_small_set_every_process_gets_some(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_MIN_UNITS", 64)
    run(cache, jobs=JOBS[:5])
    assert len(list(list_shards(cache.root))) == 5
