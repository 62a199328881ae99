"""Reports in one line the captions that are too long for the text encoder; libraries would print them in full."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dit_lora.data.audit.captions import count_caption_tokens
from dit_lora.data.sources.clips import Clip
from dit_lora.families.base import Encoders
from dit_lora.training.session.session import Session

# How the warnings of Transformers' tokenizers and Diffusers' pipelines begin.
_LIBRARY_WARNINGS = ("Token indices sequence length is longer", "The following part of your input was")


def report_cut_captions(session: Session, encoders: Encoders, clips: Sequence[Clip]) -> None:
    """Log how many captions are cut off, and one of their samples; nothing if none is."""
    limit = encoders.load_text_limit()
    if limit is None or not session.is_main:
        return
    lengths = count_caption_tokens(clips, limit.tokenizer)
    cut = [clip for clip in clips if lengths.get(clip.caption, 0) > limit.max_tokens]
    if cut:
        session.say(
            f"captions: {len(cut)} of {len(clips)} are cut at {limit.max_tokens} tokens, such as {cut[0].id}; "
            "see dit-lora audit"
        )


@contextmanager
def suppress_length_warnings() -> Iterator[None]:
    """Suppress the libraries' warnings about truncated captions inside the context: each prints the whole caption."""
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    # Filters of a logger do not see records of its children; those of its handlers do.
    handlers = [handler for library in libraries for handler in library.handlers]
    for handler in handlers:
        handler.addFilter(_is_other_warning)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_other_warning)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LIBRARY_WARNINGS)
