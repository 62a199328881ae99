"""Multiple-choice questions about videos: MVBench's folders, or one file of the same records.

Layout and protocol are those of video_chat2/mvbench.ipynb and MVBENCH.md of OpenGVLab/Ask-Anything, and the
dataset OpenGVLab/MVBench (arXiv 2311.17005): `json/<task>.json` and `video/<folder>/...`, its archives
unpacked in place.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard

import torch

from dit_lora.data.chat.frames import read_at
from dit_lora.data.media.media import IMAGE_SUFFIXES, Media, MediaFile
from dit_lora.data.media.video import ClipError, read_header
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.clips import ClipProblem
from dit_lora.errors import DitLoraError
from dit_lora.parsing import parse_json

SYSTEM = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement of "
    "objects, and the action and pose of persons. Based on your observations, select the best option that "
    "accurately addresses the question.\n"
)
"""Text that stands before the video and before the question, and that a Q-Former reads."""
QUESTION_END = "\nOnly give the best option."
ANSWER_START = "Best option:("
"""Beginning of the answer, which the model continues."""
FRAMES = 16
# Options are called by letters.
MOST_OPTIONS = 26

# Rate of TVQA's folders of frames.
_FRAMES_PER_SECOND = 3.0


@dataclass(frozen=True)
class TaskFolder:
    """Place of one task's videos in MVBench."""

    folder: str
    """Path of the folder below `video`."""
    bounded: bool = False
    """True if a record's `start` and `end` say which part is asked about."""
    frames: bool = False
    """True if each video is a folder of frames in place of a file."""


TASKS = {
    "Action Sequence": TaskFolder("star/Charades_v1_480", bounded=True),
    "Action Prediction": TaskFolder("star/Charades_v1_480", bounded=True),
    "Action Antonym": TaskFolder("ssv2_video"),
    "Fine-grained Action": TaskFolder("Moments_in_Time_Raw/videos"),
    "Unexpected Action": TaskFolder("FunQA_test/test"),
    "Object Existence": TaskFolder("clevrer/video_validation"),
    "Object Interaction": TaskFolder("star/Charades_v1_480", bounded=True),
    "Object Shuffle": TaskFolder("perception/videos"),
    "Moving Direction": TaskFolder("clevrer/video_validation"),
    "Action Localization": TaskFolder("sta/sta_video", bounded=True),
    "Scene Transition": TaskFolder("scene_qa/video"),
    "Action Count": TaskFolder("perception/videos"),
    "Moving Count": TaskFolder("clevrer/video_validation"),
    "Moving Attribute": TaskFolder("clevrer/video_validation"),
    "State Change": TaskFolder("perception/videos"),
    "Fine-grained Pose": TaskFolder("nturgbd"),
    "Character Order": TaskFolder("perception/videos"),
    "Egocentric Navigation": TaskFolder("vlnqa"),
    "Episodic Reasoning": TaskFolder("tvqa/frames_fps3_hq", bounded=True, frames=True),
    "Counterfactual Inference": TaskFolder("clevrer/video_validation"),
}
"""MVBench's tasks, in the order of its table."""


@dataclass(frozen=True, slots=True)
class FrameFolder:
    """A video as a folder of images `00001.jpg`, `00002.jpg` ... at `fps` a second."""

    path: Path
    fps: float

    @property
    def name(self) -> str:
        return str(self.path)

    def images(self) -> list[Media]:
        """Return the images in the order of their names."""
        images = (path for path in self.path.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        return [MediaFile(path) for path in sorted(images)]

    def exists(self) -> bool:
        return self.path.is_dir()


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its options."""

    task: str
    id: str
    """Name of the question's file and its place there, `action_sequence/17`."""
    media: Media | FrameFolder
    question: str
    candidates: tuple[str, ...]
    answer: int
    """Index of the candidate that is right."""
    start: float | None = None
    """Start of the part of the video that is asked about, in seconds; `end` is its end."""
    end: float | None = None


@dataclass(frozen=True)
class Questions:
    """Contents of the question files."""

    all: list[Question]
    """Questions without a problem."""
    problems: list[ClipProblem]


def read_questions(path: Path, media: Path | None = None) -> Questions:
    """Read MVBench's folder, or a .json or .jsonl file of records.

    A record has `video` (or `image`), `question`, `candidates`, `answer`, and where they apply `task`,
    `start` and `end`. `media` is the folder that the file's videos are below, by default its own; for
    MVBench by default `video`. Raises `DitLoraError` if there is nothing to read.
    """
    if path.is_dir():
        return _read_mvbench(path, media or path / "video")
    questions, own = Questions([], []), TaskFolder("", bounded=True)
    _add(questions, _records(path), path.stem, path.stem, own, [media or path.parent])
    return questions


def at_most(questions: Sequence[Question], each: int | None) -> list[Question]:
    """Return the first `each` questions of every task; all of them for None."""
    taken: Counter[str] = Counter()
    chosen = []
    for question in questions:
        taken[question.task] += 1
        if each is None or taken[question.task] <= each:
            chosen.append(question)
    return chosen


def prompt(question: Question) -> str:
    """Return the user's turn as the benchmark writes it."""
    options = "\n".join(
        f"({letter(at)}) {candidate}" for at, candidate in enumerate(question.candidates)
    )
    asked = f"Question: {question.question}\nOptions:\n{options}".rstrip()
    return f"{SYSTEM}{asked}{QUESTION_END}"


def letter(option: int) -> str:
    return chr(ord("A") + option)


def named_options(said: str, options: int) -> tuple[int, ...]:
    """Return the options that an answer after `ANSWER_START` counts for, as mvbench.ipynb's `check_ans` does.

    The first word of its first line decides: it must be part of `(a)`, or hold it. Only an answer of no
    letter is judged otherwise here: the notebook takes it for every option, and here it names none.
    """
    word = ("(" + said.strip().split("\n")[0]).lower().split(" ")[0]
    bare = word.replace(".", "")
    if bare == "(":
        return ()
    marks = [f"({letter(option).lower()})" for option in range(options)]
    return tuple(at for at, mark in enumerate(marks) if bare in mark or mark in word)


def notebook_seconds(
    header: VideoHeader,
    count: int,
    *,
    start: float | None = None,
    end: float | None = None,
    first: int = 0,
) -> tuple[float, ...]:
    """Return the times, in seconds, of the frames that mvbench.ipynb takes (`get_index`).

    They are not those in the middle of training's equal parts: of 16 frames, some 6 are another, mostly by
    one. `first` is the number of the first frame, 1 in a folder of frames. Raises `ClipError`, without the
    file's name, if nothing of the clip lies between `start` and `end`.
    """
    assert header.fps is not None
    frames = header.frames or math.floor((header.seconds or 0) * header.fps + 1e-6)
    last = frames - 1 + first
    begin = first if start is None else max(first, round(start * header.fps))
    stop = last if end is None else min(round(end * header.fps), last)
    if stop < begin:
        raise ClipError(
            f"nothing lies between {start or 0:g} s and {math.inf if end is None else end:g} s of it; it has "
            f"{frames} frames at {header.fps:g} a second"
        )
    part = (stop - begin) / count
    return tuple(int(begin + part / 2 + round(part * index)) / header.fps for index in range(count))


def read_facts(media: Media | FrameFolder) -> VideoHeader:
    """Return the header of a video or of a folder of frames; raises `ClipError` if there is none."""
    if not isinstance(media, FrameFolder):
        return read_header(media)
    images = media.images()
    if not images:
        raise ClipError(f"{media.name}: holds no images")
    first = read_header(images[0])
    count = len(images)
    return VideoHeader(media.fps, count / media.fps, count, first.height, first.width)


def read_frames_at(
    media: Media | FrameFolder,
    seconds: Sequence[float],
    *,
    height: int,
    width: int,
    fit: Literal["stretch", "cover"],
) -> torch.Tensor:
    """Return uint8 (F, 3, H, W) of the frames nearest to these seconds. Raises `ClipError`."""
    if not isinstance(media, FrameFolder):
        return read_at(media, seconds, height=height, width=width, fit=fit)
    images = media.images()
    # The notebook numbers images from 1, at 1 / fps seconds (mvbench.ipynb, `read_frame`).
    numbers = [min(max(round(at * media.fps), 1), len(images)) for at in seconds]
    shown = [
        read_at(images[number - 1], (0.0,), height=height, width=width, fit=fit)
        for number in numbers
    ]
    return torch.cat(shown)


def _read_mvbench(path: Path, videos: Path) -> Questions:
    files = sorted((path / "json").glob("*.json"))
    if not files:
        raise DitLoraError(
            f"{path} holds no json/<task>.json; give MVBench's folder (json and video, its archives unpacked), "
            "or one .json file of questions"
        )
    # The archive data0613.zip, of clips that were added later, unpacks to a folder of its own.
    roots = [videos, videos / "data0613"]
    names = {name.lower().replace(" ", "_").replace("-", "_"): name for name in TASKS}
    places = {name: at for at, name in enumerate(names)}
    questions = Questions([], [])
    for file in sorted(files, key=lambda task_file: places.get(task_file.stem, len(places))):
        task = names.get(file.stem)
        if task is None:
            message = f"no task of MVBench has this file; its tasks are {', '.join(TASKS)}"
            questions.problems.append(ClipProblem(f"json/{file.name}", "unknown_task", message))
            continue
        records, folders = _records(file), [root / TASKS[task].folder for root in roots]
        if any(folder.is_dir() for folder in folders):
            _add(questions, records, file.stem, task, TASKS[task], folders)
            continue
        message = f"{task}: {len(records):,} questions, but there is no folder {folders[0]}"
        questions.problems.append(ClipProblem(f"json/{file.name}", "missing", message))
    return questions


def _records(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".jsonl":
            records = [parse_json(line) for line in text.splitlines() if line.strip()]
        else:
            records = parse_json(text)
    except OSError as error:
        raise DitLoraError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DitLoraError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(records, list) or not records:
        raise DitLoraError(f"{path} must hold a list of questions, one at least")
    return records


def _add(
    questions: Questions,
    records: Iterable[Any],
    stem: str,
    task: str,
    place: TaskFolder,
    folders: Sequence[Path],
) -> None:
    """Add one file's questions, each by the file's name and its place there."""
    for at, record in enumerate(records):
        result = _question(record, f"{stem}/{at}", task, place, folders)
        if isinstance(result, Question):
            questions.all.append(result)
        else:
            questions.problems.append(result)


def _question(
    record: Any, question_id: str, task: str, place: TaskFolder, folders: Sequence[Path]
) -> Question | ClipProblem:
    """Return the question, or a problem with every fault of its record."""
    if not isinstance(record, Mapping):
        return ClipProblem(
            question_id, "no_record", f"it is of type {type(record).__name__}, not an object"
        )
    faults: list[str] = []
    media = _media(record, place, folders, faults)
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        faults.append("its question is missing or empty")
    candidates, answer = _choices(record, faults)
    start, end = _bounds(record, faults) if place.bounded else (None, None)
    task = record.get("task", task)
    if not isinstance(task, str) or not task:
        faults.append(f"its task must be a name; got {task!r}")
    if faults or media is None:
        return ClipProblem(question_id, "bad_question", "; ".join(faults))
    return Question(task, question_id, media, str(question), candidates, answer, start, end)


def _media(
    record: Mapping[str, Any], place: TaskFolder, folders: Sequence[Path], faults: list[str]
) -> Media | FrameFolder | None:
    name = record.get("video", record.get("image"))
    if not isinstance(name, str) or not name:
        faults.append("it names no video")
        return None
    # A stranger's records could name any file.
    if ".." in PurePosixPath(name).parts or os.path.isabs(name):
        faults.append(f"its video {name!r} leads out of the folder")
        return None
    rate = record.get("fps", _FRAMES_PER_SECOND)
    if place.frames and (not _is_number(rate) or rate <= 0):
        faults.append(f"its fps must be a number above 0; got {rate!r}")
        return None
    paths = [folder / name for folder in folders]
    candidates: list[Media | FrameFolder] = [
        FrameFolder(path, float(rate)) if place.frames else MediaFile(path) for path in paths
    ]
    existing = next((medium for medium in candidates if medium.exists()), None)
    if existing is None:
        faults.append(f"{paths[0]} is missing")
    return existing


def _choices(record: Mapping[str, Any], faults: list[str]) -> tuple[tuple[str, ...], int]:
    """Return the candidates and the index of the right one."""
    listed = record.get("candidates")
    if not isinstance(listed, list) or not 2 <= len(listed) <= MOST_OPTIONS:
        received = len(listed) if isinstance(listed, list) else repr(listed)
        faults.append(f"it needs 2 to {MOST_OPTIONS} candidates; got {received}")
        return (), 0
    # Counts may be numbers in the file.
    candidates = tuple(str(candidate) for candidate in listed)
    answer = str(record.get("answer"))
    if answer not in candidates:
        faults.append(f"its answer {answer!r} is not among its candidates {', '.join(candidates)}")
        return candidates, 0
    # Of equal candidates the notebook takes the last.
    return candidates, max(at for at, candidate in enumerate(candidates) if candidate == answer)


def _bounds(
    record: Mapping[str, Any], faults: list[str]
) -> tuple[float, float] | tuple[None, None]:
    """Return start and end, in seconds, of the part that is asked about; None where the record has none."""
    start, end = record.get("start"), record.get("end")
    if start is None and end is None:
        return None, None
    if not _is_number(start) or not _is_number(end) or not 0 <= start < end:
        faults.append(f"start and end must be seconds, start first; got {start!r} and {end!r}")
        return None, None
    return float(start), float(end)


def _is_number(value: Any) -> TypeGuard[float]:
    # True and False are integers to Python.
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and math.isfinite(value)
