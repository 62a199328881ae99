"""Tars in WebDataset's layout: samples by base name, read in place, with everything that is unsafe refused."""

import gzip
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from dit_lora.config.recipe import DataConfig
from dit_lora.data.media import media
from dit_lora.data.media.media import read_bytes
from dit_lora.data.media.video import read_frames
from dit_lora.data.sources import webdataset
from dit_lora.data.sources.clips import Clip, DataScan
from dit_lora.data.sources.scan import read_clips, scan_sources
from dit_lora.data.synthetic.clips import write_shapes

Members = Iterable[tuple[str | tarfile.TarInfo, bytes]]


def write_tar(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(stem: str, caption: str = "a caption") -> list[tuple[str, bytes]]:
    return [(f"{stem}.png", f"image of {stem}".encode()), (f"{stem}.txt", caption.encode())]


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def config(path: Path, **values: object) -> DataConfig:
    return DataConfig(path=str(path), height=32, width=48, **values)  # type: ignore[arg-type]


def codes(found: DataScan) -> list[tuple[str, str]]:
    return [(finding.file, finding.code) for finding in found.problems]


def captions(clips: list[Clip]) -> dict[str, str]:
    return {clip.id: clip.caption for clip in clips}


def test_clips_in_shards_are_read_in_place(tmp_path: Path) -> None:
    """Frames are those of the files, and nothing is written."""
    paths = write_shapes(tmp_path / "clips", clips=2, frames=3, height=32, width=48, fps=8)
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for path, name in zip(paths, ("a-0.tar", "sub/a-1.tar"), strict=True):
        write_tar(data / name, [("0.mp4", path.read_bytes()), ("0.txt", b"moves\n  on")])
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    clips = read_clips(config(data, frames=3, fps=8))
    assert captions(clips) == {"a-0.tar/0.mp4": "moves on", "sub/a-1.tar/0.mp4": "moves on"}
    for clip, path in zip(clips, paths, strict=True):
        options = {"frames": 3, "height": 32, "width": 48, "fps": 8.0}
        assert torch.equal(read_frames(clip.media, **options), read_frames(path, **options))  # type: ignore[arg-type]
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_one_tar_is_a_source_and_captions_are_texts_records_or_classes(tmp_path: Path) -> None:
    """A member's key ends at the first dot of its base name; long names and a leading ./ are read."""
    deep = "d" * 120
    members = [
        ("./x/1.png", b"1"),
        ("./x/1.txt", b"\xef\xbb\xbfone"),
        ("x/2.PNG", b"2"),
        ("x/2.json", json.dumps({"caption": "two", "short": "2"}).encode()),
        (f"{deep}/1.jpg", b"3"),
        (f"{deep}/1.cls", b"7\n"),
        ("x/4.mp4", b"4"),
        ("x/4.thumb.jpg", b"not this"),
        ("x/4.txt", b"four"),
        ("x/4.json", b"{}"),
        ("README.md", b"of the data"),
        ("x/._1.png", b"a mac's"),
    ]
    clips = read_clips(config(write_tar(tmp_path / "all.tar", members)))
    assert captions(clips) == {
        "x/1.png": "one",
        "x/2.PNG": "two",
        f"{deep}/1.jpg": "7",
        "x/4.mp4": "four",
    }
    assert [read_bytes(clip.media) for clip in clips] == [b"1", b"2", b"3", b"4"]
    scan_result = scan_sources(config(tmp_path / "all.tar", caption_column="short"))
    assert captions(scan_result.clips) == {"x/2.PNG": "2"}
    assert {code for _, code in codes(scan_result)} == {"caption_missing"}


def test_what_a_sample_lacks_or_has_twice_is_listed(tmp_path: Path) -> None:
    members = [
        *pair("good"),
        ("a.png", b"no caption"),
        ("b.txt", b"no image"),
        ("b.heic", b""),
        *pair("c", "  "),
        ("d.png", b""),
        ("d.json", b"{torn"),
        ("e.png", b""),
        ("e.json", b'{"text": null}'),
        *pair("f"),
        ("f.jpg", b"another image"),
        *pair("g"),
        ("g.png", b"again"),
        ("h.png", b""),
        ("h.txt", "café".encode("latin-1")),
    ]
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "s.tar", members)
    scan_result = scan_sources(config(tmp_path / "data"))
    assert captions(scan_result.clips) == {"s.tar/good.png": "a caption"}
    assert codes(scan_result) == [
        ("s.tar/g.png", "duplicate_clip"),
        ("s.tar/a.png", "caption_missing"),
        ("s.tar/b", "missing"),
        ("s.tar/c.png", "caption_empty"),
        ("s.tar/d.png", "caption_not_text"),
        ("s.tar/e.png", "caption_missing"),
        ("s.tar/f", "duplicate_clip"),
        ("s.tar/h.png", "caption_not_text"),
    ]
    source = {"path": str(tmp_path / "data"), "caption": "sks"}
    one_caption = scan_sources(DataConfig(sources=(source,), height=32, width=48))  # type: ignore[arg-type]
    assert {clip.caption for clip in one_caption.clips} == {"sks"}
    assert len(one_caption.clips) == 6


def test_members_that_would_lie_elsewhere_are_refused_by_name(tmp_path: Path) -> None:
    members: Members = [
        *pair("good"),
        *pair("../out"),
        *pair("x/../../out2"),
        *pair("/tmp/absolute"),
        (special("soft.png", tarfile.SYMTYPE, "/etc/hostname"), b""),
        (special("hard.png", tarfile.LNKTYPE, "good.png"), b""),
        (special("disk.png", tarfile.BLKTYPE), b""),
        (special("pipe.txt", tarfile.FIFOTYPE), b""),
        ("pipe.png", b"its caption is a pipe"),
        (special("folder", tarfile.DIRTYPE), b""),
    ]
    scan_result = scan_sources(config(write_tar(tmp_path / "s.tar", members)))
    assert [clip.id for clip in scan_result.clips] == ["good.png"]
    assert codes(scan_result) == [
        (name, "unsafe_name")
        for name in (
            "../out.png",
            "../out.txt",
            "x/../../out2.png",
            "x/../../out2.txt",
            "/tmp/absolute.png",
            "/tmp/absolute.txt",
            "soft.png",
            "hard.png",
            "disk.png",
            "pipe.txt",
        )
    ]
    message_by_file = {problem.file: problem.message for problem in scan_result.problems}
    assert message_by_file["soft.png"] == "a link, to /etc/hostname"
    assert message_by_file["hard.png"] == "a link, to good.png"
    assert message_by_file["disk.png"] == "a device or a pipe"


@pytest.mark.parametrize("where", ["in data", "in a header", "between members", "at the end"])
def test_a_cut_tar_gives_what_comes_before_the_cut(tmp_path: Path, where: str) -> None:
    """Each member here is a header and one block of 512 bytes."""
    content = write_tar(tmp_path / "s.tar", [*pair("0"), *pair("1"), *pair("2")]).read_bytes()
    size_by_cut = {
        "in data": 4 * 1024 + 515,
        "in a header": 4 * 1024 + 100,
        "between members": 4 * 1024,
    }
    (tmp_path / "s.tar").write_bytes(content[: size_by_cut.get(where, 6 * 1024)])
    scan_result = scan_sources(config(tmp_path / "s.tar"))
    before = ["0.png", "1.png", *(["2.png"] if where == "at the end" else [])]
    assert [clip.id for clip in scan_result.clips] == before
    last_problem = scan_result.problems[-1]
    assert (last_problem.file, last_problem.code) == ("s.tar", "truncated")
    assert f"{len(before)} complete samples before it can be used" in last_problem.message
    if where == "in data":
        assert codes(scan_result)[0] == ("2.png", "truncated")


def test_a_damaged_header_is_no_end(tmp_path: Path) -> None:
    """Python's tarfile takes one for the end, and would lose what follows in silence."""
    path = write_tar(tmp_path / "s.tar", [*pair("0"), *pair("1")])
    damaged = bytearray(path.read_bytes())
    damaged[2 * 1024 + 3] ^= 0xFF
    path.write_bytes(damaged)
    scan_result = scan_sources(config(path))
    assert [clip.id for clip in scan_result.clips] == ["0.png"]
    assert codes(scan_result) == [("s.tar", "corrupt")]
    assert "the header at byte 2048 is damaged; the 1 complete samples" in scan_result.problems[0].message


def test_compressed_tars_and_what_is_no_tar_are_named(tmp_path: Path) -> None:
    content = write_tar(tmp_path / "a.tar", pair("0")).read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.tar").write_bytes(gzip.compress(content))
    (tmp_path / "d.tar").write_bytes(b"<html>not found</html>")
    (tmp_path / "e.tar").write_bytes(b"")
    scan_result = scan_sources(config(tmp_path))
    assert [clip.id for clip in scan_result.clips] == ["a.tar/0.png"]
    assert codes(scan_result) == [(f"{n}", "unreadable") for n in ("b.tar.gz", "c.tar", "d.tar", "e.tar")]
    assert "decompress it" in scan_result.problems[0].message
    assert "decompress it" in scan_result.problems[1].message
    assert codes(scan_sources(config(tmp_path / "b.tar.gz"))) == [("b.tar.gz", "unreadable")]


def test_a_folder_of_media_beside_the_tar_they_came_in_is_a_folder_of_media(tmp_path: Path) -> None:
    write_tar(tmp_path / "all.tar", pair("0"))
    (tmp_path / "1.png").write_bytes(b"image")
    (tmp_path / "1.txt").write_text("one")
    assert [clip.id for clip in read_clips(config(tmp_path))] == ["1.png"]


def test_no_media_is_read_to_index_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1_000_000
    path = write_tar(
        tmp_path / "s.tar",
        [m for i in range(5) for m in ((f"{i}.mp4", bytes(size)), (f"{i}.txt", b"x"))],
    )
    num_bytes_read = 0

    class Counting(io.FileIO):
        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            nonlocal num_bytes_read
            count = super().readinto(buffer)
            num_bytes_read += count or 0
            return count or 0

    original_open = Path.open

    def counted(self: Path, mode: str = "r", *args: object, **options: object) -> object:
        if self == path:
            return io.BufferedReader(Counting(self, mode))
        return original_open(self, mode, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counted)
    clips = read_clips(config(path), tmp_path / "cache")
    assert len(clips) == 5
    assert 0 < num_bytes_read < size / 2


def test_an_index_is_kept_until_the_tar_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another column, or another caption, needs no other index."""
    name = "a\udcffb"  # no UTF-8
    members = [(f"{name}.png", b"1"), (f"{name}.txt", b"one"), *pair("../x")]
    members += [("2.png", b"2"), ("2.json", b'{"short": "s"}'), *pair("3")]
    path, cache = write_tar(tmp_path / "s.tar", members), tmp_path / "cache"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"3.png") + 515])
    first_scan = scan_sources(config(path), cache)
    assert captions(first_scan.clips) == {f"{name}.png": "one"}
    expected = {"unsafe_name", "truncated", "caption_missing"}
    assert {code for _, code in codes(first_scan)} == expected
    with monkeypatch.context() as patch:
        patch.setattr(webdataset, "_build_index", None)
        assert scan_sources(config(path), cache) == first_scan
        scan_result = scan_sources(config(path, caption_column="short"), cache)
        assert captions(scan_result.clips) == {"2.png": "s"}
    (memo,) = (cache / "tars").iterdir()
    memo.write_text(memo.read_text()[:100])  # torn
    assert scan_sources(config(path), cache) == first_scan
    write_tar(path, pair("other"))
    assert captions(read_clips(config(path), cache)) == {"other.png": "a caption"}
    assert captions(read_clips(config(path), Path("/dev/null/cache"))) == {"other.png": "a caption"}


def test_what_would_not_fit_the_memory_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is read whole: a few bytes of a tar with holes can promise terabytes."""
    monkeypatch.setattr(media, "MAX_BYTES", 30)
    deep = json.dumps({"text": "x", "more": []}).replace("[]", "[" * 5000 + "]" * 5000)
    members = [
        *pair("good"),
        ("large.png", b"x" * 31),
        ("large.txt", b"a caption"),
        ("book.png", b"image"),
        ("book.txt", b"word " * 100_000),
        ("deep.png", b"image"),
        ("deep.json", deep.encode()),
        ("long.png", b"image"),
        ("long.json", b'{"text": "x", "more": "' + b"x" * 2**24 + b'"}'),
    ]
    scan_result = scan_sources(config(write_tar(tmp_path / "a.tar", members)))
    assert captions(scan_result.clips) == {"good.png": "a caption"}
    assert codes(scan_result) == [
        ("large.png", "too_large"),
        ("book.png", "caption_long"),
        ("deep.png", "caption_not_text"),
        ("long.png", "caption_long"),
    ]
