"""Entries are keyed by content, written whole, and never give a bad value unseen."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit_lora.data.cache import CacheError, TensorCache, entry_key
from dit_lora.data.digest import Digests

FACTS = {"media": "abc", "frames": 9, "dtype": "torch.bfloat16"}


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "videos")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, 3, 5, generator=generator)
    return {"mean": mean, "logvar": mean.transpose(0, 1).bfloat16()}  # one is not contiguous


def write(cache: TensorCache) -> str:
    key = entry_key(FACTS)
    cache.write(key, tensors(), sample="a.mp4", facts=FACTS)
    return key


def test_an_entry_reads_back_bit_for_bit(cache: TensorCache) -> None:
    key = write(cache)
    back, fault = cache.read(key, cache.spec(key))
    assert fault is None
    assert cache.is_whole(key)
    for name, tensor in tensors().items():
        assert back[name].dtype is tensor.dtype
        assert torch.equal(back[name], tensor)
    assert cache.spec(key) == {
        "mean": ((4, 3, 5), torch.float32),
        "logvar": ((3, 4, 5), torch.bfloat16),
    }


@pytest.mark.parametrize(
    "change", [{"media": "abd"}, {"frames": 13}, {"dtype": "torch.float32"}, {"new": 0}]
)
def test_any_other_fact_is_another_entry(change: dict) -> None:
    assert entry_key({**FACTS, **change}) != entry_key(FACTS)
    assert entry_key(dict(reversed(FACTS.items()))) == entry_key(FACTS)


@pytest.mark.parametrize(
    ("value", "words"), [(torch.nan, "1 NaN"), (torch.inf, "1 Inf"), (-1e5, "beyond 10000")]
)
def test_a_bad_value_is_never_written(cache: TensorCache, value: float, words: str) -> None:
    bad = tensors()
    bad["mean"][1, 1, 1] = value
    with pytest.raises(CacheError, match=rf"a\.mp4.*mean.*{words}"):
        cache.write("k" * 64, bad, sample="a.mp4", facts={})
    assert not list(cache.root.rglob("*"))


def test_a_bad_value_is_reported_when_read(cache: TensorCache) -> None:
    """Whoever wrote it there, and whether or not the digest was made to fit."""
    key = write(cache)
    spec = cache.spec(key)
    path = cache.path(key)
    changed = load_file(path)
    changed["mean"][0, :2, 0] = torch.nan
    save_file(changed, path, metadata={"digest": "x"})
    back, fault = cache.read(key, spec)
    assert fault is not None
    assert "mean has 2 NaN among 60 values" in fault
    assert str(path) in fault
    assert back["mean"].isnan().sum() == 2  # given as it is, never replaced


def test_a_changed_byte_is_reported(cache: TensorCache) -> None:
    key = write(cache)
    spec, data = cache.spec(key), bytearray(cache.path(key).read_bytes())
    data[-1] ^= 1
    cache.path(key).write_bytes(data)
    _, fault = cache.read(key, spec)
    assert fault is not None
    assert "digest differs" in fault


@pytest.mark.parametrize("keep", [0, 8, 100, -1])
def test_a_torn_entry_is_not_whole_and_reads_as_nan(cache: TensorCache, keep: int) -> None:
    key = write(cache)
    spec = cache.spec(key)
    cache.path(key).write_bytes(cache.path(key).read_bytes()[:keep])
    assert not cache.is_whole(key)
    back, fault = cache.read(key, spec)
    assert fault is not None
    assert "cannot be read" in fault
    assert {n: (t.shape, t.dtype) for n, t in back.items()} == spec
    assert all(tensor.isnan().all() for tensor in back.values())


def test_a_bad_entry_is_set_aside_and_made_anew(cache: TensorCache) -> None:
    key = write(cache)
    aside = cache.set_aside(key)
    assert aside.exists()
    assert not cache.is_whole(key)
    write(cache)
    assert cache.is_whole(key)


def test_a_full_disk_names_sample_and_leaves_nothing_torn(
    cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    from dit_lora.errors import DitLoraError

    with pytest.raises(DitLoraError, match=r"cache entry of a\.mp4 .* No space left on device"):
        write(cache)
    assert not [path for path in cache.root.rglob("*") if path.is_file()]


def test_digests_follow_content_and_are_remembered(tmp_path: Path) -> None:
    file, memo = tmp_path / "a.bin", tmp_path / "memo.json"
    file.write_bytes(b"one")
    first = Digests(memo)
    one = first.file(file)
    first.save()
    assert Digests(memo).file(file) == one
    file.write_bytes(b"two")
    assert Digests(memo).file(file) != one
    # Remembered: a file of the same size and time is not read again.
    os.utime(file, ns=(0, 0))
    again = Digests(memo)
    two = again.file(file)
    again.save()
    file.write_bytes(b"six")
    os.utime(file, ns=(0, 0))
    assert Digests(memo).file(file) == two


def test_an_entry_without_a_digest_is_reported(cache: TensorCache) -> None:
    key = write(cache)
    spec = cache.spec(key)
    save_file(load_file(cache.path(key)), cache.path(key))
    assert "digest differs" in (cache.read(key, spec)[1] or "")
    assert not cache.is_whole(key)


def test_a_torn_memo_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "memo.json").write_text('{"a": [1,')
    assert len(Digests(tmp_path / "memo.json").file(tmp_path / "a")) == 64


def test_a_components_digest_depends_on_weights_and_configs_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    digest = Digests(tmp_path / ".memo").component(tmp_path)
    (tmp_path / "README.md").write_text("x")
    assert Digests(tmp_path / ".memo").component(tmp_path) == digest
    (tmp_path / "model.safetensors").write_bytes(b"v")
    changed = Digests(tmp_path / ".memo").component(tmp_path)
    assert changed != digest
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert Digests(tmp_path / ".memo").component(tmp_path) != changed


def test_class_labels_and_masks_are_kept_and_a_lost_entry_is_bad(cache: TensorCache) -> None:
    tensors = {"class_labels": torch.tensor(7), "mask": torch.tensor([True, False])}
    key = entry_key({"class": "cat"})
    cache.write(key, tensors, sample="cat", facts={})
    spec = cache.spec(key)
    back, fault = cache.read(key, spec)
    assert fault is None
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    cache.path(key).unlink()
    lost, fault = cache.read(key, spec)
    assert fault is not None
    assert {name: (t.shape, t.dtype) for name, t in lost.items()} == spec
