"""Keeps small copies of the references that samples are made from, for the run's report: the files may move."""

import io
import shutil
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.references import read_reference
from dit_lora.data.media.video import write_video
from dit_lora.families.base import Sampling
from dit_lora.families.references import ReferenceSpec, to_pil_images
from dit_lora.files import write_atomically

REFERENCES_FOLDER = "references"
"""Folder in a run's `samples`; its files are `prompt_00_1.jpg`, or .mp4 for clips."""
# Pixels of the longer edge.
_MAX_EDGE_PIXELS = 512


def copy_references(samples: Path, supported: ReferenceSpec | None, samplings: Iterable[Sampling]) -> None:
    """Write samples/references/prompt_NN_K.jpg (.mp4 for clips), replacing earlier ones."""
    shutil.rmtree(samples / REFERENCES_FOLDER, ignore_errors=True)
    if supported is None:
        return
    for index, sampling in enumerate(samplings):
        for number, file in enumerate(sampling.references, start=1):
            path = samples / REFERENCES_FOLDER / f"prompt_{index:02d}_{number}"
            if supported.is_clip and sampling.shape.frames > 1:
                # (F, 3, H, W) to (F, H, W, 3), as `write_video` takes them.
                frames = read_reference(MediaFile(file), sampling.shape, sampling.fps).permute(0, 2, 3, 1)
                write_video(path.with_suffix(".mp4"), frames, sampling.fps or 8.0)
            else:
                # A picture, or a video's first frame.
                (picture,) = to_pil_images([read_reference(MediaFile(file), None, None)])
                picture.thumbnail((_MAX_EDGE_PIXELS, _MAX_EDGE_PIXELS), Image.Resampling.LANCZOS)
                stream = io.BytesIO()
                picture.save(stream, "JPEG", quality=85)
                write_atomically(path.with_suffix(".jpg"), stream.getvalue())
