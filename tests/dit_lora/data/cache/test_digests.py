"""Digests are those of the bytes, and remembered only while the bytes are the same."""

import hashlib
import os
from pathlib import Path

import pytest

from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import MediaFile, TarMember


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_and_members_have_the_digest_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    digests = Digests(tmp_path / "memo.json")
    assert digests.hash_file(tmp_path / "a") == sha(b"0123456789")
    assert digests.hash_media(TarMember(tmp_path / "a", "x", 2, 3)) == sha(b"234")
    assert digests.hash_media(TarMember(tmp_path / "a", "x", 5, 3)) == sha(b"567")


def test_a_file_is_read_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read_paths = tmp_path / "a", []
    path.write_bytes(b"one")
    source = MediaFile.get_source

    def spy(self: MediaFile) -> Path:
        read_paths.append(self.path)
        return source(self)

    monkeypatch.setattr(MediaFile, "get_source", spy)
    first_digests = Digests(tmp_path / "memo.json")
    assert first_digests.hash_file(path) == first_digests.hash_file(path) == sha(b"one")
    first_digests.save()
    assert Digests(tmp_path / "memo.json").hash_file(path) == sha(b"one")
    assert len(read_paths) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert Digests(tmp_path / "memo.json").hash_file(path) == sha(b"two")
    assert len(read_paths) == 2


def test_another_file_behind_the_same_link_is_read(tmp_path: Path) -> None:
    """Of the same size and time, as files of an unpacked release are."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
        os.utime(tmp_path / name / "a", ns=(1, 1))
    digests, link = Digests(tmp_path / "memo.json"), tmp_path / "current"
    for name in ("v1", "v2"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        assert digests.hash_file(link / "a") == sha(name.encode())


def test_a_torn_memo_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "memo.json").write_text('{"a": [1')
    (tmp_path / "a").write_bytes(b"one")
    digests = Digests(tmp_path / "memo.json")
    assert digests.hash_file(tmp_path / "a") == sha(b"one")
    with pytest.raises(FileNotFoundError):
        digests.hash_file(tmp_path / "gone")


def test_of_a_component_configs_and_weights_count(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"weights")
    before = Digests(tmp_path / "memo.json").hash_component(folder)
    (folder / "README.md").write_text("words")
    assert Digests(tmp_path / "memo.json").hash_component(folder) == before
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    assert Digests(tmp_path / "memo.json").hash_component(folder) != before


def test_a_file_replaced_in_place_is_another_one(tmp_path: Path) -> None:
    """With equal size, time and inode, as editors and `rsync --inplace -t` leave it."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    os.utime(path, ns=(1, 1))
    digests = Digests(tmp_path / "memo.json")
    assert digests.hash_file(path) == sha(b"one")
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(1, 1))
    assert digests.hash_file(path) == sha(b"two")
