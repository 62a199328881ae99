"""Measures of a clip's pictures: brightness, contrast, motion, stillness, cuts.

Everything is computed from pictures of 48 x 48 pixels, and from the levels of a few full-size ones. Levels are
0 to 255. Shapes: N pictures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dit_lora.data.audit.cuts import find_cuts
from dit_lora.data.audit.signature import GRID_SIDE, MediaSignature

SMALL_SIDE = 48
"""Side of the small pictures, in pixels."""

# Weights of red, green and blue (ITU-R BT.601).
LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)
_BATCH_SIZE = 64

# A picture is black if at least 98% of its areas are no brighter than this level; FFmpeg's blackdetect has 10% of
# the range and 98% of the pixels. In the darkest of seven real clips (a kitchen) at most 57% are that dark; with 200
# bright dots on black, fewer than 98%.
_BLACK_LEVEL = 20
_MIN_BLACK_SHARE = 0.98
# Maximum difference of a still picture from the first one of its run, in any of 48 x 48 areas and on average: a still
# picture that x264 encodes at crf 30 differs by 8 levels and 1.2 from one key frame to the next.
_STILL_MOST, _STILL_MEAN = 8, 1.2
# Share of the darkest and of the brightest pixels that is ignored.
_TAIL_SHARE = 0.0005


class PictureMeasures:
    """Collects measurements of a clip's pictures, one after another; needs 0.7 KiB per picture."""

    def __init__(self) -> None:
        self._pending: list[np.ndarray] = []
        self._last_picture: np.ndarray | None = None
        self._run_start: np.ndarray | None = None
        self._still_flags: list[bool] = []
        self._batches: list[dict[str, np.ndarray]] = []
        """Measures of up to `_BATCH_SIZE` pictures each, by name."""
        self._level_counts = np.zeros(256, np.int64)
        self._contrasts: list[float] = []

    def add(self, small: np.ndarray) -> None:
        """Add the clip's next picture, uint8 (48, 48, 3)."""
        self._pending.append(small)
        if len(self._pending) == _BATCH_SIZE:
            self._measure_pending_pictures()

    def add_luma_levels(self, luma: np.ndarray) -> None:
        """Add the luma levels of a full-size picture, uint8 (H, W); a few pictures of a clip are enough."""
        # A histogram of 256 levels has everything that is needed, so the picture itself is not kept.
        counts = np.bincount(luma.ravel(), minlength=256)
        shares = counts / counts.sum()
        mean = (shares * np.arange(256)).sum()
        self._contrasts.append(float(np.sqrt((shares * (np.arange(256) - mean) ** 2).sum())))
        self._level_counts += counts

    def _measure_pending_pictures(self) -> None:
        if not self._pending:
            return
        rgb = np.stack(self._pending)
        self._pending.clear()
        count = len(rgb)
        # (N, 48, 48, 3) to (N, 48, 48).
        luma = rgb.astype(np.float32) @ LUMA_WEIGHTS
        half, cell = SMALL_SIDE // 2, SMALL_SIDE // GRID_SIDE
        # (N, 48, 48, 3) to mean colours of GRID x GRID areas, (N, GRID, GRID, 3).
        blocks = rgb.reshape(count, GRID_SIDE, cell, GRID_SIDE, cell, 3).mean((2, 4))
        # The first picture of the clip is compared with itself, so its change is 0.
        before = rgb[:1] if self._last_picture is None else self._last_picture
        # int16, because differences of uint8 would wrap around.
        pairs = np.concatenate([before, rgb]).astype(np.int16)
        self._batches.append(
            {
                "mean": luma.mean((1, 2)),
                "lit": (luma > _BLACK_LEVEL).mean((1, 2)),
                "least": rgb.min((1, 2)),
                "most": rgb.max((1, 2)),
                # (N, 48, 48) to (N, 24, 24), from which cuts and hashes are computed.
                "grey": luma.reshape(count, half, 2, half, 2).mean((2, 4)).astype(np.uint8),
                "colours": blocks.astype(np.uint8),
                "change": np.abs(np.diff(pairs, axis=0)).mean((1, 2, 3)),
            }
        )
        self._last_picture = rgb[-1:]
        self._still_flags += [self._is_still_since_run_start(picture) for picture in rgb.astype(np.int16)]

    def _is_still_since_run_start(self, picture: np.ndarray) -> bool:
        """True if a picture still shows the picture that began the current run, so that the clip stands still."""
        # Not the previous picture, because slow motion would then count as standing still.
        if self._run_start is not None:
            difference = np.abs(picture - self._run_start)
            if difference.max() <= _STILL_MOST and difference.mean() <= _STILL_MEAN:
                return True
        self._run_start = picture
        return False

    def compute_measurements(self, times: Sequence[float]) -> dict[str, Any]:
        """Measurements of the clip's pictures by name.

        `times` are the start of each picture in seconds, and the end of the last one.
        """
        self._measure_pending_pictures()
        measured = {name: np.concatenate([batch[name] for batch in self._batches]) for name in self._batches[0]}
        change, grey = measured["change"], measured["grey"]
        black = 1 - measured["lit"] >= _MIN_BLACK_SHARE
        still = np.array(self._still_flags)
        # Share of the pixels at or below each level, (256,); a small share at either end is ignored.
        reached = np.cumsum(self._level_counts) / self._level_counts.sum()
        low, high = np.searchsorted(reached, [_TAIL_SHARE, 1 - _TAIL_SHARE])
        signature = MediaSignature.from_pictures(grey, measured["colours"], times)
        return {
            "luma_mean": round(float(measured["mean"].mean()), 1),
            "luma_min": int(low),
            "luma_max": int(high),
            "levels": int(max(measured["most"].max(0).astype(int) - measured["least"].min(0))),
            "contrast": round(max(self._contrasts), 2),
            # The change of the first picture is 0 by definition and would lower the mean.
            "motion": round(float(change[1:].mean()), 2) if len(change) > 1 else 0.0,
            "black_share": round(float(black.mean()), 4),
            "black": _find_runs(black, times),
            "still": _find_longest_still(still, times),
            "cuts": [round(float(times[k]), 3) for k in find_cuts(grey, change, still)],
            "hash": signature.text,
        }


def _find_runs(flags: np.ndarray, times: Sequence[float]) -> list[list[float]]:
    """Start and length, in seconds, of each stretch of pictures in which the flags are set."""
    # Edges come in pairs: the first picture of a stretch, and the picture after its last.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [
        [round(float(times[start]), 3), round(float(times[end] - times[start]), 3)]
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _find_longest_still(still: np.ndarray, times: Sequence[float]) -> dict[str, Any]:
    # Each picture that is not a repeat begins a stretch; the end of the clip closes the last one.
    starts = np.append(np.flatnonzero(~still[1:]) + 1, len(still))
    starts = np.concatenate([[0], starts])
    seconds = np.diff(np.asarray(times)[starts])
    k = int(seconds.argmax())
    return {
        "start": round(float(times[starts[k]]), 3),
        "seconds": round(float(seconds[k]), 3),
        "share": round(float(seconds[k] / times[-1]), 3) if times[-1] else 1.0,
        "frames": int(starts[k + 1] - starts[k]),
    }
