"""Videos of many kinds give the same frames as ffmpeg's command line, and the audit agrees with training about them.

`benchmarks/media_corpus.py` made the files and the expected frames.
"""

from pathlib import Path

import numpy as np
import pytest

from dit_lora.data.audit.judge import display_size
from dit_lora.data.audit.probe import probe_file
from dit_lora.data.media.decode import ArbitraryFrameTimes, RegularFrameTimes
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError, decode_pictures, read_header

FOLDER = Path(__file__).parents[3] / "fixtures" / "media"
EXPECTED = np.load(FOLDER / "expected.npz")
VIDEOS = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".npz")
SHOWN = [name for name in VIDEOS if f"{name}/times" in EXPECTED]
MAX_ROUNDING = 3
"""Levels of 255 by which FFmpeg's versions differ, most in how they enlarge the chroma of 10 bits."""


def read_pictures(name: str, wanted: ArbitraryFrameTimes | RegularFrameTimes) -> np.ndarray:
    """Frames (F, H, W, 3) at their own size."""
    media = MediaFile(FOLDER / name)
    return np.stack(decode_pictures(media, wanted, lambda image, stretch: np.asarray(image)))


@pytest.mark.parametrize("name", SHOWN)
def test_frames_are_those_that_ffmpeg_shows(name: str) -> None:
    times, expected = EXPECTED[f"{name}/times"], EXPECTED[f"{name}/frames"].astype(int)
    pictures = read_pictures(name, ArbitraryFrameTimes(tuple(times.tolist())))
    assert len(pictures) == len(times)
    chosen_pictures = pictures[[0, len(times) // 2, -1]]
    assert chosen_pictures.shape == expected.shape
    assert np.abs(chosen_pictures - expected).max() <= MAX_ROUNDING
    # A window in the middle is searched for by key frames.
    middle = len(times) // 2
    window = read_pictures(name, RegularFrameTimes(1, 8.0, float(times[middle])))
    assert np.array_equal(window[0], pictures[middle])


@pytest.mark.parametrize("name", VIDEOS)
def test_the_audit_and_training_agree(name: str) -> None:
    media = MediaFile(FOLDER / name)
    probed = probe_file(media)
    if name not in SHOWN:
        assert probed.faults
        with pytest.raises(ClipError, match=name):
            read_header(media)
        return
    # A cut tail is a fault to the audit only: training reads the frames before it.
    assert [fault.code for fault in probed.faults] == (["truncated"] if "no_end" in name else [])
    header, times = read_header(media), EXPECTED[f"{name}/times"]
    assert (header.height, header.width) == tuple(map(round, display_size(probed.facts)))
    assert probed.facts["frames"] == len(times)
    assert header.frames in (None, len(times))
    if header.seconds is not None and "no_end" not in name:
        assert header.seconds == pytest.approx(times[-1] + times[-1] - times[-2], abs=0.13)
