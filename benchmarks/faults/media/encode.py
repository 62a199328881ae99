"""Small moving pictures, and the files that they are encoded to: the material of the bad media.

Shapes: F frames, H and W pixels, C channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import av
import numpy as np

from dit_lora.data.media.sound import encode_sound
from dit_lora.data.synthetic.tones import make_tone

FPS = 8
FRAMES = 16
HEIGHT, WIDTH = 32, 48
_WAVES = 24
_TONE: ContextVar[bool] = ContextVar("tone", default=False)

Video = np.ndarray
"""uint8 (F, H, W, C)."""


def moving(name: str, frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> Video:
    """Coloured clouds that drift, with values from 0 to 255. The name seeds the picture."""
    random = np.random.default_rng(crc32(name.encode()))
    t, y, x = np.arange(frames) / FPS, np.arange(height) / HEIGHT, np.arange(width) / WIDTH
    channels = []
    for _ in range(3):
        turns = random.uniform(0.3, 4.0, (2, _WAVES)) * random.choice([-1, 1], (2, _WAVES))
        phases, speeds = random.uniform(0, 1, _WAVES), random.uniform(0.1, 0.3, _WAVES)
        # A wave of n turns has 1 / n of the height, as in pictures of nature.
        waves = np.exp(2j * np.pi * phases) / np.hypot(*turns)
        in_t, in_y, in_x = (
            np.exp(2j * np.pi * np.outer(at, count)) for at, count in ((t, speeds), (y, turns[0]), (x, turns[1]))
        )
        levels = ((waves * in_t)[:, None] * in_y @ in_x.T).real
        channels.append((levels - levels.min()) / (np.ptp(levels) or 1.0) * 255)
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def flat(level: int, frames: int = FRAMES) -> Video:
    """The same grey level in every pixel."""
    return np.full((frames, HEIGHT, WIDTH, 3), level, np.uint8)


@contextmanager
def added_tone(is_on: bool = True) -> Iterator[None]:
    """Give every video that is encoded within a tone as its sound, if `given`."""
    before = _TONE.set(is_on)
    try:
        yield
    finally:
        _TONE.reset(before)


def encode(
    path: Path,
    video: Video,
    codec: str = "libx264",
    *,
    pixels: str = "yuv420p",
    fps: int = FPS,
    times: Sequence[int] | None = None,
    muxer: str | None = None,
    options: Mapping[str, str] | None = None,
    muxing: Mapping[str, str] | None = None,
    tags: Mapping[str, Any] | None = None,
    display: Callable[[Any], None] = lambda stream: None,
) -> None:
    """Write RGB or RGBA frames as one video stream; `times` are in milliseconds, `tags` of the codec's context."""
    layout = "rgba" if video.shape[-1] == 4 else "rgb24"
    with av.open(path, "w", format=muxer, options=dict(muxing or {})) as container:
        added = container.add_stream(codec, rate=fps, options=dict(options or {}))
        stream = cast(av.VideoStream, added)
        stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], pixels
        # With several threads an encoder's bytes, and so a file's digest, may differ from run to run.
        stream.thread_count = 1
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in (tags or {}).items():
            setattr(stream.codec_context, name, value)
        display(stream)
        if _TONE.get() and len(video) > 1:
            container.mux(encode_sound(container, make_tone("disc", True, len(video) / fps)))
        for number, picture in enumerate(video):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format=layout)
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
