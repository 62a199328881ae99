"""Shows a rendered conversation for people: the text the model sees, the trained text, and the dropped text."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.rendered import Part, RenderedConversation

PART_NAMES: dict[Part, str] = {"media": "media", "question": "question", "fixed": "fixed", "answer": "learned"}
_STYLES: dict[Part, str] = {"media": "cyan", "question": "dim", "fixed": "bright_black", "answer": "bold green"}


@dataclass(frozen=True, slots=True)
class Token:
    """Position, id and text of one token in a displayed sample; the texts of a part's tokens add up to its text."""

    position: int
    id: int
    text: str
    """Text of the token; if several tokens make up one character, only the last of them has it."""


@dataclass(frozen=True, slots=True)
class PieceView:
    """Part of a displayed conversation, with the text of each token; for media, without tokens."""

    part: Part
    num_tokens: int
    tokens: tuple[Token, ...]
    num_dropped: int

    @property
    def tokens_around_gap(self) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
        """Tokens of this part before and after those that were dropped."""
        head = len(self.tokens) - len(self.tokens) // 2 if self.num_dropped else len(self.tokens)
        return self.tokens[:head], self.tokens[head:]


def build_piece_views(rendered: RenderedConversation, tokenizer: PreTrainedTokenizerBase) -> list[PieceView]:
    """Build the parts of a conversation for display, with the text of each token.

    Media have no tokens: their ids may be outside the vocabulary.
    """
    pieces, position = list[PieceView](), 0
    reader = _TokenDecoder(tokenizer)
    for piece in rendered.pieces:
        tokens: tuple[Token, ...] = ()
        if piece.part == "media":
            # Media ids may be outside the vocabulary, so start decoding again after them.
            reader = _TokenDecoder(tokenizer)
        else:
            texts = [reader.decode_next(token) for token in piece.ids]
            numbered = enumerate(zip(piece.ids, texts, strict=True), start=position)
            tokens = tuple(Token(number, token, text) for number, (token, text) in numbered)
        pieces.append(PieceView(piece.part, len(piece.ids), tokens, piece.num_dropped))
        # Media count in the positions, although they have no text.
        position += len(piece.ids)
    return pieces


def count_tokens_by_kind(rendered: RenderedConversation) -> dict[str, int]:
    """Number of tokens of each kind in a conversation, in the order of `PART_NAMES`."""
    return {name: rendered.count_tokens(part) for part, name in PART_NAMES.items()}


def describe_conversation(rendered: RenderedConversation, *, kind: str, seconds: Sequence[float]) -> str:
    """Summarize a conversation on one line: `video, 8 frames at 0.5 ... 11.2 s; 412 tokens: 96 media, ...`."""
    media = kind
    if kind == "video":
        span = f" at {seconds[0]:.4g} ... {seconds[-1]:.4g} s" if seconds else ""
        media += f", {len(seconds)} {'frame' if len(seconds) == 1 else 'frames'}{span}"
    tokens = ", ".join(f"{count} {name}" for name, count in count_tokens_by_kind(rendered).items())
    dropped = sum(piece.num_dropped for piece in rendered.pieces)
    shortened = f"; {dropped} of the questions are left out" if dropped else ""
    return f"{media}; {len(rendered)} tokens: {tokens}{shortened}"


def build_terminal_view(
    sample_id: str,
    rendered: RenderedConversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: str,
    seconds: Sequence[float] = (),
    instruction: str = "",
) -> RenderableType:
    """Format one conversation as a table for a terminal: its parts in order, each with its kind and number of tokens.

    `seconds` are the times of its frames; `instruction` is the text that a Q-Former reads. Escape sequences in
    the data are shown, not executed.
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold", ratio=1)
    if instruction:
        table.add_row(Text("q-former", "cyan"), "", Text(_escape_invisible(instruction), "dim"))
    for piece in build_piece_views(rendered, tokenizer):
        style = _STYLES[piece.part]
        text = Text(style=style)
        # Tokens are dropped from the middle of a question, so show that gap between its halves.
        before, after = piece.tokens_around_gap
        if piece.part == "media":
            text.append(f"<{piece.num_tokens} media tokens>")
        text.append(_escape_invisible("".join(token.text for token in before)))
        if piece.num_dropped:
            text.append(f" [... {piece.num_dropped} tokens left out ...] ", "bold yellow not dim")
            text.append(_escape_invisible("".join(token.text for token in after)))
        table.add_row(Text(PART_NAMES[piece.part], style), Text(str(piece.num_tokens), "dim"), text)
    heading = Text(_escape_invisible(sample_id), "bold")
    return Group(heading, Text(describe_conversation(rendered, kind=kind, seconds=seconds), "dim"), Text(""), table)


class _TokenDecoder:
    """Decodes tokens one by one: each gets the text that it adds to those before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_returned = 0
        """Number of tokens at the beginning of `_ids` whose text was returned already."""

    def decode_next(self, token: int) -> str:
        self._ids.append(token)
        known_text, text = self._decode(self._ids[: self._num_returned]), self._decode(self._ids)
        # A UTF-8 character has up to 4 bytes: this token ends inside one, which the next tokens complete.
        if text.endswith("\ufffd") and len(self._ids) - self._num_returned < 4:
            return ""
        self._ids, self._num_returned = (self._ids[self._num_returned :], len(self._ids) - self._num_returned)
        return text[len(known_text) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _escape_invisible(text: str) -> str:
    """Replace line breaks and other invisible characters in a text with visible signs."""
    signs = {"\n": "↵", "\t": "→"}
    return "".join(signs.get(character, character if character.isprintable() else "\ufffd") for character in text)
