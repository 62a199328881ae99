"""Small thumbnails for pages: frames of a clip in a row, or a picture."""

import io
from collections.abc import Sequence

import torch
from PIL import Image

from dit_lora.data.chat.frames import read_frames_at
from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError, read_header


def make_film_strip(media: Media | None, seconds: Sequence[float], height: int) -> bytes:
    """The frames at these times in a row, as one JPEG of this height; empty if they cannot be read."""
    if media is None:
        return b""
    try:
        header = read_header(media)
        # Limit the aspect ratio of the thumbnail to between 1:4 and 4:1.
        width = round(min(4.0, max(0.25, header.width / header.height)) * height)
        # uint8 (F, 3, H, W), cropped to the thumbnail's aspect ratio.
        pixels = read_frames_at(media, seconds, height=height, width=width, fit="cover")
    except ClipError:
        return b""
    stream = io.BytesIO()
    # Frames of (3, H, W) side by side, then (H, W of all frames, 3).
    row = torch.cat(list(pixels), dim=-1).permute(1, 2, 0).contiguous()
    Image.fromarray(row.numpy()).save(stream, "JPEG", quality=75)
    return stream.getvalue()
