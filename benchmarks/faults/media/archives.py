"""Tars that are torn, packed, or whose members would lie elsewhere."""

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults.media.kind import Kind, write_good
from dit_lora.data.audit.finding import Verdict

_TAR = "shard-000000.tar"


def member(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    """A tar member for `write_tar`."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def _special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


Members = Sequence[tuple[tarfile.TarInfo, bytes]]


def write_tar(path: Path, members: Members, mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))


def _pair(folder: Path, name: str, stem: str) -> Members:
    """The tar members of a generated clip and its caption, both named after `stem`."""
    path = folder / f"{name}.mp4"
    write_good(path)
    text = path.with_suffix(".txt")
    pair = [member(f"{stem}.mp4", path.read_bytes()), member(f"{stem}.txt", text.read_bytes())]
    path.unlink()
    text.unlink()
    return pair


def _kind(name: str, make: Callable[[Path], None], file: str, code: str | None, good: str = "") -> Kind:
    verdict: Verdict = "reject" if code else "ok"
    return Kind(name, make, file, verdict, code, good=good or f"{_TAR}/good.mp4", writes_good=True)


def _with(
    name: str,
    stem: str,
    code: str | None,
    change: Callable[[Members], Members] = lambda members: members,
) -> Kind:
    """A tar that holds the good sample and a second one."""

    def make(folder: Path) -> None:
        write_tar(folder / _TAR, [*_pair(folder, "good", "good"), *change(_pair(folder, "clip", stem))])

    return _kind(name, make, f"{_TAR}/{stem}.mp4", code)


def _linked(kind: bytes) -> Callable[[Members], Members]:
    return lambda members: [_special(members[0][0].name, kind, "/etc/hostname"), members[1]]


def _torn(folder: Path) -> None:
    write_tar(folder / _TAR, [*_pair(folder, "good", "good"), *_pair(folder, "clip", "clip")])
    data = (folder / _TAR).read_bytes()
    # Past the member's header of 512 bytes and into its data.
    middle = data.index(b"clip.mp4") + 512 + 1000
    (folder / _TAR).write_bytes(data[:middle])


def _compressed(folder: Path) -> None:
    write_tar(folder / "good.tar", _pair(folder, "good", "good"))
    write_tar(folder / _TAR, _pair(folder, "clip", "clip"), "w:gz")


KINDS = (
    _with("a tar", "clip", None),
    _with("a member out of the tar's folder", "../clip", "unsafe_name"),
    _with("a member with an absolute name", "/tmp/clip", "unsafe_name"),
    _with("a member that is a link", "clip", "unsafe_name", _linked(tarfile.SYMTYPE)),
    _with("a member that is a hard link", "clip", "unsafe_name", _linked(tarfile.LNKTYPE)),
    _with("a member that is a device", "clip", "unsafe_name", _linked(tarfile.CHRTYPE)),
    _with("a member that is there twice", "clip", "duplicate_clip", lambda pair: [*pair, *pair]),
    _with("a member without caption", "clip", "caption_missing", lambda pair: pair[:1]),
    _kind("a torn tar", _torn, f"{_TAR}/clip.mp4", "truncated"),
    _kind("a compressed tar", _compressed, _TAR, "unreadable", "good.tar/good.mp4"),
)
