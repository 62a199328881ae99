"""Marks for files that this version decodes to different pixels than earlier versions, for keys of cached latents.

Keys of all other files are unchanged, so that the caches of earlier versions stay valid.
"""

import av

from dit_lora.data.media.colour_profile import has_non_srgb_colours
from dit_lora.data.media.display import Orientation
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media
from dit_lora.data.media.opened import open_media, open_picture
from dit_lora.data.media.pictures import DECODE_ERRORS
from dit_lora.data.media.video_header import decode_first_frame, find_video_stream


def get_decoding_variant(media: Media) -> str:
    """How a file's pixels are changed after decoding: `srgb` if an ICC profile is applied, `display` if mirrored.

    The former is for pictures, the latter for videos. "" for all others.
    """
    try:
        if is_image(media):
            with open_picture(media) as image:
                return "srgb" if has_non_srgb_colours(image) else ""
        with open_media(media) as container:
            frame = decode_first_frame(container, find_video_stream(container))
            return "display" if Orientation.from_frame(frame).is_mirrored or frame.rotation % 90 else ""
    except (av.error.FFmpegError, *DECODE_ERRORS):
        # Decoding reports what is wrong with the file.
        return ""
