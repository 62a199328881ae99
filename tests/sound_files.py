"""Clips with sound, written by PyAV: any codec, rate, channels and offset of the sound."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

FPS = 8


@dataclass(frozen=True)
class Tones:
    """The sound of a clip: channels of sine waves."""

    hertz: tuple[float, ...] = (440.0,)
    codec: str = "pcm_s16le"
    rate: int = 44_100
    seconds: float = 2.0
    offset: float = 0.0
    """Seconds between the first picture and the first sample."""
    silent_until: float = 0.0
    loud: float = 0.5
    gap: tuple[float, float] | None = None
    """Seconds in which no packet is."""

    @property
    def layout(self) -> str:
        return {1: "mono", 2: "stereo", 6: "5.1"}[len(self.hertz)]

    def values(self) -> np.ndarray:
        """Float32 (channels, N)."""
        time = np.arange(round(self.seconds * self.rate)) / self.rate
        waves = [self.loud * np.sin(2 * np.pi * frequency * time) for frequency in self.hertz]
        return (np.stack(waves) * (time >= self.silent_until)).clip(-1, 1).astype(np.float32)


def write_clip(path: Path, tones: Tones | None = None, *, frames: int = 16, shown_at: float = 0.0) -> Path:
    """Write 32 x 48 pixels of a moving bar, the first at `shown_at` seconds, with that sound."""
    with av.open(path, "w") as container:
        video = container.add_stream("libx264", rate=FPS)
        video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        sound = tones and container.add_stream(tones.codec, rate=tones.rate, layout=tones.layout)
        for number in range(frames):
            pixels = np.full((32, 48, 3), 30, np.uint8)
            pixels[:, 2 * number : 2 * number + 12] = 220
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number + round(shown_at * FPS), Fraction(1, FPS)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        if tones is not None and sound is not None:
            _write_sound(container, sound, tones)
    return path


def _write_sound(container: av.container.OutputContainer, stream: av.AudioStream, tones: Tones) -> None:
    values, rate = tones.values(), tones.rate
    resampler = av.AudioResampler(format=stream.codec_context.format, layout=tones.layout, rate=rate)
    # Packets of 20 ms, which a gap may lie between.
    for at in range(0, values.shape[1], rate // 50):
        if tones.gap is not None and tones.gap[0] <= at / rate < tones.gap[1]:
            continue
        piece = np.ascontiguousarray(values[:, at : at + rate // 50])
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=tones.layout)
        frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
        frame.pts = at + round(tones.offset * rate)
        for resampled in resampler.resample(frame):
            container.mux(stream.encode(resampled))
    container.mux(stream.encode(None))


def pitch(channel: np.ndarray, rate: int) -> float:
    """Return the frequency, in hertz, at which a wave is the strongest."""
    spectrum = np.abs(np.fft.rfft(channel * np.hanning(len(channel)), 16 * len(channel)))
    return float(spectrum.argmax() * rate / (16 * len(channel)))
