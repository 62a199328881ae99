"""Sound as models take it, and out: a track of AAC beside a video."""

from dataclasses import dataclass
from typing import NamedTuple

import av
import torch

from dit_lora.numerics.finite import describe_bad

_LAYOUTS = ("mono", "stereo")


class Sound(NamedTuple):
    """A waveform (1 or 2 channels, samples) in floating point from -1 to 1, and its samples a second."""

    waveform: torch.Tensor
    rate: int


def unplayable(sound: Sound | None) -> str | None:
    """Return what of a sound is not finite, in words; None where all of it is, or there is none."""
    return None if sound is None else describe_bad("sound", sound.waveform)


def sound_packets(container: av.container.OutputContainer, sound: Sound) -> list[av.Packet]:
    """Add a track to a container that nothing was written to yet, and return what belongs into it.

    Equal sound gives equal packets.
    """
    waveform = sound.waveform.float().clamp(-1, 1)
    layout = _LAYOUTS[len(waveform) - 1]
    track = container.add_stream("aac", rate=sound.rate, layout=layout)
    track.codec_context.thread_count = 1
    frame = av.AudioFrame.from_ndarray(
        waveform.contiguous().cpu().numpy(), format="fltp", layout=layout
    )
    frame.sample_rate, frame.pts = sound.rate, 0
    return [*track.encode(frame), *track.encode()]


@dataclass(frozen=True)
class SoundFormat:
    """The sound that a model is trained on."""

    rate: int
    """Samples a second."""
    channels: int

    def samples(self, frames: int, fps: float) -> int:
        """Return the number of samples that belong to so many frames."""
        return round(frames / fps * self.rate)
