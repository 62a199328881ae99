"""Write one training sample of a chat model as a self-contained page: its frames, tokens and loss mask."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.view import PART_NAMES, build_piece_views, count_tokens_by_kind
from dit_lora.data.media.opened import encode_jpeg
from dit_lora.report.pages import choose_evenly, make_jpeg_uri, render_page, write_page

MAX_FRAMES = 32
"""Maximum number of pictures on the page; more frames are sampled evenly."""
_MAX_SIDE = 240  # maximum width and height of a picture, in pixels


def write_chat_sample_page(
    path: Path,
    sample: str,
    rendered_sample: RenderedConversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: str,
    frames: torch.Tensor | None = None,
    seconds: Sequence[float] = (),
    instruction: str = "",
) -> Path:
    """Write the page that shows one chat training sample, atomically.

    It loads no external content, and all text from the data is escaped.

    Args:
        path: The HTML file.
        sample: The sample's name.
        rendered_sample: Its tokens, with those that are learned.
        tokenizer: Decodes the tokens.
        kind: The kind of model.
        frames: uint8 (F, 3, H, W), or None without frames.
        seconds: Times of the frames.
        instruction: The text that a Q-Former reads.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    page = render_page(
        "chat_sample_page.html",
        sample=sample,
        kind=kind,
        # Width x height, as in a player.
        size=f"{frames.shape[3]} x {frames.shape[2]}" if frames is not None else "",
        total=len(rendered_sample),
        counts=count_tokens_by_kind(rendered_sample),
        pieces=build_piece_views(rendered_sample, tokenizer),
        names=PART_NAMES,
        dropped=sum(piece.num_dropped for piece in rendered_sample.pieces),
        pictures=_encode_pictures(frames, seconds),
        frame_count=0 if frames is None else len(frames),
        instruction=instruction,
    )
    return write_page(path, page)


def _encode_pictures(frames: torch.Tensor | None, seconds: Sequence[float]) -> list[tuple[str, str]]:
    """Data URI and time of each shown frame, at most `MAX_FRAMES`."""
    if frames is None:
        return []
    from PIL import Image

    # A picture has no time.
    times = [f"{second:.2f} s" for second in seconds] or [""] * len(frames)
    pictures = []
    for index in choose_evenly(range(len(frames)), MAX_FRAMES):
        # (3, H, W) to (H, W, 3).
        picture = Image.fromarray(frames[index].permute(1, 2, 0).contiguous().numpy())
        # In place; keeps the aspect ratio and never enlarges.
        picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
        pictures.append((make_jpeg_uri(encode_jpeg(picture, 80)), times[index]))
    return pictures
