"""49 frames at 8 fps, 480x720, out of H.264 clips: `read_frames` against other ways to get the same pixels.

    python -m benchmarks.decode [--rounds 7] [--threads 1 2] [--clips FOLDER] [--short]

The clips are made here, 854x480 at 30 fps: 10 s read from their start, 30 s read from their middle, each with a key
frame every 48 and every 250 frames, and one of 49 frames at 8 fps that are all wanted. `--short` makes only the last
one, and `--clips` adds the mp4 files of a folder. `whole file` turns every frame into RGB before some are chosen, as
torchvision.io.read_video did. `from the beginning` is `read_frames` without its search. decord and torchcodec
(approximate seek mode) take part where they can be imported; they are told the indices of the frames. All choose the
same frames and resize them with the same function, and every contender's result must equal that of `whole file`. The
contenders run in random order; medians are compared. With one thread, the process is kept on one core.
"""

import argparse
import importlib
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from dit_lora.data.media.decode import RegularFrameTimes, iter_nearest_frames
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.pictures import scale_to_cover, stack_pictures, to_upright_image
from dit_lora.data.media.video import read_frames

FRAMES, HEIGHT, WIDTH, FPS = 49, 480, 720, 8.0


@dataclass(frozen=True)
class Task:
    name: str
    path: Path
    start: float
    indices: Sequence[int]
    """Of the frames that are nearest to the wanted times."""
    stretch: float
    """Width of a stored pixel to its height; none of the clips may be turned."""


Contender = Callable[[Task, int], np.ndarray]
"""Returns uint8 (F, 3, H, W), with so many threads."""


def ours(task: Task, threads: int) -> np.ndarray:
    size = {"frames": FRAMES, "height": HEIGHT, "width": WIDTH}
    return read_frames(task.path, fps=FPS, start=task.start, **size).numpy()


def from_the_beginning(task: Task, threads: int) -> np.ndarray:
    times = RegularFrameTimes(FRAMES, FPS, task.start)
    chosen: list[np.ndarray] = []
    for near in iter_nearest_frames(MediaFile(task.path), times, should_seek=False):
        picture = scale_to_cover(*to_upright_image(near.frame, near.pixel_aspect), HEIGHT, WIDTH)
        chosen += [picture] * near.num_times
    return stack_pictures(chosen)


def whole_file(task: Task, threads: int) -> np.ndarray:
    with av.open(task.path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count, stream.codec_context.thread_type = threads, "AUTO"
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    return resized(task, (frames[index] for index in task.indices))


def by_decord(task: Task, threads: int) -> np.ndarray:
    decord = importlib.import_module("decord")
    reader = decord.VideoReader(str(task.path), num_threads=threads)
    return resized(task, reader.get_batch(list(task.indices)).asnumpy())


def by_torchcodec(task: Task, threads: int) -> np.ndarray:
    decoders = importlib.import_module("torchcodec.decoders")
    options = {"num_ffmpeg_threads": threads, "seek_mode": "approximate", "dimension_order": "NHWC"}
    decoder = decoders.VideoDecoder(str(task.path), **options)
    return resized(task, decoder.get_frames_at(list(task.indices)).data.numpy())


def resized(task: Task, pictures: Any) -> np.ndarray:
    return stack_pictures(
        [scale_to_cover(Image.fromarray(picture), task.stretch, HEIGHT, WIDTH) for picture in pictures]
    )


def contenders() -> dict[str, Contender]:
    readers: dict[str, Contender] = {
        "read_frames": ours,
        "from the beginning": from_the_beginning,
        "whole file": whole_file,
    }
    for name, module, contender in (
        ("decord", "decord", by_decord),
        ("torchcodec", "torchcodec.decoders", by_torchcodec),
    ):
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            first_line = str(error).strip().splitlines()[0]
            print(f"without {name}: {first_line}")
        else:
            readers[name] = contender
    return readers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clips", type=Path)
    parser.add_argument("--short", action="store_true", help="make only the clip of 49 frames")
    arguments = parser.parse_args(argv)
    readers = contenders()
    cores = os.sched_getaffinity(0)
    print(
        f"PyAV {av.__version__}, libavcodec {av.library_versions['libavcodec']}, Pillow {Image.__version__}, "
        f"{platform.machine()}, {len(cores)} cores, median of {arguments.rounds}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tasks = list(make_tasks(Path(folder), only_short=arguments.short))
        real = sorted(arguments.clips.glob("*.mp4")) if arguments.clips else []
        tasks += [task_of(path.name, path) for path in real]
        try:
            for threads in arguments.threads:
                os.sched_setaffinity(0, {min(cores)} if threads == 1 else cores)
                torch.set_num_threads(threads)
                report(measure(tasks, readers, threads, arguments.rounds), list(readers), threads)
        finally:
            os.sched_setaffinity(0, cores)


def measure(
    tasks: Sequence[Task], readers: dict[str, Contender], threads: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds of each task and contender; one round more, the first, is dropped and checked."""
    seconds: dict[str, dict[str, list[float]]] = {t.name: {w: [] for w in readers} for t in tasks}
    order = [(task, name) for task in tasks for name in readers]
    expected = {task.name: whole_file(task, threads) for task in tasks}
    for task, name in order:
        if not np.array_equal(readers[name](task, threads), expected[task.name]):
            raise SystemExit(f"{name} gives other pixels for {task.name}")
    for _ in range(rounds):
        random.shuffle(order)
        for task, name in order:
            began = time.perf_counter()
            readers[name](task, threads)
            seconds[task.name][name].append(time.perf_counter() - began)
    return {t: {w: statistics.median(v) for w, v in row.items()} for t, row in seconds.items()}


def report(medians: dict[str, dict[str, float]], names: Sequence[str], threads: int) -> None:
    other_names = [name for name in names if name != "read_frames"]
    print(f"\n{threads} thread(s): clips a second, and read_frames' as a multiple of each other's")
    print(f"| | read_frames | {' | '.join(other_names)} |\n|---|{'---:|' * len(names)}")
    for task, row in medians.items():
        our_seconds = row["read_frames"]
        ratios = " | ".join(f"{1 / row[name]:.1f} (x {row[name] / our_seconds:.2f})" for name in other_names)
        print(f"| {task} | {1 / our_seconds:.1f} | {ratios} |", flush=True)


def make_tasks(folder: Path, *, only_short: bool) -> Iterator[Task]:
    for seconds, start in () if only_short else ((10, 0.0), (30, 12.0)):
        for gop in (48, 250):
            path = write(folder / f"{seconds}s_{gop}.mp4", 30 * seconds, 30, gop)
            yield task_of(f"{seconds} s, GOP {gop}, from {start:g} s", path, start)
    yield task_of("49 frames, all wanted", write(folder / "short.mp4", FRAMES, 8, 12))


def task_of(name: str, path: Path, start: float = 0.0) -> Task:
    with av.open(path) as container:
        stretch = float(container.streams.video[0].sample_aspect_ratio or 1)
        times = np.array([frame.time for frame in container.decode(video=0)])
    wanted_times = start + np.arange(FRAMES) / FPS
    # The middles between frames, moved a little, as `read_frames` settles ties.
    middles = (times[1:] + times[:-1]) / 2 - times[0]
    indices = np.searchsorted(middles + 1e-6 / FPS, wanted_times).tolist()
    return Task(name, path, start, indices, stretch)


def write(path: Path, frames: int, fps: int, gop: int, height: int = 480, width: int = 854) -> Path:
    """A window moving over a texture, with some noise; encoded by x264's defaults."""
    generator = np.random.default_rng(0)
    rough = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    texture = np.asarray(Image.fromarray(rough).resize((2 * width, 2 * height), Image.Resampling.BICUBIC))
    noise = generator.integers(0, 9, (8, height, width, 1), dtype=np.uint8)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": str(gop)})
        stream.thread_type = "FRAME"  # by slices, which PyAV asks for, a decoder could use threads otherwise
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for index in range(frames):
            x_offset = int(width / 2 * (1 + np.sin(index / 70)))
            top = int(height / 2 * (1 + np.cos(index / 50)))
            pixels = texture[top : top + height, x_offset : x_offset + width] // 2 + noise[index % 8]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


if __name__ == "__main__":
    main()
