"""Keeps what a run's samples are made from beside them, small, for its report: the files may move away."""

import io
import shutil
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_reference
from dit_lora.data.media.video import write_video
from dit_lora.families.base import Sampling
from dit_lora.families.references import References, as_pictures
from dit_lora.files import write_whole

SHOWN = "references"
"""The folder in a run's `samples`; its files are `prompt_00_1.jpg`, or .mp4 of clips."""
_EDGE = 512  # pixels


def keep_references(samples: Path, takes: References | None, given: Iterable[Sampling]) -> None:
    """Write samples/references/prompt_NN_K.jpg, in place of those that are there; where clips are taken, .mp4."""
    shutil.rmtree(samples / SHOWN, ignore_errors=True)
    if takes is None:
        return
    for index, how in enumerate(given):
        for place, file in enumerate(how.references, start=1):
            path = samples / SHOWN / f"prompt_{index:02d}_{place}"
            if takes.clips and how.shape.frames > 1:
                frames = read_reference(MediaFile(file), how.shape, how.fps).permute(0, 2, 3, 1)
                write_video(path.with_suffix(".mp4"), frames, how.fps or 8.0)
            else:
                write_whole(path.with_suffix(".jpg"), _small(file))


def _small(file: Path) -> bytes:
    """Return a picture, or a video's first frame, as JPEG."""
    (picture,) = as_pictures([read_reference(MediaFile(file), None, None)])
    picture.thumbnail((_EDGE, _EDGE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=85)
    return stream.getvalue()
