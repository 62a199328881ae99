"""Add a video or an image to TensorBoard: PyTorch's `add_video` needs moviepy and an FFmpeg, and keeps no caption."""

import io
from pathlib import Path
from typing import Any

from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.opened import open_media, open_picture

_LONGEST_SIDE = 320
"""Pixels: TensorBoard's files hold what they show."""


def add_animation(writer: Any, tag: str, path: Path, caption: str, step: int) -> None:
    """Add a GIF of a video (.mp4) or a PNG of an image to a `SummaryWriter`, the caption as its description."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    milliseconds = 0.0
    if path.suffix == ".mp4":
        with open_media(MediaFile(path)) as container:
            milliseconds = 1000 / float(container.streams.video[0].average_rate or 8)
            frames = [frame.to_image() for frame in container.decode(video=0)]
    else:
        with open_picture(MediaFile(path)) as image:
            frames = [image.convert("RGB")]
    for frame in frames:
        frame.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    data, kind = io.BytesIO(), "GIF" if len(frames) > 1 else "PNG"
    # A PNG takes none of these.
    frames[0].save(
        data, kind, save_all=kind == "GIF", append_images=frames[1:], duration=milliseconds, loop=0
    )
    width, height = frames[0].size
    picture = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=data.getvalue()
    )
    about = SummaryMetadata(summary_description=caption)
    value = Summary.Value(tag=tag, image=picture, metadata=about)
    writer.file_writer.add_summary(Summary(value=[value]), step)
