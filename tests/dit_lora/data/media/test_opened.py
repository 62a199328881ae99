"""What FFmpeg and Pillow may open: the file that they are given, whole, and no larger than its limits."""

import ast
import io
import socket
import struct
import tarfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.faults.media.encode import encode, moving
from dit_lora.data.audit.probe import probe_file
from dit_lora.data.media import opened
from dit_lora.data.media.media import Media, MediaFile, TarMember
from dit_lora.data.media.video import ClipError, read_frames, read_header

LIBRARY = Path(opened.__file__).parents[2]


def session(port: int) -> bytes:
    """An SDP text: FFmpeg binds the port and waits for packets."""
    lines = ("v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=x", "c=IN IP4 127.0.0.1", "t=0 0")
    video_lines = (f"m=video {port} RTP/AVP 96", "a=rtpmap:96 H264/90000", "")
    return "\r\n".join((*lines, *video_lines)).encode()


def playlist(port: int) -> bytes:
    """HLS: FFmpeg fetches what it lists."""
    address = f"http://127.0.0.1:{port}/a.ts"
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{address}\n#EXT-X-ENDLIST\n".encode()


def manifest(port: int) -> bytes:
    """DASH."""
    base = f"<BaseURL>http://127.0.0.1:{port}/a.mp4</BaseURL>"
    period = f'<Period><AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1">{base}'
    end = "</Representation></AdaptationSet></Period></MPD>"
    return f'<?xml version="1.0"?><MPD type="static" mediaPresentationDuration="PT9S">{period}{end}'.encode()


def concatenation(port: int) -> bytes:
    return f"ffconcat version 1.0\nfile http://127.0.0.1:{port}/a.mp4\n".encode()


def in_a_file(folder: Path, data: bytes) -> Media:
    (folder / "a.mp4").write_bytes(data)
    return MediaFile(folder / "a.mp4")


def in_a_tar(folder: Path, data: bytes) -> Media:
    info = tarfile.TarInfo("a.mp4")
    info.size = len(data)
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.addfile(info, io.BytesIO(data))
    return TarMember(folder / "a.tar", "a.mp4", tarfile.BLOCKSIZE, len(data))


def bound_ports() -> set[int]:
    """UDP ports of this network namespace, where the system lists them."""
    if not Path("/proc/self/net/udp").exists():
        return set()
    rows = Path("/proc/self/net/udp").read_text().splitlines()[1:]
    return {int(row.split()[1].rpartition(":")[2], 16) for row in rows}


@pytest.mark.parametrize("put", [in_a_file, in_a_tar])
@pytest.mark.parametrize("text", [session, playlist, manifest, concatenation])
def test_a_text_that_names_addresses_opens_none(
    tmp_path: Path, text: Callable[[int], bytes], put: Callable[[Path, bytes], Media]
) -> None:
    """Neither where headers are read nor where frames are; and it is over at once."""
    with socket.socket() as server, socket.socket(type=socket.SOCK_DGRAM) as free_socket:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1] if text is session else server.getsockname()[1]
        free_socket.close()
        media = put(tmp_path, text(port))
        messages: list[str] = []

        def read() -> None:
            for operation in (
                read_header,
                lambda file: read_frames(file, frames=1, height=16, width=16, fps=8),
            ):
                try:
                    operation(media)
                except ClipError as error:
                    messages.append(str(error))

        thread, start = threading.Thread(target=read, daemon=True), time.monotonic()
        thread.start()
        while thread.is_alive() and time.monotonic() - start < 5:
            assert port not in bound_ports()
        assert not thread.is_alive()
        assert [line.startswith(media.name) for line in messages] == [True, True]
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [fault.code for fault in probe_file(media).faults] == ["not_media"]


def test_a_name_in_another_encoding_is_no_fault(tmp_path: Path) -> None:
    """PyAV before 19 raises where metadata are not UTF-8, unless it is told otherwise."""
    media = clip(tmp_path)
    plain, data = read_header(media), media.path.read_bytes()
    assert data.count(b"Lavf") == 1  # the writer's name, which a header holds
    media.path.write_bytes(data.replace(b"Lavf", b"L\xe1v\xff"))
    assert read_header(media) == plain
    assert not probe_file(media).faults


def test_media_are_opened_in_one_place() -> None:
    """Elsewhere the library only writes."""
    offenders, num_calls = [], 0
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
                "av.open",
                "Image.open",
            ):
                continue
            num_calls += 1
            if path.name != "opened.py" and [ast.unparse(argument) for argument in node.args[1:]] != ["'w'"]:
                offenders.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
    assert num_calls > 3
    assert not offenders


def clip(folder: Path) -> MediaFile:
    encode(folder / "clip.mp4", moving("clip"))
    return MediaFile(folder / "clip.mp4")


def picture(folder: Path) -> MediaFile:
    Image.fromarray(moving("picture", 1)[0]).save(folder / "picture.png")
    return MediaFile(folder / "picture.png")


@pytest.mark.parametrize("write", [clip, picture])
def test_the_audit_and_training_have_one_limit_of_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], MediaFile]
) -> None:
    media = write(tmp_path)
    assert not probe_file(media).faults
    monkeypatch.setattr(opened, "MAX_PIXELS", 1000)
    assert probe_file(media).faults
    with pytest.raises(ClipError):
        read_header(media)
    with pytest.raises(ClipError):
        read_frames(media, frames=1, height=16, width=16, fps=8)


def test_the_audit_and_training_have_one_limit_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media = clip(tmp_path)
    monkeypatch.setattr(opened, "MAX_FRAMES", 7)
    assert [fault.message[:19] for fault in probe_file(media).faults] == ["more than 7 frames "]
    with pytest.raises(ClipError, match="more than 7 frames"):
        read_frames(media, frames=9, height=16, width=16, fps=8)


def png(rows: int, *, bits: int = 8, colour: int = 2, interlaced: bool = False) -> bytes:
    """45 x 33 pixels of noise, of whose filtered rows `rows` are there."""
    noise = np.random.default_rng(0)
    width, height = 45, 33
    line = width * bits * {0: 1, 2: 3, 3: 1, 6: 4}[colour]
    if interlaced:  # Adam7's rows, as the specification tabulates their columns
        starts = (
            (0, 0, 8, 8),
            (4, 0, 8, 8),
            (0, 4, 4, 8),
            (2, 0, 4, 4),
            (0, 2, 2, 4),
            (1, 0, 2, 2),
            (0, 1, 1, 2),
        )
        lengths = [len(range(x, width, dx)) * line // width for x, y, dx, dy in starts for _ in range(y, height, dy)]
    else:
        lengths = [line] * height
    kept_lengths = lengths[:rows]
    data = b"".join(b"\0" + noise.bytes(-(-length // 8)) for length in kept_lengths)

    def chunk(kind: bytes, content: bytes) -> bytes:
        full_chunk = kind + content
        return struct.pack(">I", len(content)) + full_chunk + struct.pack(">I", zlib.crc32(full_chunk))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", noise.bytes(3 * 2**bits)) if colour == 3 else b""
    packed = zlib.compress(data)
    pixels = b"".join(chunk(b"IDAT", packed[offset : offset + 1000]) for offset in range(0, len(packed), 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + pixels + chunk(b"IEND", b"")


def jpeg(share: float, mode: str = "RGB", **how: object) -> bytes:
    """Of noise; its coded data is cut, and the end marker set behind it."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).convert(mode).resize((180, 120)).save(stream, "JPEG", **how)
    data = stream.getvalue()
    return data if share == 1 else data[: int(share * len(data))] + b"\xff\xd9"


def higher(data: bytes) -> bytes:
    """A JPEG whose header promises more rows."""
    offset = data.index(b"\xff\xc0") + 5
    return data[:offset] + struct.pack(">H", 400) + data[offset + 2 :]


WHOLE = {
    "rgb.png": png(33),
    "deep.png": png(33, bits=16, colour=6),
    "palette.png": png(33, bits=2, colour=3),
    "grey.png": png(33, bits=1, colour=0),
    "interlaced.png": png(99, interlaced=True),
    "plain.jpg": jpeg(1),
    "progressive.jpg": jpeg(1, progressive=True),
    "print.jpg": jpeg(1, "CMYK"),
    "grey.jpg": jpeg(1, "L"),
}
TORN = {
    "rgb.png": png(20),
    "last.png": png(32),
    "deep.png": png(32, bits=16, colour=6),
    "palette.png": png(20, bits=2, colour=3),
    "grey.png": png(32, bits=1, colour=0),
    "interlaced.png": png(50, interlaced=True),
    "half.jpg": jpeg(0.5),
    "most.jpg": jpeg(0.9),
    "progressive.jpg": jpeg(0.5, progressive=True),
    "print.jpg": jpeg(0.5, "CMYK"),
    "grey.jpg": jpeg(0.5, "L"),
    "high.jpg": higher(jpeg(1)),
}


def saved(format: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(moving("x", 1)[0]).save(stream, format)
    return stream.getvalue()


@pytest.mark.parametrize("name", TORN)
def test_an_image_with_rows_missing_is_refused_by_the_audit_and_by_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TORN[name])
    assert [fault.code for fault in probe_file(MediaFile(tmp_path / name)).faults] == ["truncated"]
    with pytest.raises(ClipError, match=rf"{name}: cannot be decoded to its end: the image is trunc"):
        read_frames(tmp_path / name, frames=1, height=16, width=16, fps=None)


@pytest.mark.parametrize("format", ["WEBP", "GIF", "BMP", "TIFF"])
def test_a_cut_image_of_another_format_is_refused_by_both(tmp_path: Path, format: str) -> None:
    data = saved(format)
    path = tmp_path / "a.webp"
    path.write_bytes(data[: len(data) * 3 // 4])
    assert probe_file(MediaFile(path)).faults
    with pytest.raises(ClipError):
        read_frames(path, frames=1, height=16, width=16, fps=None)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_image_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    assert not probe_file(MediaFile(tmp_path / name)).faults
    read_frames(tmp_path / name, frames=1, height=16, width=16, fps=None)


def test_a_grey_corner_alone_is_no_fault(tmp_path: Path) -> None:
    picture = moving("x", 1)[0].copy()
    picture[-16:, -16:] = 128
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=95)
    assert not probe_file(MediaFile(tmp_path / "a.jpg")).faults


def test_an_image_of_a_format_that_starts_programs_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved("EPS"))
    with pytest.raises(ClipError, match=r"a\.png"):
        read_frames(tmp_path / "a.png", frames=1, height=16, width=16, fps=None)
    assert probe_file(MediaFile(tmp_path / "a.png")).faults
