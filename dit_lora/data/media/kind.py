"""Whether a medium is a picture or a video: its content decides, or its name if the content is unknown."""

from functools import lru_cache
from pathlib import Path

from dit_lora.data.media.media import (
    HEIC,
    IMAGE_SUFFIXES,
    Media,
    Stamp,
    detect_suffix,
    get_suffix,
    read_first_bytes,
    to_media,
)
from dit_lora.data.media.opened import open_picture
from dit_lora.data.media.pictures import DECODE_ERRORS


def is_image(media: Media | Path) -> bool:
    """True if a media file is a picture and not a video.

    A GIF with several frames is a video; of other formats, the first frame is used. For a file that cannot be read,
    the suffix of its name decides.
    """
    media = to_media(media)
    try:
        # The stamp is part of the cache's key, so a changed file is read again.
        return _is_image(media, media.get_file_stamp())
    except OSError:
        return get_suffix(media) in IMAGE_SUFFIXES


@lru_cache(maxsize=2**16)
def _is_image(media: Media, stamp: Stamp) -> bool:
    content = detect_suffix(read_first_bytes(media))
    if content == ".gif":
        try:
            with open_picture(media) as image:
                return not getattr(image, "is_animated", False)
        except DECODE_ERRORS:
            # A damaged GIF counts as a picture; the audit reports the damage.
            return True
    # The content decides; the name counts only for formats that are not recognized.
    return (content or get_suffix(media)) in IMAGE_SUFFIXES | {HEIC}
