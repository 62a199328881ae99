"""Conversations as tokens: which are media, which may be shortened, which are trained on."""

from dataclasses import dataclass
from typing import Literal

from dit_lora.numerics.objectives import IGNORE_INDEX

Part = Literal["fixed", "media", "question", "answer"]


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Consecutive tokens of a conversation that are of one kind, such as an answer."""

    ids: tuple[int, ...]
    part: Part
    """Kind of the tokens: only `answer` is trained on, and only `question` may be shortened."""
    num_dropped: int = 0
    """Number of tokens that were removed from the middle of the piece."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """Tokens of one rendered conversation, without padding."""

    pieces: tuple[TokenPiece, ...]
    instruction: tuple[int, ...] = ()
    """Text that a Q-Former reads together with the picture, as ids of its own tokenizer."""

    @property
    def ids(self) -> list[int]:
        """Token ids of the whole rendered conversation."""
        return [token for piece in self.pieces for token in piece.ids]

    @property
    def labels(self) -> list[int]:
        """Label of each token of a conversation: its id if it is trained on, else `IGNORE_INDEX`; not shifted."""
        return [token if piece.part == "answer" else IGNORE_INDEX for piece in self.pieces for token in piece.ids]

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens of a conversation that are trained on."""
        return self.count_tokens("answer")

    def count_tokens(self, part: Part) -> int:
        """Number of tokens of a conversation that are of one kind, such as `question`."""
        return sum(len(piece.ids) for piece in self.pieces if piece.part == part)

    def __len__(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)
