"""Hard cuts, told from fast motion, flashes and repeated frames.

Shapes: N pictures, H and W pixels.
"""

import numpy as np

# Measured on scenes such as those of tests/dit_lora/data/audit/test_cuts.py, and on seven real clips: of 210 joins of two
# all are found, and nothing else, nor anything in the clips at 1/2, 1/4 and 1/8 of their frame rate.
_TIMES_MOTION = 3.0
"""Least ratio of a cut's change to the mean change of the frames around it."""
_TIMES_NEXT = 1.5
"""Least ratio of a cut's change to those of the frames just before and after: a whip pan lasts longer than one."""
# Frames on either side that tell which change is usual.
_NEIGHBOURS = 4
_OF_CONTRAST = 0.2
"""Least mean difference of a cut, as a share of the pictures' standard deviation.

For two pictures that have nothing in common it is 1.1.
"""
# Grey levels; a smaller change cannot be seen.
_LEAST = 4.0
_SAME = 0.5
"""Least correlation of pictures of one scene, be one brighter or a flash between; unrelated ones have up to 0.17."""
_SAME_SHIFTED = 0.6
"""Least correlation of two pictures of one scene for the best shift: it has 0.68 or more, unrelated ones up to 0.48."""
# Films with few frames a second show each one up to so many times.
_CADENCE = 4
# Frames that a flash may last.
_FLASH = 4
# Pixels, of 24, that a shaken camera may move at once.
_SHIFT = 8


def cut_positions(grey: np.ndarray, change: np.ndarray, still: np.ndarray) -> list[int]:
    """Return the indices of pictures that begin another shot.

    `grey` is uint8 (N, H, W); `change` the mean difference of each picture to the one before it, in levels;
    `still` is true where a picture repeats the one before it.
    """
    number = np.arange(len(still))
    repeats = number - np.maximum.accumulate(np.where(still, 0, number))
    # A repeated frame would make the motion at the next one look large; what stands still for longer is still.
    moving = number[(repeats == 0) | (repeats >= _CADENCE)]
    pictures, changes = grey[moving], change[moving]
    deviations = pictures.reshape(len(moving), -1).std(1)
    return [
        int(moving[k])
        for k in range(1, len(moving))
        if changes[k] >= max(_LEAST, _OF_CONTRAST * (deviations[k - 1] + deviations[k]) / 2)
        and changes[k] >= _TIMES_MOTION * _usual(changes, k)
        and not _same_scene(pictures, k)
    ]


def _usual(changes: np.ndarray, k: int) -> float:
    """Return the mean change of the frames around k, or more if the next ones change more; the first has none."""
    before, after = changes[max(1, k - _NEIGHBOURS) : k], changes[k + 1 : k + 1 + _NEIGHBOURS]
    around = np.concatenate([before, after])
    # With one frame beside it, nothing tells whether such a change is usual.
    if len(around) < 2:
        return np.inf
    return max(around.mean(), max([*before[-1:], *after[:1]]) * _TIMES_NEXT / _TIMES_MOTION)


def _same_scene(pictures: np.ndarray, k: int) -> bool:
    """Return True if what was seen before k is seen at k or soon after, brighter, darker or moved."""
    first = max(0, k - 1 - _FLASH)
    detail = _detail(pictures[first : k + 1 + _FLASH])
    before, after = detail[: k - first], detail[k - first :]
    if any(_correlation(earlier, later) >= _SAME for earlier in before for later in after):
        return True
    return _shifted_correlation(before[-1], after[0]) >= _SAME_SHIFTED


def _detail(pictures: np.ndarray) -> np.ndarray:
    """Return the pictures, float (N, H, W), without structures larger than 7 pixels.

    Bright skies over dark ground correlate in any two scenes.
    """
    around = ((0, 0), (3, 3), (3, 3))
    # Odd reflection continues a slope beyond the edge, so that nothing of it is left there.
    padded = np.pad(pictures.astype(np.float32), around, mode="reflect", reflect_type="odd")
    means = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), axis=(1, 2)).mean((3, 4))
    return pictures - means


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation; 0 for pictures without contrast."""
    x, y = first - first.mean(), second - second.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm > x.size else 0.0


def _shifted_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the best correlation of all shifts up to `_SHIFT` pixels."""
    height, width = first.shape
    best = 0.0
    for down in range(-_SHIFT, _SHIFT + 1):
        rows = slice(max(0, down), height + min(0, down))
        other_rows = slice(max(0, -down), height + min(0, -down))
        for right in range(-_SHIFT, _SHIFT + 1):
            columns = slice(max(0, right), width + min(0, right))
            other_columns = slice(max(0, -right), width + min(0, -right))
            correlation = _correlation(first[rows, columns], second[other_rows, other_columns])
            best = max(best, correlation)
    return best
