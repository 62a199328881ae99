"""Small videos of many kinds, with the frames that FFmpeg's command line shows of them.

    python -m benchmarks.media_corpus tests/fixtures/media

Writes the videos and `expected.npz`, for `tests/dit_lora/data/media/test_corpus.py`: for each file the times of its
frames in seconds, and its first, middle and last frame in RGB. Files without expected frames are those that ffmpeg
cannot open. Needs `ffmpeg` 5.1 or newer with libx264, libx265 and libvpx.
"""

import argparse
import shlex
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 48, 32
SOURCE = f"-f lavfi -i testsrc2=size={WIDTH}x{HEIGHT}:rate=8:duration=2"
X264 = "-c:v libx264 -preset veryfast -threads 1 -pix_fmt yuv420p"
GROUPS = "-x264-params keyint=8:scenecut=0:bframes=2:b-adapt=0"
OPEN_GROUPS = f"{GROUPS}:open-gop=1"
MATRICES = {"bt601": "smpte170m", "bt709": "bt709", "bt2020": "bt2020nc"}


@dataclass(frozen=True)
class Video:
    """One file of the corpus."""

    arguments: str
    """Arguments of ffmpeg; `{folder}` is where earlier files are."""
    height: int = HEIGHT
    """Height of the frames that ffmpeg shows."""
    width: int = WIDTH
    reading: str = "format=rgb24"
    """Filters that turn the frames into RGB."""


def colour(matrix: str, span: str) -> Video:
    """Levels of another matrix or range, with their tags."""
    name = MATRICES[matrix]
    scaled = f'-vf "scale=out_color_matrix={matrix}:out_range={span}"'
    return Video(f"{SOURCE} {scaled} {X264} -colorspace {name} -color_range {span}")


SMOOTH = f'{SOURCE} -vf "gblur=12,scale=out_color_matrix=bt709"'
CORPUS = {
    "whole.mp4": Video(f"{SOURCE} {X264} {GROUPS}"),
    # Cut between key frames: an edit list hides the frames before, which are decoded all the same.
    "cut.mp4": Video("-ss 0.6 -i {folder}/whole.mp4 -c copy"),
    "cut.mov": Video("-ss 0.6 -i {folder}/whole.mp4 -c copy"),
    # Matroska has no edit lists: the frames before the cut are shown.
    "cut.mkv": Video("-ss 0.6 -i {folder}/whole.mp4 -c copy"),
    "open_groups.mp4": Video(f"{SOURCE} {X264} {OPEN_GROUPS}"),
    "open_groups_cut.mp4": Video("-ss 1.2 -i {folder}/open_groups.mp4 -c copy"),
    "open_groups_cut.mkv": Video("-ss 1.2 -i {folder}/open_groups.mp4 -c copy"),
    "fragments_cut.mp4": Video("-ss 0.6 -i {folder}/whole.mp4 -c copy -movflags frag_keyframe+empty_moov"),
    "delayed.mp4": Video("-itsoffset 0.5 -i {folder}/whole.mp4 -c copy"),
    "uneven.mp4": Video(f"{SOURCE} -vf \"select='gt(mod(n,3),0)'\" -fps_mode vfr {X264}"),
    "late_sound.mp4": Video(
        f'{SOURCE} -f lavfi -i sine=duration=2 -filter_complex "[1]adelay=500[a]" -map 0:v -map "[a]" '
        f"{X264} {GROUPS} -c:a aac -b:a 16k"
    ),
    "late_sound_cut.mp4": Video("-ss 0.6 -i {folder}/late_sound.mp4 -c copy"),
    **{f"{m}_{span}.mp4": colour(m, span) for m in MATRICES for span in ("tv", "pc")},
    "ten_bits.mp4": Video(
        f"{SMOOTH} -c:v libx264 -threads 1 -pix_fmt yuv420p10le -colorspace bt709",
        # The place of chroma in H.264, which older versions of the command line do not take from the frame.
        reading="scale=in_h_chr_pos=0:in_v_chr_pos=128,format=rgb24",
    ),
    "alpha.webm": Video(
        f"{SOURCE} -vf \"format=yuva420p,geq=lum='p(X,Y)':a='4*X'\" -c:v libvpx-vp9 -pix_fmt yuva420p"
    ),
    # Sent live: the header knows no length.
    "live.webm": Video(f"{SOURCE} -c:v libvpx -live 1"),
    "interlaced.mp4": Video(f"{SOURCE} {X264} -flags +ildct+ilme", reading="scale=interl=1,format=rgb24"),
    "odd.mkv": Video(f'{SOURCE} -vf "scale=47:31" -c:v ffv1 -pix_fmt yuv444p', 31, 47),
    "hevc_cut.mp4": Video("-ss 0.6 -i {folder}/.hevc.mp4 -c copy -tag:v hvc1"),
    "wide_pixels.mp4": Video(f"{SOURCE} -vf setsar=4/3 {X264}"),
    "sound_only.mp4": Video("-f lavfi -i sine=duration=1 -c:a aac -b:a 16k"),
}
HIDDEN = {".hevc.mp4": f"{SOURCE} -c:v libx265 -preset ultrafast -x265-params log-level=none:keyint=8"}
# First two rows of display matrices in 16.16: pixel (x, y) goes to (a x + c y, b x + d y).
TURNED = {
    "turned_90.mp4": (0, -1, 1, 0),
    "turned_180.mp4": (-1, 0, 0, -1),
    "turned_270.mp4": (0, 1, -1, 0),
    "mirrored.mp4": (-1, 0, 0, 1),
    "upside_down.mp4": (1, 0, 0, -1),
    "transposed.mp4": (0, 1, 1, 0),
    "transversed.mp4": (0, -1, -1, 0),
}


def ffmpeg(arguments: str) -> bytes:
    """Run ffmpeg and return its output."""
    command = ["ffmpeg", "-v", "error", "-y", *shlex.split(arguments)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def write_files(folder: Path) -> None:
    """Write the videos, without `expected.npz`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, arguments in HIDDEN.items():
            ffmpeg(f"{arguments} {temporary}/{name}")
        for name, video in CORPUS.items():
            arguments = video.arguments.replace("{folder}/.", f"{temporary}/.")
            target = folder / name
            if name == "live.webm":  # nothing that is written to a pipe can be corrected later
                target.write_bytes(ffmpeg(f"{arguments} -f webm -"))
            else:
                ffmpeg(f"{arguments.format(folder=folder)} -fflags +bitexact {target}")
    for name, (a, b, c, d) in TURNED.items():
        write_matrix(folder / "whole.mp4", folder / name, (a, b, c, d))
    mp4, matroska = folder / "whole.mp4", folder / "cut.mkv"
    (folder / "no_index.mp4").write_bytes(mp4.read_bytes()[: mp4.stat().st_size * 7 // 10])
    (folder / "no_end.mkv").write_bytes(matroska.read_bytes()[: matroska.stat().st_size * 7 // 10])


def write_matrix(source: Path, target: Path, matrix: tuple[int, int, int, int]) -> None:
    """Copy a file with another display matrix in its track header (`tkhd`, ISO 14496-12, 8.3.2)."""
    data = bytearray(source.read_bytes())
    a, b, c, d = matrix
    # Version 0: 4 bytes of flags and 36 of times, ids and volume come before the matrix.
    at = data.index(b"tkhd") + 4 + 40
    x, top = (WIDTH if min(a, c) < 0 else 0), (HEIGHT if min(b, d) < 0 else 0)
    rows = (a, b, 0, c, d, 0, x, top, 0x4000)
    struct.pack_into(">9i", data, at, *(row << 16 for row in rows))
    target.write_bytes(data)


def expected(path: Path, video: Video) -> tuple[np.ndarray, np.ndarray]:
    """Times of all frames in seconds, and frames (3, H, W, 3): first, middle, last."""
    raw = ffmpeg(f'-i {path} -map 0:v:0 -fps_mode passthrough -vf "{video.reading}" -f rawvideo -pix_fmt rgb24 -')
    frames = np.frombuffer(raw, np.uint8).reshape(-1, video.height, video.width, 3)
    lines = ffmpeg(f"-i {path} -map 0:v:0 -fps_mode passthrough -copyts -f framecrc -enc_time_base 1:1000000 -")
    rows = [row.split(b",") for row in lines.splitlines() if not row.startswith(b"#")]
    times = np.array([int(row[2]) / 1e6 for row in rows])
    return times - times[0], frames[[0, len(frames) // 2, -1]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    write_files(folder)
    videos = CORPUS | {"no_end.mkv": Video("")}
    videos |= {name: Video("", WIDTH, HEIGHT) if matrix[0] == 0 else Video("") for name, matrix in TURNED.items()}
    arrays: dict[str, np.ndarray] = {}
    for name, video in sorted(videos.items()):
        if name == "sound_only.mp4":
            continue
        arrays[f"{name}/times"], arrays[f"{name}/frames"] = expected(folder / name, video)
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(arrays) // 2} videos with their frames, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
