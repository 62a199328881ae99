"""Sound in a model's format, and writing it as an AAC track of a video."""

from dataclasses import dataclass
from typing import NamedTuple

import av
import torch

from dit_lora.numerics.finite import describe_bad_values

_LAYOUTS = ("mono", "stereo")


class Sound(NamedTuple):
    """A waveform (1 or 2 channels, samples), floating point from -1 to 1, and its sample rate."""

    waveform: torch.Tensor
    rate: int


def find_sound_fault(sound: Sound | None) -> str | None:
    """Message about values of a sound that are not finite; None if all are finite or there is no sound."""
    return None if sound is None else describe_bad_values("sound", sound.waveform)


def encode_sound(container: av.container.OutputContainer, sound: Sound) -> list[av.Packet]:
    """Add a sound track to a video container, before anything is written to it; returns the encoded packets.

    Equal sound gives equal packets.
    """
    waveform = sound.waveform.float().clamp(-1, 1)
    layout = _LAYOUTS[len(waveform) - 1]
    track = container.add_stream("aac", rate=sound.rate, layout=layout)
    # One thread, so that equal sound gives equal bytes.
    track.codec_context.thread_count = 1
    frame = av.AudioFrame.from_ndarray(waveform.contiguous().cpu().numpy(), format="fltp", layout=layout)
    frame.sample_rate, frame.pts = sound.rate, 0
    # Encoding nothing flushes the encoder.
    return [*track.encode(frame), *track.encode()]


@dataclass(frozen=True)
class SoundFormat:
    """Format of the sound that a model is trained on."""

    rate: int
    """Samples per second."""
    channels: int

    def count_samples(self, frames: int, fps: float) -> int:
        """Number of sound samples that belong to this many frames."""
        return round(frames / fps * self.rate)
