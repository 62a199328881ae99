"""Sound of moving shapes: a tone whose pitch rises as the shape moves to the right and falls as it moves to the left."""

import math

import torch

from dit_lora.data.media.sound import Sound

RATE = 44_100
_LOW, _HIGH = 220.0, 880.0
"""Hertz at the left and at the right."""
_LOUD = 0.5
TIMBRES = {"disc": (1.0,), "square": (1.0, 0.0, 1 / 3, 0.0, 1 / 5)}
"""Strengths of a shape's partials: a disc sounds pure, a square as a square wave begins."""


def tone(shape: str, rightwards: bool, seconds: float) -> Sound:
    """Return the tone of a shape in both channels: it moves from one speaker to the other as the shape does."""
    time = torch.arange(round(seconds * RATE), dtype=torch.float64) / RATE
    progress = time / seconds if rightwards else 1 - time / seconds
    # The phase is the integral of the pitch, which goes by octaves.
    pitch = _LOW * (_HIGH / _LOW) ** progress
    phase = 2 * math.pi * pitch.cumsum(0) / RATE
    partials = TIMBRES[shape]
    waves = [strength * (number * phase).sin() for number, strength in enumerate(partials, 1)]
    wave = _LOUD * torch.stack(waves).sum(0) / sum(partials)
    angle = progress * math.pi / 2
    return Sound(torch.stack([wave * angle.cos(), wave * angle.sin()]).float(), RATE)
