"""Measures of a clip's pictures: brightness, contrast, motion, stillness, cuts.

Everything is told from pictures of 48 x 48 pixels, and from the levels of a few whole ones. Levels are 0 to
255. Shapes: N pictures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dit_lora.data.audit.cuts import cut_positions
from dit_lora.data.audit.signature import GRID, Signature

SIDE = 48
"""Number of pixels along a side of the small pictures."""

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
_BATCH = 64  # pictures measured at once

# A picture is black if no more than 2% of its areas are brighter: FFmpeg's blackdetect has 10% of the range and 98% of the
# pixels. Of the darkest of seven real clips (a kitchen), at most 57% are; of 200 bright dots on black, fewer than 98%.
_BLACK_LEVEL = 20
_BLACK_SHARE = 0.98
# A picture stands still while it differs from the first one of its run by no more than this, in one of 48 x 48 areas
# and on average: a still picture that x264 encodes at crf 30 differs by 8 levels and 1.2 from one keyframe to the next.
_STILL_MOST, _STILL_MEAN = 8, 1.2
# Share of the pixels at either end of the levels that may be anything.
_TAIL = 0.0005


class PictureMeasures:
    """Collects measures of each picture in turn; memory grows by 0.7 KiB a picture."""

    def __init__(self) -> None:
        self._waiting: list[np.ndarray] = []
        self._last: np.ndarray | None = None
        self._run: np.ndarray | None = None
        self._still: list[bool] = []
        self._batches: list[dict[str, np.ndarray]] = []
        """Measures of some pictures at a time, by name."""
        self._levels = np.zeros(256, np.int64)
        self._contrasts: list[float] = []

    def add(self, small: np.ndarray) -> None:
        """Add the next picture, uint8 (48, 48, 3)."""
        self._waiting.append(small)
        if len(self._waiting) == _BATCH:
            self._measure()

    def add_levels(self, luma: np.ndarray) -> None:
        """Add the levels of a picture, uint8 luma in full size; a few pictures are enough."""
        counts = np.bincount(luma.ravel(), minlength=256)
        shares = counts / counts.sum()
        mean = (shares * np.arange(256)).sum()
        self._contrasts.append(float(np.sqrt((shares * (np.arange(256) - mean) ** 2).sum())))
        self._levels += counts

    def _measure(self) -> None:
        if not self._waiting:
            return
        rgb = np.stack(self._waiting)
        self._waiting.clear()
        count = len(rgb)
        luma = rgb.astype(np.float32) @ _LUMA
        half, cell = SIDE // 2, SIDE // GRID
        blocks = rgb.reshape(count, GRID, cell, GRID, cell, 3).mean((2, 4))
        # The first picture is compared with itself: its change is 0.
        before = rgb[:1] if self._last is None else self._last
        pairs = np.concatenate([before, rgb]).astype(np.int16)
        self._batches.append(
            {
                "mean": luma.mean((1, 2)),
                "lit": (luma > _BLACK_LEVEL).mean((1, 2)),
                "least": rgb.min((1, 2)),
                "most": rgb.max((1, 2)),
                "grey": luma.reshape(count, half, 2, half, 2).mean((2, 4)).astype(np.uint8),
                "colours": blocks.astype(np.uint8),
                "change": np.abs(np.diff(pairs, axis=0)).mean((1, 2, 3)),
            }
        )
        self._last = rgb[-1:]
        self._still += [self._stands_still(picture) for picture in rgb.astype(np.int16)]

    def _stands_still(self, picture: np.ndarray) -> bool:
        """Return True if a picture is still that with which the current run began.

        It is not compared with the one before it, so that slow motion is motion.
        """
        if self._run is not None:
            difference = np.abs(picture - self._run)
            if difference.max() <= _STILL_MOST and difference.mean() <= _STILL_MEAN:
                return True
        self._run = picture
        return False

    def facts(self, times: Sequence[float]) -> dict[str, Any]:
        """Return the measures; `times` are the pictures' seconds since the first, and the end of the last."""
        self._measure()
        measured = {
            name: np.concatenate([batch[name] for batch in self._batches])
            for name in self._batches[0]
        }
        change, grey = measured["change"], measured["grey"]
        black = 1 - measured["lit"] >= _BLACK_SHARE
        still = np.array(self._still)
        low, high = self._range()
        signature = Signature.of(grey, measured["colours"], times)
        return {
            "luma_mean": round(float(measured["mean"].mean()), 1),
            "luma_min": low,
            "luma_max": high,
            "levels": int(max(measured["most"].max(0).astype(int) - measured["least"].min(0))),
            "contrast": round(max(self._contrasts), 2),
            "motion": round(float(change[1:].mean()), 2) if len(change) > 1 else 0.0,
            "black_share": round(float(black.mean()), 4),
            "black": _runs(black, times),
            "still": _longest(still, times),
            "cuts": [round(float(times[k]), 3) for k in cut_positions(grey, change, still)],
            "hash": signature.text,
        }

    def _range(self) -> tuple[int, int]:
        """Return the darkest and the brightest level, a few pixels left out."""
        reached = np.cumsum(self._levels) / self._levels.sum()
        low, high = np.searchsorted(reached, [_TAIL, 1 - _TAIL])
        return int(low), int(high)


def _runs(flags: np.ndarray, times: Sequence[float]) -> list[list[float]]:
    """Return start and length, in seconds, of each stretch in which the flags are set."""
    # Edges come in pairs: a stretch's first picture, and the one after its last.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [
        [round(float(times[first]), 3), round(float(times[end] - times[first]), 3)]
        for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _longest(still: np.ndarray, times: Sequence[float]) -> dict[str, Any]:
    """Return the longest stretch that shows one picture: start, seconds, share of the clip, and frames."""
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
