"""Conversations as tokens: which are media, which may be shortened, which are learned."""

from dataclasses import dataclass
from typing import Literal

from dit_lora.numerics.objectives import IGNORE

Part = Literal["fixed", "media", "question", "answer"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens in a row that are treated alike."""

    ids: tuple[int, ...]
    part: Part
    """Kind of the tokens: `answer` alone is learned; `question` alone may be shortened."""
    dropped: int = 0
    """Number of tokens that were taken out of the piece's middle."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens of one conversation, not padded."""

    pieces: tuple[Piece, ...]
    instruction: tuple[int, ...] = ()
    """Text that a Q-Former reads beside the picture, in its own tokenizer's ids."""

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.ids]

    @property
    def labels(self) -> list[int]:
        """Each token itself where it is learned, else `IGNORE`; not shifted."""
        return [
            token if piece.part == "answer" else IGNORE
            for piece in self.pieces
            for token in piece.ids
        ]

    @property
    def answers(self) -> int:
        """Number of tokens that are learned."""
        return self.count("answer")

    def count(self, part: Part) -> int:
        """Return the number of tokens of one part."""
        return sum(len(piece.ids) for piece in self.pieces if piece.part == part)

    def __len__(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)
