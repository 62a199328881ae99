"""Checking, counting and pruning a cache; a pruning that is killed loses nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from dit_lora.data.cache import maintenance, shards
from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.data.cache.fill import LOCKS
from dit_lora.data.cache.maintenance import compute_stats, prune_cache, verify_cache
from dit_lora.data.cache.shards import StoredEntry, list_shards
from dit_lora.errors import DitLoraError

KEYS = [make_entry_key({"number": number}) for number in range(12)]


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    """Twelve entries in three shards."""
    cache = TensorCache(tmp_path / "videos")
    for begin in (0, 4, 8):
        write(cache, range(begin, begin + 4))
    return cache


def write(cache: TensorCache, numbers: range | list[int]) -> Path:
    records = [
        encode_entry(KEYS[k], {"x": torch.full((4,), float(k))}, sample=f"{k}.mp4", facts={"k": k}) for k in numbers
    ]
    cache.write_entries(records)
    return cache.find_shard_path(KEYS[numbers[-1]])


def stored(cache: TensorCache, number: int) -> StoredEntry:
    return next(entry for entry in cache.iter_entries() if entry.key == KEYS[number])


def put(entry: StoredEntry, value: float) -> None:
    """A value where it lies on the disk."""
    with entry.path.open("r+b") as file:
        file.seek(entry.start)
        file.write(torch.tensor([value]).numpy().tobytes())


def numbers(cache: TensorCache) -> dict[int, float]:
    """Every entry that can be read, and what it holds."""
    reopened = TensorCache(cache.root)
    stored_keys = set(KEYS) - set(reopened.find_missing(KEYS))
    results = {k: reopened.read(key, {}) for k, key in enumerate(KEYS) if key in stored_keys}
    return {k: tensors["x"][0].item() for k, (tensors, fault) in results.items() if fault is None}


def same(numbers: dict[int, float], expected: range | list[int]) -> bool:
    return numbers == {k: float(k) for k in expected}


def test_a_good_cache_has_no_problems(cache: TensorCache) -> None:
    progress: list[tuple[int, int]] = []
    report = verify_cache(cache, on_progress=lambda count, shards: progress.append((count, shards)))
    assert (report.entries, report.bytes, report.problems) == (12, 12 * 16, [])
    assert (report.dead, report.set_aside, report.leftovers) == (0, 0, [])
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("set_aside", [False, True])
def test_every_kind_of_damage_is_named_and_only_bad_entries_are_set_aside(cache: TensorCache, set_aside: bool) -> None:
    put(stored(cache, 1), torch.nan)
    put(stored(cache, 2), 1e6)
    put(stored(cache, 5), 5.5)
    cache.mark_bad(KEYS[6])
    shard = cache.find_shard_path(KEYS[8])
    last_entry = max((stored(cache, k) for k in range(8, 12)), key=lambda entry: entry.start)
    shard.write_bytes(shard.read_bytes()[:-1])
    (cache.root / "nonsense.safetensors").write_bytes(b"\1\0\0\0\0\0\0\0x")
    report = verify_cache(cache, mark_bad=set_aside)
    kinds = {(problem.kind, problem.sample) for problem in report.problems}
    assert kinds == {
        ("non_finite", "1.mp4"),
        ("out_of_range", "2.mp4"),
        ("damaged", "5.mp4"),
        ("torn", last_entry.sample),
        ("unreadable", None),
    }
    (nan,) = (problem for problem in report.problems if problem.kind == "non_finite")
    assert str(nan) == f"1.mp4, entry {KEYS[1]} of {nan.path}: x has 1 NaN among 4 values"
    assert (report.entries, report.dead, report.set_aside) == (7, 1, 3 * set_aside)
    assert len(TensorCache(cache.root).find_missing(KEYS)) == 2 + 3 * set_aside
    assert len(verify_cache(cache).problems) == (2 if set_aside else 5)


def test_values_that_a_digest_fits_are_checked_too(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encoder's of another version may have been, or of another program."""
    monkeypatch.setattr("dit_lora.data.cache.cache.is_in_range", lambda tensor, limit: True)
    cache.write_entries([encode_entry("b" * 64, {"x": torch.tensor([torch.inf])}, sample="b", facts={})])
    monkeypatch.undo()
    (problem,) = verify_cache(cache).problems
    assert (problem.kind, problem.key) == ("non_finite", "b" * 64)


def test_a_changed_header_is_told(cache: TensorCache) -> None:
    shard = cache.find_shard_path(KEYS[0])
    shard.write_bytes(shard.read_bytes().replace(b"1.mp4", b"7.mp4"))
    (problem,) = verify_cache(cache).problems
    assert (problem.kind, problem.key, problem.path) == ("damaged", None, shard)


def test_stats_count_what_is_there_and_what_is_dead(cache: TensorCache) -> None:
    mask = {"x": torch.zeros(2, 3, dtype=torch.bfloat16), "class": torch.tensor(1)}
    cache.write_entries([encode_entry("b" * 64, mask, sample="b", facts={})])
    write(cache, [3])  # again
    cache.mark_bad(KEYS[5])
    (cache.root / "nonsense.safetensors").write_bytes(b"")
    total = compute_stats(cache)
    assert (total.entries, total.duplicates, total.dead, total.torn) == (12, 1, 1, 0)
    assert (total.shards, total.unreadable) == (6, 1)
    assert total.bytes == 11 * 16 + 2 * 3 * 2 + 8
    assert total.file_bytes == sum(path.stat().st_size for path in list_shards(cache.root))
    assert total.kinds == {"x F32 4": (11, 176), "class I64 scalar, x BF16 2x3": (1, 20)}
    assert list(total.kinds) == ["x F32 4", "class I64 scalar, x BF16 2x3"]
    assert compute_stats(TensorCache(cache.root / "none")) == maintenance.CacheStats()


def test_prune_keeps_what_is_asked_for_and_who_reads_goes_on(cache: TensorCache) -> None:
    reader = TensorCache(cache.root)
    assert len(reader) == 12
    assert reader.read(KEYS[1], {})[1] is None
    untouched = cache.find_shard_path(KEYS[4])
    kept_indices = [0, 1, 4, 5, 6, 7]
    before = compute_stats(cache).file_bytes
    report = prune_cache(cache, {KEYS[k] for k in kept_indices} | {"not there"})
    assert (report.unwanted, report.removed, report.written, report.problems) == (6, 2, 1, [])
    assert report.freed == before - compute_stats(cache).file_bytes
    assert untouched.exists()
    assert same(numbers(cache), kept_indices)
    assert stored(cache, 1).facts == {"k": 1}
    assert stored(cache, 1).sample == "1.mp4"
    for number in kept_indices:  # though its index is of before
        tensors, fault = reader.read(KEYS[number], {})
        assert fault is None
        assert tensors["x"][0] == number
    assert prune_cache(cache, {KEYS[k] for k in kept_indices}) == maintenance.PruneResult()


def test_prune_without_a_list_removes_only_what_nobody_can_use(cache: TensorCache) -> None:
    put(stored(cache, 0), torch.nan)
    cache.mark_bad(KEYS[0])
    write(cache, [4, 5])  # again
    shard = cache.find_shard_path(KEYS[11])
    shard.write_bytes(shard.read_bytes()[:-1])
    torn_index = next(k for k in range(8, 12) if not cache.is_complete(KEYS[k]))
    (cache.root / f".{'0' * 32}.12345678.partial").write_bytes(b"half")
    (cache.root / LOCKS).mkdir()
    (cache.root / LOCKS / "of_a_killed_process.lock").touch()
    (cache.root / LOCKS / "launch.key.failed").write_text("why")
    (cache.root / "notes.txt").write_text("not ours")
    assert compute_stats(cache).leftovers == len(verify_cache(cache).leftovers) == 3
    report = prune_cache(cache)
    assert (report.dead, report.duplicates, report.torn, report.unwanted) == (1, 2, 1, 0)
    assert report.leftovers == 4  # the mark of what was set aside too
    assert same(numbers(cache), [k for k in range(12) if k not in (0, torn_index)])
    assert not list(cache.root.glob("*.bad"))
    assert (cache.root / "notes.txt").exists()
    total = compute_stats(cache)
    assert (total.dead, total.duplicates, total.torn, total.leftovers) == (0, 0, 0, 0)


def test_of_two_copies_prune_keeps_the_good_one(cache: TensorCache) -> None:
    write(cache, [2])
    for path in {entry.path for entry in cache.iter_entries()} | set(list_shards(cache.root)):
        copies = [entry for entry in shards.read_header(path).entries if entry.key == KEYS[2]]
        if copies and path == cache.find_shard_path(KEYS[2]):
            put(copies[0], 99.0)
    prune_cache(cache)
    assert same(numbers(cache), range(12))


def test_what_is_damaged_is_told_and_not_carried_over(cache: TensorCache) -> None:
    put(stored(cache, 1), 1.5)
    report = prune_cache(cache, {KEYS[0], KEYS[1]})
    assert [(problem.kind, problem.sample) for problem in report.problems] == [("damaged", "1.mp4")]
    assert same(numbers(cache), [0])


def test_prune_refuses_while_the_cache_is_filled_or_pruned(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_GATE_TIMEOUT_S", 0.05)
    (cache.root / LOCKS).mkdir()
    partial = cache.root / f".{'0' * 32}.12345678.partial"
    partial.write_bytes(b"in work")
    for name, message in (("unit", "is being filled"), ("gate", "being pruned by another")):
        with (
            FileLock(cache.root / LOCKS / f"{name}.lock"),
            pytest.raises(DitLoraError, match=message),
        ):
            prune_cache(cache, set())
        assert same(numbers(cache), range(12))
        assert partial.exists()


class KilledError(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("calls", range(12))
def test_a_pruning_killed_at_any_point_loses_nothing_and_ends_when_run_again(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """At each rename and each removal, before it."""
    write(cache, [3, 4])  # again
    cache.mark_bad(KEYS[5])
    monkeypatch.setattr(maintenance, "MAX_JOBS_PER_UNIT", 3)
    remaining_calls = [calls]

    def dying(function: Callable) -> Callable:
        def call(self: Path, *args: object, **values: object) -> object:
            remaining_calls[0] -= 1
            if remaining_calls[0] < 0:
                raise KilledError
            return function(self, *args, **values)

        return call

    kept_indices = [0, 3, 4, 6, 9, 10]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying(Path.replace))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        try:
            prune_cache(cache, {KEYS[k] for k in kept_indices})
            killed = False
        except KilledError:
            killed = True
    assert killed or calls > 6
    remaining = numbers(cache)
    assert {k: remaining.get(k) for k in kept_indices} == {k: float(k) for k in kept_indices}
    assert 5 not in remaining  # what was set aside stays so
    prune_cache(cache, {KEYS[k] for k in kept_indices})
    assert same(numbers(cache), kept_indices)
    assert compute_stats(cache).duplicates == compute_stats(cache).dead == compute_stats(cache).leftovers == 0
