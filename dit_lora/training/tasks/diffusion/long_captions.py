"""Reports in one line the captions that are longer than the text encoder reads; libraries would quote them whole."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dit_lora.data.audit.captions import token_lengths
from dit_lora.data.sources.clips import Clip
from dit_lora.families.base import Encoders
from dit_lora.training.session.session import Session

# How Transformers' tokenizers and Diffusers' pipelines begin what they say of it.
_THEIRS = ("Token indices sequence length is longer", "The following part of your input was")


def say_what_is_cut(session: Session, checkpoint: Encoders, clips: Sequence[Clip]) -> None:
    """Name a sample whose caption is cut, and how many there are; nothing where all are read whole."""
    limit = checkpoint.text_limit()
    if limit is None or not session.is_main:
        return
    lengths = token_lengths(clips, limit.tokenizer)
    cut = [clip for clip in clips if lengths.get(clip.caption, 0) > limit.max_tokens]
    if cut:
        first = cut[0]
        session.say(
            f"captions: {len(cut)} of {len(clips)} are longer than the {limit.max_tokens} tokens "
            "that the text encoder reads, "
            f"such as that of {first.id} with {lengths[first.caption]:,}; dit-lora audit quotes what is cut off"
        )


@contextmanager
def quiet_about_length() -> Iterator[None]:
    """Keep the libraries from saying within that they cut a text, which they quote whole."""
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    handlers = [handler for library in libraries for handler in library.handlers]
    for handler in handlers:
        handler.addFilter(_is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_THEIRS)
