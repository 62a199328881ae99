"""Hard cuts, told from fast motion, flashes and repeated frames.

Shapes: N pictures, H and W pixels.
"""

import numpy as np

# Measured on scenes such as those of tests/dit_lora/data/audit/test_cuts.py, and on seven real clips: of 210 joins of two
# all are found, and nothing else, nor anything in the clips at 1/2, 1/4 and 1/8 of their frame rate.
_TIMES_MOTION = 3.0
"""A cut changes a picture so many times as much as the frames around it do."""
_TIMES_NEXT = 1.5
"""And so many times as much as the frames just before and after: a whip pan lasts longer than one."""
_NEIGHBOURS = 4  # frames on either side that tell what is usual
_OF_CONTRAST = 0.2
"""Of two pictures that have nothing in common, the mean difference is 1.1 times their standard deviation."""
_LEAST = 4.0  # levels; less cannot be seen
_SAME = 0.5
"""Correlation of two pictures of one scene, be one brighter, or a flash between them; of unrelated ones, 0.17 at most."""
_SAME_SHIFTED = 0.6
"""The same for the best shift: of one scene from 0.68 on, of unrelated ones 0.48 at most."""
_CADENCE = 4  # times that films of few frames a second show each
_FLASH = 4  # frames that a flash may last
_SHIFT = 8  # of 24 pixels, that a shaken camera may move at once


def cut_positions(grey: np.ndarray, change: np.ndarray, still: np.ndarray) -> list[int]:
    """The indices of pictures that begin another shot.

    `grey` is uint8 (N, H, W); `change` the mean difference of each picture to the one before it, in levels;
    `still` whether it repeats that one.
    """
    number = np.arange(len(still))
    repeats = number - np.maximum.accumulate(np.where(still, 0, number))
    # Each repeated frame would make the motion at the next one look large; what stands still for longer is still.
    kept = number[(repeats == 0) | (repeats >= _CADENCE)]
    pictures, changes = grey[kept], change[kept]
    deviations = pictures.reshape(len(kept), -1).std(1)
    return [
        int(kept[k])
        for k in range(1, len(kept))
        if changes[k] >= max(_LEAST, _OF_CONTRAST * (deviations[k - 1] + deviations[k]) / 2)
        and changes[k] >= _TIMES_MOTION * _usual(changes, k)
        and not _same_scene(pictures, k)
    ]


def _usual(changes: np.ndarray, k: int) -> float:
    """The mean change of the frames around k, or more if the next ones change more; the first picture has none."""
    before, after = changes[max(1, k - _NEIGHBOURS) : k], changes[k + 1 : k + 1 + _NEIGHBOURS]
    around = np.concatenate([before, after])
    if len(around) < 2:
        return np.inf  # with one frame beside it, nothing tells whether such a change is usual
    return max(around.mean(), max([*before[-1:], *after[:1]]) * _TIMES_NEXT / _TIMES_MOTION)


def _same_scene(pictures: np.ndarray, k: int) -> bool:
    """Whether what was seen before k is seen at k or soon after, brighter, darker or moved."""
    first = max(0, k - 1 - _FLASH)
    detail = _detail(pictures[first : k + 1 + _FLASH])
    before, after = detail[: k - first], detail[k - first :]
    if any(_correlation(one, two) >= _SAME for one in before for two in after):
        return True
    return _shifted_correlation(before[-1], after[0]) >= _SAME_SHIFTED


def _detail(pictures: np.ndarray) -> np.ndarray:
    """Without what is larger than 7 pixels: bright skies over dark ground correlate in any two scenes."""
    around = ((0, 0), (3, 3), (3, 3))
    # Odd: a slope goes on beyond the edge, and leaves nothing there.
    padded = np.pad(pictures.astype(np.float32), around, mode="reflect", reflect_type="odd")
    means = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), axis=(1, 2)).mean((3, 4))
    return pictures - means


def _correlation(one: np.ndarray, two: np.ndarray) -> float:
    """Pearson's; of pictures without contrast 0."""
    x, y = one - one.mean(), two - two.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm > x.size else 0.0


def _shifted_correlation(one: np.ndarray, two: np.ndarray) -> float:
    """The best of all shifts."""
    height, width = one.shape
    best = 0.0
    for down in range(-_SHIFT, _SHIFT + 1):
        rows = slice(max(0, down), height + min(0, down))
        other_rows = slice(max(0, -down), height + min(0, -down))
        for right in range(-_SHIFT, _SHIFT + 1):
            columns = slice(max(0, right), width + min(0, right))
            other_columns = slice(max(0, -right), width + min(0, -right))
            found = _correlation(one[rows, columns], two[other_rows, other_columns])
            best = max(best, found)
    return best
