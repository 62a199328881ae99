"""Entries are keyed by content, written whole, and never give a bad value unseen."""

import copy
import multiprocessing
import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from dit_lora.data.cache.cache import CacheError, TensorCache, encode_entry, make_entry_key
from dit_lora.data.cache.digests import Digests
from dit_lora.data.storage import UnreadableError

FACTS = {"media": "abc", "frames": 9, "dtype": "torch.bfloat16"}


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "videos")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, 3, 5, generator=generator)
    return {"mean": mean, "logvar": mean.transpose(0, 1).bfloat16()}  # one is not contiguous


def write(cache: TensorCache) -> str:
    key = make_entry_key(FACTS)
    cache.write_entries([encode_entry(key, tensors(), sample="a.mp4", facts=FACTS)])
    return key


def test_an_entry_reads_back_bit_for_bit(cache: TensorCache) -> None:
    key = write(cache)
    read_tensors, fault = cache.read(key, cache.get_spec(key))
    assert fault is None
    assert cache.is_complete(key)
    for name, tensor in tensors().items():
        assert read_tensors[name].dtype is tensor.dtype
        assert torch.equal(read_tensors[name], tensor)
    assert cache.get_spec(key) == {
        "mean": ((4, 3, 5), torch.float32),
        "logvar": ((3, 4, 5), torch.bfloat16),
    }


@pytest.mark.parametrize("change", [{"media": "abd"}, {"frames": 13}, {"dtype": "torch.float32"}, {"new": 0}])
def test_any_other_fact_is_another_entry(change: dict) -> None:
    assert make_entry_key({**FACTS, **change}) != make_entry_key(FACTS)
    assert make_entry_key(dict(reversed(FACTS.items()))) == make_entry_key(FACTS)


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "1 NaN"), (torch.inf, "1 Inf"), (-1e5, "beyond 10000")])
def test_a_bad_value_is_never_written(cache: TensorCache, value: float, words: str) -> None:
    bad = tensors()
    bad["mean"][1, 1, 1] = value
    with pytest.raises(CacheError, match=rf"a\.mp4.*mean.*{words}"):
        cache.write_entries([encode_entry("k" * 64, bad, sample="a.mp4", facts={})])
    assert not list(cache.root.rglob("*"))


def test_a_bad_value_is_reported_when_read(cache: TensorCache) -> None:
    key = write(cache)
    spec = cache.get_spec(key)
    (entry,) = cache.iter_entries()
    with entry.path.open("r+b") as file:
        file.seek(entry.start + entry.layout.tensor_byte_ranges["mean"][0])
        file.write(torch.full((2,), torch.nan).numpy().tobytes())
    read_tensors, fault = cache.read(key, spec)
    assert fault is not None
    assert "mean has 2 NaN among 60 values" in fault
    assert f"{key[:16]} of {cache.find_shard_path(key)}" in fault
    assert read_tensors["mean"].isnan().sum() == 2  # given as it is, never replaced


def test_a_changed_byte_is_reported(cache: TensorCache) -> None:
    key = write(cache)
    spec, data = cache.get_spec(key), bytearray(cache.find_shard_path(key).read_bytes())
    data[-1] ^= 1
    cache.find_shard_path(key).write_bytes(data)
    _, fault = cache.read(key, spec)
    assert fault is not None
    assert "digest differs" in fault


@pytest.mark.parametrize("keep", [0, 8, 100, -1])
def test_a_torn_entry_is_not_whole_and_reads_as_nan(cache: TensorCache, keep: int) -> None:
    key = write(cache)
    spec = cache.get_spec(key)
    cache.find_shard_path(key).write_bytes(cache.find_shard_path(key).read_bytes()[:keep])
    assert not cache.is_complete(key)
    read_tensors, fault = cache.read(key, spec)
    assert fault is not None
    assert "cannot be read" in fault
    assert {n: (t.shape, t.dtype) for n, t in read_tensors.items()} == spec
    assert all(tensor.isnan().all() for tensor in read_tensors.values())


def test_a_bad_entry_is_set_aside_and_made_anew(cache: TensorCache) -> None:
    key = write(cache)
    other_cache = TensorCache(cache.root)
    assert other_cache.is_complete(key)
    bad_file = cache.mark_bad(key)
    assert bad_file.exists()
    assert not cache.is_complete(key)
    assert "cannot be read" in (cache.read(key, {})[1] or "")
    assert not TensorCache(cache.root).is_complete(key)
    other_cache.refresh()
    assert not other_cache.is_complete(key)
    write(cache)
    assert cache.is_complete(key)
    assert cache.read(key, {})[1] is None
    other_cache.refresh()
    assert other_cache.is_complete(key)


def test_a_full_disk_names_sample_and_leaves_nothing_torn(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    from dit_lora.errors import DitLoraError

    with pytest.raises(DitLoraError, match=r"cache entry of a\.mp4 .* No space left on device"):
        write(cache)
    assert not [path for path in cache.root.rglob("*") if path.is_file()]


def test_digests_follow_content_and_are_remembered(tmp_path: Path) -> None:
    file, memo = tmp_path / "a.bin", tmp_path / "memo.json"
    file.write_bytes(b"one")
    first_digests = Digests(memo)
    digest = first_digests.hash_file(file)
    first_digests.save()
    assert Digests(memo).hash_file(file) == digest
    file.write_bytes(b"two")
    assert Digests(memo).hash_file(file) != digest


def test_a_torn_memo_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "memo.json").write_text('{"a": [1,')
    assert len(Digests(tmp_path / "memo.json").hash_file(tmp_path / "a")) == 64


def test_a_components_digest_depends_on_weights_and_configs_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    digest = Digests(tmp_path / ".memo").hash_component(tmp_path)
    (tmp_path / "README.md").write_text("x")
    assert Digests(tmp_path / ".memo").hash_component(tmp_path) == digest
    (tmp_path / "model.safetensors").write_bytes(b"v")
    changed_digest = Digests(tmp_path / ".memo").hash_component(tmp_path)
    assert changed_digest != digest
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert Digests(tmp_path / ".memo").hash_component(tmp_path) != changed_digest


def test_class_labels_and_masks_are_kept_and_a_cut_entry_is_bad(cache: TensorCache) -> None:
    tensors = {"class_labels": torch.tensor(7), "mask": torch.tensor([True, False])}
    key = make_entry_key({"class": "cat"})
    cache.write_entries([encode_entry(key, tensors, sample="cat", facts={})])
    spec = cache.get_spec(key)
    read_tensors, fault = cache.read(key, spec)
    assert fault is None
    assert all(torch.equal(read_tensors[name], tensors[name]) for name in tensors)
    os.truncate(cache.find_shard_path(key), cache.find_shard_path(key).stat().st_size - 1)
    nan_tensors, fault = cache.read(key, spec)
    assert fault is not None
    assert str(cache.root) in fault
    assert {name: (t.shape, t.dtype) for name, t in nan_tensors.items()} == spec


def several(cache: TensorCache, count: int, per_shard: int = 3) -> list[str]:
    """Entries of one number each, in shards."""
    keys = [make_entry_key({"number": number}) for number in range(count)]
    records = [
        encode_entry(key, {"x": torch.full((4,), float(k))}, sample=f"{k}", facts={}) for k, key in enumerate(keys)
    ]
    for begin in range(0, count, per_shard):
        cache.write_entries(records[begin : begin + per_shard])
    return keys


def numbers(cache: TensorCache, keys: list[str]) -> list[float]:
    results = [cache.read(key, {}) for key in keys]
    assert not [fault for _, fault in results if fault]
    return [tensors["x"][0].item() for tensors, _ in results]


def test_one_bad_entry_of_a_shard_is_set_aside_and_made_anew_alone(cache: TensorCache) -> None:
    keys = several(cache, 6)
    shard = cache.find_shard_path(keys[1])
    before = shard.read_bytes()
    bad_file = cache.mark_bad(keys[1])
    assert bad_file.parent == shard.parent
    assert cache.find_missing(keys) == [keys[1]]
    assert shard.read_bytes() == before
    cache.write_entries([encode_entry(keys[1], {"x": torch.full((4,), 1.0)}, sample="1", facts={})])
    assert cache.find_missing(keys) == []
    assert cache.find_shard_path(keys[1]) != shard
    assert cache.find_shard_path(keys[2]) == shard
    assert numbers(cache, keys) == list(range(6))
    assert numbers(TensorCache(cache.root), keys) == list(range(6))
    assert sorted(entry.key for entry in cache.iter_entries()) == sorted(keys)


def test_of_two_copies_the_other_is_used_when_one_is_set_aside(cache: TensorCache) -> None:
    keys = several(cache, 3)
    cache.write_entries([encode_entry(keys[0], {"x": torch.full((4,), 0.0)}, sample="0", facts={})])
    first_path = cache.find_shard_path(keys[0])
    assert len(cache) == 3
    cache.mark_bad(keys[0])
    assert cache.is_complete(keys[0])
    assert cache.find_shard_path(keys[0]) != first_path
    cache.mark_bad(keys[0])
    assert not cache.is_complete(keys[0])
    assert not cache.find_shard_path(keys[0]).exists()


def test_what_others_write_replace_and_remove_is_seen(cache: TensorCache) -> None:
    other_cache = TensorCache(cache.root)
    assert not other_cache.is_complete("a" * 64)  # its index is of an empty folder
    keys = several(cache, 6)
    assert numbers(other_cache, keys) == list(range(6))
    # A shard that goes takes its entries along, and one that comes instead is found by who asks.
    path = cache.find_shard_path(keys[0])
    path.unlink()
    with pytest.raises(UnreadableError, match="No such file"):
        other_cache.read(keys[0], {})
    cache.write_entries([encode_entry(keys[0], {"x": torch.full((4,), 7.0)}, sample="0", facts={})])
    assert numbers(other_cache, keys[:1]) == [7.0]
    assert other_cache.find_missing(keys) == keys[1:3]


def test_a_file_cut_while_it_is_open_is_a_fault(cache: TensorCache) -> None:
    keys = several(cache, 3)
    assert numbers(cache, keys) == [0, 1, 2]
    with cache.find_shard_path(keys[2]).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 4)
    assert numbers(cache, keys[:2]) == [0, 1]
    assert "cannot be read" in (cache.read(keys[2], {})[1] or "")


def test_tensors_outlive_the_cache_and_write_to_no_file(cache: TensorCache) -> None:
    keys = several(cache, 90, per_shard=1)
    files = len(list(Path("/proc/self/fd").iterdir()))
    assert numbers(cache, keys) == list(range(90))
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 130
    tensors = [cache.read(key, {})[0]["x"] for key in keys]
    root = cache.root
    del cache
    assert [tensor[0].item() for tensor in tensors] == list(range(90))
    tensors[0][0] = 5  # memory of its own
    assert numbers(TensorCache(root), keys) == list(range(90))


def test_a_pickled_index_needs_no_header(cache: TensorCache, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = several(cache, 9)
    assert numbers(cache, keys) == list(range(9))
    pickled_cache = pickle.dumps(cache)
    assert len(pickled_cache) < 4000
    monkeypatch.setattr("dit_lora.data.cache.cache.read_header", None)
    assert numbers(pickle.loads(pickled_cache), keys) == list(range(9))
    assert numbers(copy.deepcopy(cache), keys) == list(range(9))


def _read_in_child(cache: TensorCache, keys: list[str], seed: int) -> None:
    random.Random(seed).shuffle(keys)
    assert numbers(cache, keys) == [int(cache.read(key, {})[0]["x"][3]) for key in keys]
    assert sorted(numbers(cache, keys)) == list(range(len(keys)))


def test_forked_workers_read_at_once_from_files_that_they_share(cache: TensorCache) -> None:
    keys = several(cache, 60, per_shard=2)
    assert numbers(cache, keys) == list(range(60))
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_read_in_child, args=(cache, keys, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    assert numbers(cache, keys) == list(range(60))
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_files_of_the_old_layout_are_neither_read_nor_in_the_way(cache: TensorCache) -> None:
    key = make_entry_key(FACTS)
    old = cache.root / key[:2] / f"{key}.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"an entry of an earlier version")
    assert not cache.is_complete(key)
    write(cache)
    assert cache.read(key, {})[1] is None
    assert len(cache) == 1
