"""Conversations from annotation files, and everything that is wrong with them."""

import os
import re
from dataclasses import replace
from pathlib import Path

from dit_lora.config import DataConfig
from dit_lora.data.chat.conversation import Conversation, Conversations, Turn
from dit_lora.data.chat.json_records import Record, read_records
from dit_lora.data.chat.records import Sample, parse_record
from dit_lora.data.clips import Problem
from dit_lora.data.media import IMAGE_SUFFIXES, MediaFile, below
from dit_lora.data.sources import names_of, read_sources, times_of
from dit_lora.data_config import SourceConfig
from dit_lora.errors import DitLoraError

_REMOTE = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]*://|p2:s3:")
_NOT_READ = ("caption_column", "image_column", "caption", "generate")


def read_conversations(data: DataConfig) -> Conversations:
    """Every conversation of the sources without a problem, and every problem; of media, no byte is read.

    An id is the medium's path below the root, `a.mp4`, and `a.mp4#2` for the second record about it; of text
    `file.json#7`, the 7th record. Of `data.sources`, ids begin with the source's name. Of a problem, the words end
    with the record's number. Raises `DitLoraError` if a file is no JSON or holds no record that can be used.
    """
    sources = data.all_sources
    found = read_sources(data, lambda source: _File(source).read())
    if not data.sources:
        return found[0]
    whole = Conversations([], [])
    times = times_of(sources, [len(one.all) for one in found])
    for source, one, name, often in zip(sources, found, names_of(sources), times, strict=True):
        whole.all.extend(
            replace(sample, id=name + sample.id, times=often, loss_weight=source.loss_weight)
            for sample in one.all
        )
        whole.problems.extend(Problem(name + p.file, p.code, p.words) for p in one.problems)
    return whole


class _File:
    """One annotation file and the folder of its media."""

    def __init__(self, source: SourceConfig) -> None:
        self._path = Path(source.path).expanduser()
        self._root = Path(source.media).expanduser() if source.media else self._path.parent
        unread = [name for name in _NOT_READ if getattr(source, name) is not None]
        if unread:
            raise DitLoraError(f"{', '.join(unread)} is of captions; conversations have none")
        self._found = Conversations([], [])
        self._media: dict[str, MediaFile] = {}
        """By path below the root."""
        self._absent: dict[str, tuple[str, str]] = {}
        self._named: dict[str, int] = {}
        """Records about each."""
        self._said: dict[int, Conversation] = {}
        """By what they say, to find doubles."""
        self._texts: dict[str, str] = {}
        """Instructions and systems, which come again and again, once."""
        self._unit = "record"

    def read(self) -> Conversations:
        """Raises `DitLoraError` if nothing in it can be used."""
        if not self._path.is_file():
            what = "is a folder" if self._path.is_dir() else "is not there"
            raise DitLoraError(
                f"{self._path} {what}; conversations come from a .json or .jsonl file"
            )
        if not self._root.is_dir():
            raise DitLoraError(f"no folder of media {self._root}")
        count = 0
        for record in read_records(self._path):
            count += 1
            self._add(record)
        if not count:
            raise DitLoraError(f"{self._path} holds no record")
        if not self._found.all:
            first = self._found.problems[0]
            raise DitLoraError(
                f"{self._path}: none of its {count:,} records can be used; the first problem: "
                f"{first.file}: {first.words}"
            )
        return self._found

    def _add(self, record: Record) -> None:
        place = f"{self._path.name}#{record.number}"
        if record.fault is not None:
            self._problem(place, record, "unreadable", f"not JSON: {record.fault}")
            return
        sample = parse_record(record.value)
        id, name = place, None
        if sample.file is not None:
            name = self._below_root(sample)
        if name is not None:
            many = self._named[name] = self._named.get(name, 0) + 1
            id = name if many == 1 else f"{name}#{many}"
        for code, words in sample.faults:
            self._problem(id, record, code, words)
        if not sample.faults:
            self._keep(id, record, sample, self._media[name] if name is not None else None)

    def _keep(self, id: str, record: Record, sample: Sample, media: MediaFile | None) -> None:
        conversation = Conversation(
            id,
            sample.kind,
            media,
            tuple(self._shared(turn) for turn in sample.turns),
            sample.independent,
            self._once(sample.system),
            sample.start,
            sample.end,
        )
        said = (media, sample.turns, sample.system, sample.start, sample.end)
        known = self._said.setdefault(hash(said), conversation)
        if known is not conversation and said == (
            known.media,
            known.turns,
            known.system,
            known.start,
            known.end,
        ):
            self._problem(id, record, "duplicate_record", f"it says the same as {known.id}")
            return
        self._found.all.append(conversation)

    def _shared(self, turn: Turn) -> Turn:
        if not turn.instruction:
            return turn
        return Turn(turn.question, turn.answer, self._once(turn.instruction))

    def _once(self, text: str) -> str:
        return self._texts.setdefault(text, text)

    def _problem(self, id: str, record: Record, code: str, words: str) -> None:
        self._found.problems.append(Problem(id, code, f"{words} (record {record.number})"))

    def _below_root(self, sample: Sample) -> str | None:
        """The medium's path below the root; None where that is none. Says what is wrong with it."""
        given = sample.file or ""
        if _REMOTE.match(given):
            words = f"{given[:80]} is no path; download it and name the file"
            sample.wrong("remote_media", words)
            return None
        name = below(self._root, given)
        if name is None:
            words = (
                f"{given} leads out of {self._root}; set data.media to a folder that it is below"
            )
            sample.wrong("unsafe_path", words)
            return None
        if name not in self._media:
            self._media[name] = MediaFile(self._root / name)
            self._look(name, os.path.join(self._root, name))
        if name in self._absent:
            sample.wrong(*self._absent[name])
        elif (os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES) != (sample.kind == "image"):
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            words = f"it is named as {sample.kind}, and images end in {kinds}: {name}"
            sample.wrong("media_kind", words)
        return name

    def _look(self, name: str, path: str) -> None:
        if os.path.isdir(path):
            self._absent[name] = (
                "frame_folder",
                "it is a folder, and frames are read from videos; make one of its images: "
                f"ffmpeg -framerate 3 -i '{name}/%05d.jpg' '{name}.mp4'",
            )
        elif not os.path.isfile(path):
            self._absent[name] = ("missing", f"no such file: {self._root / name}")
