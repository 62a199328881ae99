"""Conversations that nothing can be learned from: refused at the start by name, in one list, or left out."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.data import DataFault
from benchmarks.faults.fault import Expected
from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.tiny_data import CONVERSATIONS
from benchmarks.faults.world import Overrides


@dataclass(frozen=True)
class ChatDataFault(DataFault):
    """A record of an annotation file that the run must refuse by name, or leave out without a trace."""

    samples: str = "conversations"

    def data_overrides(self, data: Path) -> Overrides:
        return (*self.overrides, ("data.path", str(data / CONVERSATIONS)))

    def peers(self, targets: FaultTargets) -> tuple[DataFault, ...]:
        return tuple(dict.fromkeys([*FAULTS, self]))


def _ask(folder: Path, file: str, turn: dict[str, str], **times: float) -> None:
    listing = folder / CONVERSATIONS
    records = json.loads(listing.read_text("utf-8"))
    turn = {"i": "Watch the video and answer.", **turn}
    records.append({"video": file, "QA": [turn], **times})
    listing.write_text(json.dumps(records), "utf-8")


def _bad(
    name: str,
    reason: str,
    *,
    question: str = "What is it?",
    answer: str = "A disc.",
    content: bytes | None = None,
    clip: bool = True,
    **times: float,
) -> ChatDataFault:
    """A bad record about a copy of a good clip, about `content`, or about a file that does not exist."""
    file = f"{name.replace(' ', '_')}.mp4"

    def add_record(folder: Path) -> None:
        if content is not None:
            (folder / file).write_bytes(content)
        # A copy of a good clip, so that nothing but the record is at fault.
        elif clip:
            shutil.copy(min(folder.rglob("00_*.mp4")), folder / file)
        _ask(folder, file, {"q": question, "a": answer}, **times)

    extra_fields: dict[str, Any] = {"file": file, "add_sample": add_record}
    return ChatDataFault(
        f"chat data: {name}",
        "data",
        "before training",
        Expected("refused", "left out", (reason,), same_as="clean"),
        **extra_fields,
    )


FAULTS: tuple[ChatDataFault, ...] = (
    _bad("an answer that does not fit", "chat.max_tokens is 448", answer="It is a disc. " * 500),
    _bad("an empty answer", "answer", answer=" "),
    _bad("a reserved token", "<Image>", question="What does <Image> show?"),
    _bad("a broken clip", "not_media: ", content=b"<html>404 Not Found</html>"),
    _bad("a clip without bytes", "the file has no bytes", content=b""),
    _bad("a missing clip", "no such file", clip=False),
    _bad("a part after the end", "nothing lies between", start=60.0, end=70.0),
    _bad("a part without length", "it starts at 1 s and ends at 1 s", start=1.0, end=1.0),
)
