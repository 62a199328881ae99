"""How long the audit takes on clips of ten seconds, and how much of that is plain decoding.

    python -m benchmarks.audit [--clips 1000] [--workers N] [--seconds 10]

Clips of 854x480 at 24 or 30 fps, H.264 at 1 to 3 Mbit/s, of moving textures, a moving patch and sensor noise: five
contents, each stored many times as hard links, which the audit reads and decodes one by one. Plain decoding is PyAV's:
every frame of every clip once, in one thread, with the same number of processes.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import av
import numpy as np
from tqdm import tqdm

HEIGHT, WIDTH = 480, 854
CONTENTS = ((24, 1000), (30, 1500), (24, 2000), (30, 2500), (24, 3000))
"""Frames a second and kbit/s."""
TARGET = 600.0
"""Seconds that 1,000 clips may take on two cores."""


def texture(random: np.random.Generator, height: int, width: int, decay: float) -> np.ndarray:
    """uint8 (height, width, 3) whose amplitudes fall with frequency as natural images' do."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    channels = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * random.random(frequency.shape))
        waves = np.fft.irfft2(phases / frequency**decay, (height, width))
        channels.append(128 + 50 * (waves - waves.mean()) / waves.std())
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)


def write_clip(path: Path, fps: int, kbits: int, seconds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scene = texture(random, 2 * HEIGHT, 2 * WIDTH, 1.6)
    patch = texture(random, 200, 200, 1.2)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.bit_rate = 1000 * kbits
        for number in range(fps * seconds):
            t = number / fps
            y, x = int(240 + 160 * np.sin(0.7 * t)), int(427 + 280 * np.cos(0.5 * t))
            picture = scene[y : y + HEIGHT, x : x + WIDTH].astype(np.int16)
            y, x = int(140 + 140 * np.sin(2 * t)), int(327 + 327 * np.cos(1.7 * t))
            picture[y : y + 200, x : x + 200] = patch
            picture += random.integers(-6, 7, (HEIGHT, WIDTH, 1), np.int16)
            frame = av.VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_clips(folder: Path, count: int, seconds: int) -> list[Path]:
    contents = []
    for number, (fps, kbits) in enumerate(tqdm(CONTENTS, desc="writing", unit="content")):
        contents.append(folder / f"content_{number}.mp4")
        write_clip(contents[-1], fps, kbits, seconds, number)
    clips = [folder / f"{number:05d}.mp4" for number in range(count)]
    for number, clip in enumerate(clips):
        os.link(contents[number % len(contents)], clip)
    return clips


def decode(path: Path) -> int:
    """Every frame, and nothing else."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.thread_count = "NONE", 1
        return sum(1 for _ in container.decode(stream))


@dataclass
class Spent:
    """Seconds on the clock, and of processors' time in all processes, which other programs do not change much."""

    clock: float = 0.0
    cores: float = 0.0


@contextmanager
def measured() -> Iterator[Spent]:
    def cores() -> float:
        parent, children = (getrusage(process) for process in (RUSAGE_SELF, RUSAGE_CHILDREN))
        return parent.ru_utime + parent.ru_stime + children.ru_utime + children.ru_stime

    usage, clock, before = Spent(), time.perf_counter(), cores()
    yield usage
    usage.clock, usage.cores = time.perf_counter() - clock, cores() - before


def plain(clips: Sequence[Path], workers: int) -> Spent:
    with measured() as usage, ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        frames = sum(pool.map(decode, clips))
    assert frames > len(clips)
    return usage


def audited(clips: Sequence[Path], workers: int, seconds: int) -> tuple[Spent, int]:
    """The audit's time, and the number of rejected clips, which should be 0."""
    from dit_lora.config.data import DataConfig
    from dit_lora.data.audit.runner import audit_media
    from dit_lora.data.media.media import MediaFile
    from dit_lora.data.sources.clips import Clip

    samples = [Clip(path.name, MediaFile(path), "") for path in clips]
    # 49 frames at 8 fps, or as many (4k + 1) as shorter clips have.
    frames = min(49, 8 * seconds - 3)
    data = DataConfig(path="clips", frames=frames, height=HEIGHT, width=720, fps=8)
    with measured() as usage:
        samples_audited = audit_media(samples, data, workers=workers, show_progress=True)
    return usage, sum(sample.verdict == "reject" for sample in samples_audited)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=int, default=10, help="length of each clip")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        clips = write_clips(Path(folder), args.clips, args.seconds)
        mebibytes = sum(clip.stat().st_size for clip in clips) / 2**20
        audit, rejected = audited(clips, args.workers, args.seconds)
        decoding = plain(clips, args.workers)
    count, kilo = args.clips, 1000 / args.clips
    print(f"{count} clips of {args.seconds} s, {mebibytes:.0f} MiB, {args.workers} processes")
    for name, usage in (("audit", audit), ("plain decoding", decoding)):
        print(
            f"{name}: {usage.clock:.1f} s, {count / usage.clock:.2f} clips a second, "
            f"{usage.cores / count:.2f} core-seconds a clip"
        )
    print(f"the audit takes {audit.cores / decoding.cores:.2f} times as much; {rejected} clips are rejected")
    busy = kilo * audit.cores / args.workers
    print(
        f"1,000 clips: {kilo * audit.clock:.0f} s as measured, {busy:.0f} s if nothing else runs; "
        f"target {TARGET:.0f} s on 2 cores"
    )


if __name__ == "__main__":
    main()
