"""A file that is away is waited for, and is never the fault of a sample."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dit_lora.data import storage
from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.data.media import media as media_module
from dit_lora.data.media.clip_sound import read_sound
from dit_lora.data.media.headers import MediaHeaderCache
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_mask
from dit_lora.data.media.sound import SoundFormat
from dit_lora.data.media.video import ClipError, read_frames, read_header
from dit_lora.data.storage import UnreadableError
from dit_lora.data.synthetic.clips import write_shapes

SHAPE = {"frames": 2, "height": 32, "width": 32, "fps": 8.0}
OF_ENTRY = {"x": (torch.Size([4]), torch.float32)}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "MAX_WAIT_S", 5.0)
    monkeypatch.setattr(storage, "_POLL_S", 0.01)
    with storage.wait_for_storage():
        yield


@pytest.fixture
def no_patience(patience: None) -> None:
    storage._max_wait_s = 0.03  # `patience` puts it back


@contextmanager
def away(path: Path, seconds: float = 0.1) -> Iterator[None]:
    """Move a file or folder away, and back after `seconds`."""
    moved_path = path.rename(path.with_name(f"{path.name}.away"))
    timer = threading.Timer(seconds, lambda: moved_path.rename(path))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    """Four entries in two shards."""
    cache = TensorCache(tmp_path / "videos")
    for start in (0, 2):
        cache.write_entries(
            [
                encode_entry(key(k), {"x": torch.full((4,), float(k))}, sample=f"{k}", facts={})
                for k in (start, start + 1)
            ]
        )
    assert len(cache) == 4
    return cache


def key(number: int) -> str:
    return make_entry_key({"number": number})


def require_right(cache: TensorCache, number: int) -> None:
    tensors, fault = cache.read(key(number), OF_ENTRY)
    assert fault is None
    assert tensors["x"].tolist() == [float(number)] * 4


@pytest.mark.parametrize("what", ["folder", "shard"])
def test_a_cache_that_is_away_for_a_moment(cache: TensorCache, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = cache.root if what == "folder" else cache.find_shard_path(key(0))
    with away(path):
        require_right(cache, 0)
    for number in range(4):
        require_right(cache, number)
    lines = capfd.readouterr().err.split("\n\n")
    assert [line.strip().partition(" for")[0] for line in lines] == [
        "waiting up to 5 s",
        "the files can be read again after 0.1 s; nothing is left out",
    ]
    assert str(path.parent if what == "shard" else path) in lines[0]


def test_what_was_looked_for_meanwhile_does_not_lose_the_others(cache: TensorCache) -> None:
    with away(cache.root):
        assert cache.find_missing([key(0), key(9)]) == [key(0), key(9)]
        require_right(cache, 0)
        assert cache.read_first_entry_spec([key(3)]) == OF_ENTRY


@pytest.mark.usefixtures("no_patience")
def test_a_shard_that_stays_away_is_no_fault_of_a_sample(cache: TensorCache) -> None:
    cache.find_shard_path(key(0)).unlink()
    with pytest.raises(UnreadableError, match=r"No such file or directory; waited 0\.03 s") as error:
        cache.read(key(0), OF_ENTRY)
    assert f"the folder {cache.root}" in str(error.value)
    with pytest.raises(UnreadableError, match="No such file"):
        cache.read_first_entry_spec([key(0)])
    require_right(cache, 2)


@pytest.mark.usefixtures("no_patience")
def test_damage_and_marks_are_the_entrys_own(cache: TensorCache) -> None:
    cache.mark_bad(key(0))
    path = cache.find_shard_path(key(2))
    path.write_bytes(path.read_bytes()[:-20])  # the last entry is cut
    for number, message in ((0, "marked bad"), (3, "it is incomplete")):
        tensors, fault = cache.read(key(number), OF_ENTRY)
        assert message in str(fault)
        assert tensors["x"].isnan().all()
    path.write_bytes(b"no header")
    assert "it is incomplete" in str(cache.read(key(2), OF_ENTRY)[1])
    require_right(cache, 1)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTCONN])
def test_after_an_error_the_file_is_opened_again(
    cache: TensorCache, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_preadv, broken = os.preadv, []

    def stale(handle: int, *rest: object) -> int:
        # As NFS has it: the handle of before a remount never works again.
        if not broken or handle in broken:
            broken.append(handle)
            raise OSError(number, os.strerror(number))
        return original_preadv(handle, *rest)  # type: ignore[arg-type]

    # As a tensor of an earlier step may hold it: so its number is not that of the next file.
    shard_file = cache._get_open_shard(cache.find_shard_path(key(0)))
    monkeypatch.setattr(os, "preadv", stale)
    require_right(cache, 0)
    assert shard_file is not None
    assert len(broken) == 1


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    write_shapes(folder, clips=1, frames=3, height=32, width=32, fps=8, sound=True)
    return next(folder.glob("*.mp4"))


READS: dict[str, Callable[[Path], object]] = {
    "frames": lambda path: read_frames(path, **SHAPE),
    "header": read_header,
    "headers": lambda path: MediaHeaderCache(path.parent / "memo").read([MediaFile(path)], iter),
    "sound": lambda path: read_sound(MediaFile(path), SoundFormat(16000, 1), frames=2, fps=8.0),
}


@pytest.mark.parametrize("what", READS)
def test_a_clip_that_is_away_for_a_moment(clip: Path, what: str) -> None:
    before = str(READS[what](clip))
    with away(clip.parent):
        assert str(READS[what](clip)) == before


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("what", READS)
def test_a_clip_that_stays_away_is_no_clip_error(tmp_path: Path, what: str) -> None:
    with pytest.raises(UnreadableError, match=f"waited 0.03 s for the folder {tmp_path}"):
        READS[what](tmp_path / "gone.mp4")


@pytest.mark.usefixtures("no_patience")
def test_a_mask_that_stays_away_is_no_clip_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="waited"):
        read_mask(MediaFile(tmp_path / "gone.png"), alpha=False, height=8, width=8)


def test_a_damaged_clip_is_read_twice_and_named(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.mp4"
    damaged.write_bytes(clip.read_bytes()[:200])
    tries = []
    require = media_module.wait_until_readable
    monkeypatch.setattr(media_module, "wait_until_readable", lambda media: tries.append(1) or require(media))
    with pytest.raises(ClipError, match=r"damaged\.mp4: cannot be opened"):
        read_header(damaged)
    assert len(tries) == 2


def test_a_file_that_is_back_before_it_is_looked_at(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder failed, and the bytes are there by now: only a second failure counts."""
    source, tries = MediaFile.get_source, []

    def flaky(media: MediaFile) -> Path:
        tries.append(1)
        return media.path.with_name("gone.mp4") if len(tries) == 1 else source(media)

    monkeypatch.setattr(MediaFile, "get_source", flaky)
    assert read_header(clip).height == 32


def test_outside_a_run_a_missing_clip_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TensorCache
) -> None:
    storage._max_wait_s = 0.0
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(ClipError, match="No such file"):
        read_header(tmp_path / "gone.mp4")
    cache.find_shard_path(key(0)).unlink()
    with pytest.raises(UnreadableError, match=r"No such file or directory$"):
        cache.read(key(0), OF_ENTRY)
