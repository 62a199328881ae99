"""Reads conversations from annotation files, and reports every problem in them."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

from dit_lora.config.data import SourceConfig
from dit_lora.config.recipe import DataConfig
from dit_lora.config.remedies import describe_missing_conversations
from dit_lora.data.chat.conversation import Conversation, Conversations
from dit_lora.data.chat.json_records import AnnotationRecord, read_records
from dit_lora.data.chat.records import ChatRecord, parse_record
from dit_lora.data.media.media import IMAGE_SUFFIXES, MediaFile, resolve_path_below
from dit_lora.data.sources.clips import ClipProblem
from dit_lora.data.sources.scan import read_all_sources
from dit_lora.errors import DitLoraError

_URL_PATTERN = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]*://|p2:s3:")
# Conversations about GIFs are about motion, so a GIF counts as a video.
_STILL_SUFFIXES = IMAGE_SUFFIXES - {".gif"}
_UNSUPPORTED_KEYS = ("caption_column", "image_column", "caption", "generate")


def read_conversations(data: DataConfig) -> Conversations:
    """Read all conversations of the annotation files that have no problem, and all problems. Reads no media files.

    The id of a sample is the path of its media file below the root, `a.mp4`, and `a.mp4#2` for the second
    record about it. For text it is `file.json#7`, the seventh record. With `data.sources`, ids begin with the
    source's name. A problem's message ends with the number of the record.

    Raises:
        DitLoraError: A file is not JSON, or holds no usable record.
    """
    return Conversations(*read_all_sources(data, lambda source: _AnnotationFile(source).read()))


class _AnnotationFile:
    """Reads one annotation file of conversations, whose media are in one folder."""

    def __init__(self, source: SourceConfig) -> None:
        self._path = Path(source.path).expanduser()
        self._root = Path(source.media).expanduser() if source.media else self._path.parent
        # Options of captioned clips would be ignored silently, so they are an error.
        unread = [name for name in _UNSUPPORTED_KEYS if getattr(source, name) is not None]
        if unread:
            raise DitLoraError(f"{', '.join(unread)} applies to captions, and conversations have none; remove it")
        self._conversations = Conversations([], [])
        self._media: dict[str, MediaFile] = {}
        """Media files by their path below the root."""
        self._media_faults: dict[str, tuple[str, str]] = {}
        self._records_per_file: Counter[str] = Counter()
        """Number of records about each media file."""
        self._ids_by_content: dict[object, str] = {}
        """Ids by the content of the conversation, to find duplicates."""

    def read(self) -> Conversations:
        """Read the annotation file; raises `DitLoraError` if nothing in it can be used."""
        if not self._path.is_file():
            raise DitLoraError(describe_missing_conversations(self._path))
        if not self._root.is_dir():
            raise DitLoraError(f"the folder of media {self._root} does not exist")
        count = 0
        for record in read_records(self._path):
            count += 1
            self._add_record(record)
        if not count:
            raise DitLoraError(f"{self._path} has no records")
        if not self._conversations.usable:
            problem = self._conversations.problems[0]
            raise DitLoraError(
                f"{self._path}: none of its {count:,} records can be used; the first problem: "
                f"{problem.file}: {problem.message}"
            )
        return self._conversations

    def _add_record(self, record: AnnotationRecord) -> None:
        location = f"{self._path.name}#{record.number}"
        if record.fault is not None:
            self._add_problem(location, record, "unreadable", f"not JSON: {record.fault}")
            return
        sample = parse_record(record.value)
        # Text without media is named by its record, other samples by their file.
        sample_id, name = location, None
        if sample.file is not None:
            name = self._resolve_media(sample)
        if name is not None:
            self._records_per_file[name] += 1
            # A second record about the same file gets a number.
            sample_id = name if self._records_per_file[name] == 1 else f"{name}#{self._records_per_file[name]}"
        for code, message in sample.faults:
            self._add_problem(sample_id, record, code, message)
        if not sample.faults:
            self._add_conversation(sample_id, record, sample, self._media[name] if name is not None else None)

    def _add_conversation(
        self, sample_id: str, record: AnnotationRecord, sample: ChatRecord, media: MediaFile | None
    ) -> None:
        """Add a conversation without faults, unless an earlier one has the same content."""
        # The same turns about the same part of the same file are one sample.
        content = (media, sample.turns, sample.system, sample.start, sample.end)
        earlier = self._ids_by_content.setdefault(content, sample_id)
        if earlier != sample_id:
            self._add_problem(sample_id, record, "duplicate_record", f"it is the same as {earlier}")
            return
        # The same system text occurs in many records, so keep only one copy.
        system = sys.intern(sample.system)
        conversation = Conversation(
            sample_id, sample.kind, media, sample.turns, sample.is_independent, system, sample.start, sample.end
        )
        self._conversations.usable.append(conversation)

    def _add_problem(self, sample_id: str, record: AnnotationRecord, code: str, message: str) -> None:
        self._conversations.problems.append(ClipProblem(sample_id, code, f"{message} (record {record.number})"))

    def _resolve_media(self, sample: ChatRecord) -> str | None:
        """Path of a conversation's media file below the root; None if it has none. Faults are added to the sample."""
        file_name = sample.file or ""
        if _URL_PATTERN.match(file_name):
            sample.add_fault(
                "remote_media", f"{file_name[:80]} is not a path; download it and give the name of the file"
            )
            return None
        name = resolve_path_below(self._root, file_name)
        if name is None:
            message = f"{file_name} is outside of {self._root}; set data.media to a folder that contains it"
            sample.add_fault("unsafe_path", message)
            return None
        # Check each file once, even if many records are about it.
        if name not in self._media:
            self._media[name] = MediaFile(self._root / name)
            path = os.path.join(self._root, name)
            if os.path.isdir(path):
                self._media_faults[name] = (
                    "frame_folder",
                    "it is a folder, and frames are read from videos; make a video of its images: ffmpeg -framerate "
                    f"3 -i '{name}/%05d.jpg' '{name}.mp4'",
                )
            elif not os.path.isfile(path):
                self._media_faults[name] = ("missing", f"no such file: {self._root / name}")
        if name in self._media_faults:
            sample.add_fault(*self._media_faults[name])
        # The record's key says image or video, and the name of the file must agree with it.
        elif (os.path.splitext(name)[1].lower() in _STILL_SUFFIXES) != (sample.kind == "image"):
            kinds = ", ".join(sorted(_STILL_SUFFIXES))
            sample.add_fault("media_kind", f"it is named as {sample.kind}, and images end in {kinds}: {name}")
        return name
