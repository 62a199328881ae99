"""Sound as models take it, and out: a track of AAC beside a video."""

from dataclasses import dataclass
from typing import NamedTuple

import av
import torch

_LAYOUTS = ("mono", "stereo")


class Sound(NamedTuple):
    """A waveform (1 or 2 channels, samples) in floating point from -1 to 1, and its samples a second."""

    waveform: torch.Tensor
    rate: int


def sound_packets(container: av.container.OutputContainer, sound: Sound) -> list[av.Packet]:
    """Add a track to a container that nothing was written to yet, and return what belongs into it.

    Equal sound gives equal packets. NaN is silence, as it is black in a picture.
    """
    waveform = sound.waveform.float().nan_to_num(0.0).clamp(-1, 1)
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
