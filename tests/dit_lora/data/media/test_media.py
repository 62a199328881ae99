"""Where media are and what they are, by their names and by their bytes."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile, TarMember, detect_suffix, get_suffix, read_bytes
from dit_lora.errors import DitLoraError


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "bmp", "tiff", "gif", "avif"])
def test_images_are_known_by_their_bytes(format: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (7, 5), "red").save(buffer, format=format)
    sniffed = detect_suffix(buffer.getvalue()[:64])
    assert sniffed == {"jpeg": ".jpg"}.get(format, f".{format}")
    assert is_image(Path(f"x{sniffed}"))


@pytest.mark.parametrize(
    ("muxer", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
    ],
)
def test_videos_are_known_by_their_bytes(tmp_path: Path, muxer: str, codec: str) -> None:
    with av.open(tmp_path / "x", "w", format=muxer) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    sniffed = detect_suffix((tmp_path / "x").read_bytes()[:64])
    assert sniffed == {"matroska": ".mkv"}.get(muxer, f".{muxer}")
    assert not is_image(Path(f"x{sniffed}"))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"<html>",
        b"PK\x03\x04",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"ID3\x04",
        b"BMW of red colour",
        b"The free and wide",
        b"a caption that says moov",
    ],
)
def test_other_bytes_are_of_no_kind(head: bytes) -> None:
    assert detect_suffix(head) is None


def test_a_file_is_itself_by_its_place_and_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file behind a link is told apart, even of the same size and time."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.PNG").write_bytes(name.encode())
        os.utime(tmp_path / name / "a.PNG", ns=(1, 1))
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "v1")
    media = MediaFile(link / "a.PNG")
    before = media.get_file_stamp()
    assert media.get_file_stamp() == before
    assert get_suffix(media) == ".png"
    link.unlink()
    link.symlink_to(tmp_path / "v2")
    assert media.get_file_stamp() != before
    monkeypatch.chdir(tmp_path / "v1")
    for path in ("a.PNG", "../v1/a.PNG"):
        assert MediaFile(Path(path)).location == str(tmp_path / "v1" / "a.PNG")
    link.unlink()
    assert not media.exists()
    with pytest.raises(DitLoraError, match=r"cannot read .*a\.PNG: No such file"):
        read_bytes(media)


def test_a_member_is_its_bytes_in_the_tar(tmp_path: Path) -> None:
    contents = {"x/a.png": b"the first", "x/b.mp4": b"the second, longer"}
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with tarfile.open(tmp_path / "s.tar") as tar:
        members = [TarMember(tmp_path / "s.tar", m.name, m.offset_data, m.size) for m in tar]
    assert [read_bytes(member) for member in members] == list(contents.values())
    assert pickle.loads(pickle.dumps(members)) == members
    assert len({(member.location, member.get_file_stamp()) for member in members}) == 2
    assert is_image(members[0])
    assert not is_image(members[1])
    stamp = members[0].get_file_stamp()
    os.utime(tmp_path / "s.tar", ns=(1, 1))
    assert members[0].get_file_stamp() != stamp
    (tmp_path / "s.tar").unlink()
    assert not members[0].exists()
