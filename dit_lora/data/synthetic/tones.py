"""Sound of moving shapes: a tone that rises as the shape moves right, and falls as it moves left."""

import math

import torch

from dit_lora.data.media.sound import Sound

SAMPLE_RATE = 44_100
_LOW, _HIGH = 220.0, 880.0
"""Pitch in hertz at the left and at the right."""
_AMPLITUDE = 0.5
TIMBRES = {"disc": (1.0,), "square": (1.0, 0.0, 1 / 3, 0.0, 1 / 5)}
"""Strengths of a shape's partials: a pure tone for a disc, the first terms of a square wave for a square."""


def make_tone(shape: str, moves_right: bool, seconds: float) -> Sound:
    """Generate the sound of a clip in two channels; it moves from one speaker to the other as the shape moves."""
    time = torch.arange(round(seconds * SAMPLE_RATE), dtype=torch.float64) / SAMPLE_RATE
    progress = time / seconds if moves_right else 1 - time / seconds
    # The phase is the integral of the pitch, which changes exponentially.
    pitch = _LOW * (_HIGH / _LOW) ** progress
    phase = 2 * math.pi * pitch.cumsum(0) / SAMPLE_RATE
    partials = TIMBRES[shape]
    # One wave per partial, at multiples of the pitch; strengths of 0 leave a partial out.
    waves = [strength * (number * phase).sin() for number, strength in enumerate(partials, 1)]
    # Divide by the sum of the strengths, so that the wave never exceeds the chosen loudness.
    wave = _AMPLITUDE * torch.stack(waves).sum(0) / sum(partials)
    # Constant power: the squares of cosine and sine sum to 1.
    angle = progress * math.pi / 2
    return Sound(torch.stack([wave * angle.cos(), wave * angle.sin()]).float(), SAMPLE_RATE)
