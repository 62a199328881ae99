"""Finds hard cuts, and tells them from fast motion, flashes and repeated frames.

Shapes: N pictures, H and W pixels.
"""

import numpy as np

# Measured on scenes like those in tests/dit_lora/data/audit/test_cuts.py, and on seven real clips. All 210 joins of
# two clips are found, and nothing else, also not in the clips at 1/2, 1/4 and 1/8 of their frame rate.
_MIN_MOTION_RATIO = 3.0
"""Minimum ratio of a cut's change to the mean change of the frames around it."""
_MIN_NEIGHBOUR_RATIO = 1.5
"""Minimum ratio of a cut's change to the changes just before and after it: a whip pan lasts several frames."""
# Number of frames on either side from which the usual change is computed.
_NUM_NEIGHBOURS = 4
_MIN_CONTRAST_SHARE = 0.2
"""Minimum mean difference at a cut, as a share of the pictures' standard deviation; unrelated pictures have 1.1."""
# Minimum change in grey levels; a smaller one is invisible.
_MIN_CHANGE = 4.0
_MIN_CORRELATION = 0.5
"""Minimum correlation of pictures of one scene, also after a flash or at other brightness; unrelated: up to 0.17."""
_MIN_SHIFTED_CORRELATION = 0.6
"""Minimum correlation of pictures of one scene at the best shift; measured: 0.68 or more, unrelated up to 0.48."""
# Animations with few frames per second show each frame up to this many times.
_MAX_REPEATS = 4
_MAX_FLASH_FRAMES = 4
# Maximum movement of a shaken camera between two frames, in pixels of a 24 x 24 picture.
_MAX_SHIFT = 8


def find_cuts(grey: np.ndarray, change: np.ndarray, still: np.ndarray) -> list[int]:
    """Find the cuts in a clip: indices of the pictures that begin a new shot.

    Args:
        grey: Pictures, uint8 (N, H, W).
        change: Mean difference of each picture to the previous one, in levels, (N,).
        still: True where a picture repeats the previous one, bool (N,).
    """
    number = np.arange(len(still))
    # How many pictures each one is after the last picture that was not a repeat.
    repeats = number - np.maximum.accumulate(np.where(still, 0, number))
    # Drop repeated frames, because they make the change at the next frame look large. A longer standstill stays.
    moving = number[(repeats == 0) | (repeats >= _MAX_REPEATS)]
    # (M, H, W) and (M,), for the M pictures that are not repeats.
    pictures, changes = grey[moving], change[moving]
    deviations = pictures.reshape(len(moving), -1).std(1)
    return [
        int(moving[k])
        for k in range(1, len(moving))
        # The change must be visible, large for the pictures' contrast, and large compared with the motion around it.
        if changes[k] >= max(_MIN_CHANGE, _MIN_CONTRAST_SHARE * (deviations[k - 1] + deviations[k]) / 2)
        and changes[k] >= _MIN_MOTION_RATIO * _compute_usual_change(changes, k)
        and not _is_same_scene(pictures, k)
    ]


def _compute_usual_change(changes: np.ndarray, k: int) -> float:
    """Mean change of a clip's pictures around picture k, raised if an adjacent change is large.

    The change of picture 0 is not defined.
    """
    before, after = (changes[max(1, k - _NUM_NEIGHBOURS) : k], changes[k + 1 : k + 1 + _NUM_NEIGHBOURS])
    around = np.concatenate([before, after])
    # A single neighbour is not enough to tell which change is usual.
    if len(around) < 2:
        return np.inf
    return max(around.mean(), max([*before[-1:], *after[:1]]) * _MIN_NEIGHBOUR_RATIO / _MIN_MOTION_RATIO)


def _is_same_scene(pictures: np.ndarray, k: int) -> bool:
    """True if a picture from before k appears again at k or soon after, which means no cut at k.

    It may be brighter, darker or shifted.
    """
    start = max(0, k - 1 - _MAX_FLASH_FRAMES)
    detail = _extract_detail(pictures[start : k + 1 + _MAX_FLASH_FRAMES])
    # Pictures before the suspected cut, and pictures from it on.
    before, after = detail[: k - start], detail[k - start :]
    if any(_compute_correlation(earlier, later) >= _MIN_CORRELATION for earlier in before for later in after):
        return True
    # A shaken camera moves the picture, so compare the two pictures at the cut with shifts too.
    return _correlate_shifted_pictures(before[-1], after[0]) >= _MIN_SHIFTED_CORRELATION


def _extract_detail(pictures: np.ndarray) -> np.ndarray:
    """Remove structures larger than 7 pixels from pictures, float (N, H, W).

    Such structures correlate between any two scenes.
    """
    # Odd reflection continues a gradient beyond the edge, so that subtracting the mean removes it there too.
    padded = np.pad(pictures.astype(np.float32), ((0, 0), (3, 3), (3, 3)), mode="reflect", reflect_type="odd")
    # (N, H, W, 7, 7) to the mean of each pixel's 7 x 7 neighbourhood, (N, H, W).
    means = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), axis=(1, 2)).mean((3, 4))
    return pictures - means


def _compute_correlation(picture_a: np.ndarray, picture_b: np.ndarray) -> float:
    """Pearson correlation of two pictures; 0 for pictures without contrast."""
    x, y = picture_a - picture_a.mean(), picture_b - picture_b.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    # With deviations below one level, the pictures have no contrast but rounding.
    return float((x * y).sum()) / norm if norm > x.size else 0.0


def _correlate_shifted_pictures(picture_a: np.ndarray, picture_b: np.ndarray) -> float:
    height, width = picture_a.shape
    best = 0.0
    for down in range(-_MAX_SHIFT, _MAX_SHIFT + 1):
        # The overlap of the two pictures: one without its upper or lower edge, the other without the opposite one.
        rows = slice(max(0, down), height + min(0, down))
        other_rows = slice(max(0, -down), height + min(0, -down))
        for right in range(-_MAX_SHIFT, _MAX_SHIFT + 1):
            columns = slice(max(0, right), width + min(0, right))
            other_columns = slice(max(0, -right), width + min(0, -right))
            best = max(best, _compute_correlation(picture_a[rows, columns], picture_b[other_rows, other_columns]))
    return best
