"""Shows what a run's model made of the validation prompts: videos, images and answers, before, during and after."""

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.data.media.video import read_header
from dit_lora.errors import DitLoraError
from dit_lora.files import is_inside, read_inside
from dit_lora.parsing import parse_json

EMBED_LIMIT_BYTES = 64 * 2**20
"""Videos beyond this many bytes of base64 stay beside the page and are linked."""
MAX_SAMPLE_BYTES = 2**28
"""The largest sample that is shown."""
STEPS = 60
"""Sampled steps that are shown of one prompt: of more, evenly spread ones with the first and the last."""
PROMPTS = 64
"""Prompts that are shown."""
TYPES = {".mp4": "video/mp4", ".png": "image/png", ".jpg": "image/jpeg"}


@dataclass(frozen=True)
class ShownClip:
    """One sample; `source` is a data URI or a link."""

    step: int
    label: str
    source: str
    has_sound: bool = False


@dataclass(frozen=True)
class ShownReference:
    """Something that a prompt's samples are made from; `source` is a data URI or a link."""

    label: str
    kind: str
    """`video` or `image`."""
    source: str
    has_sound: bool = False


@dataclass(frozen=True)
class PromptSamples:
    """The samples for one prompt, the first step first."""

    prompt: str
    kind: str
    """`video` or `image`."""
    clips: Sequence[ShownClip]
    references: Sequence[ShownReference] = ()


@dataclass(frozen=True)
class Answered:
    """A question and what was answered, the first step first."""

    prompt: str
    media: str
    """The file's name; empty where the question is about none."""
    answers: Sequence[tuple[str, str]]
    """When it was asked, and the answer."""


@dataclass(frozen=True)
class Sampled:
    """All that was sampled; `linked` files stay beside the page, and `hidden` steps are not shown."""

    samples: Sequence[PromptSamples] = ()
    answers: Sequence[Answered] = ()
    linked: int = 0
    hidden: int = 0
    kept: Sequence[int] = ()
    """Steps whose checkpoint is there, so that they can be taken."""

    @property
    def takeable(self) -> list[tuple[int, str]]:
        """Return the steps that are shown and can be taken, with their names."""
        return [(step, name) for step, name in self.steps if step in self.kept]

    @property
    def steps(self) -> list[tuple[int, str]]:
        """Return the steps that can be chosen, with their names."""
        shown = {clip.step: clip.label for one in self.samples for clip in one.clips}
        return sorted(shown.items())


def find_sampled(folder: Path, prompts: Sequence[str], *, embed: bool = True) -> Sampled:
    """Return every prompt's samples; without `embed`, or where the page would be too big, they are linked."""
    files: dict[int, dict[int, Path]] = {}
    for path in (folder / "samples").glob("step_*/prompt_*.*"):
        match = re.fullmatch(
            r"step_(\d{1,12})/prompt_(\d{1,6})\.(mp4|png)", f"{path.parent.name}/{path.name}"
        )
        if match and is_inside(folder, path, MAX_SAMPLE_BYTES):
            files.setdefault(int(match[2]), {})[int(match[1])] = path
    chosen = {index: _spread(by_step) for index, by_step in sorted(files.items())[:PROMPTS]}
    hidden = max((len(files[index]) - len(steps) for index, steps in chosen.items()), default=0)
    references = _find_references(folder)
    # What shows the most is embedded first: both ends of every prompt, then the latest of the others.
    wanted = [path for index in chosen for path in references.get(index, ())]
    wanted += [files[i][step] for i, steps in chosen.items() for step in {steps[0], steps[-1]}]
    wanted += [
        files[i][step]
        for step in sorted({s for steps in chosen.values() for s in steps}, reverse=True)
        for i, steps in chosen.items()
        if step in steps
    ]
    room = EMBED_LIMIT_BYTES if embed else 0
    embedded = _embedded(folder, wanted, room)

    def source(path: Path) -> str:
        return embedded.get(path) or path.relative_to(folder).as_posix()

    samples = [
        PromptSamples(
            prompts[index] if index < len(prompts) else f"prompt {index}",
            _kind(files[index][steps[-1]]),
            [
                ShownClip(step, when(step), source(path), _has_sound(path))
                for step in steps
                for path in [files[index][step]]
            ],
            _shown(references.get(index, ()), source),
        )
        for index, steps in chosen.items()
    ]
    shown = [clip.source for one in samples for clip in one.clips]
    shown += [one.source for sample in samples for one in sample.references]
    linked = sum(1 for one in shown if not one.startswith("data:"))
    return Sampled(samples, _find_answers(folder), linked, hidden, _kept_steps(folder))


def checkpoint_file(folder: Path, step: int) -> Path:
    """Return where a run keeps what was trained at a step."""
    return folder / "checkpoints" / f"step_{step:06d}" / "trainable.safetensors"


def _kept_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints are there."""
    found = (re.fullmatch(r"step_(\d{6,12})", p.name) for p in (folder / "checkpoints").glob("*"))
    steps = (int(match[1]) for match in found if match)
    return sorted(step for step in steps if is_inside(folder, checkpoint_file(folder, step)))


def _has_sound(path: Path) -> bool:
    """Return if a sample was written with its sound."""
    try:
        return read_header(path).has_sound
    except DitLoraError:  # it went away meanwhile, or is written no further
        return False


def _find_references(folder: Path) -> dict[int, list[Path]]:
    """Return the small copies of what each prompt's samples are made from, in their order."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in (folder / "samples" / "references").glob("prompt_*.*"):
        match = re.fullmatch(r"prompt_(\d{1,6})_(\d{1,6})\.(mp4|jpg)", path.name)
        if match and is_inside(folder, path, MAX_SAMPLE_BYTES):
            found.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {index: [path for _, path in sorted(paths)] for index, paths in found.items()}


def _shown(references: Sequence[Path], source: Callable[[Path], str]) -> list[ShownReference]:
    several = len(references) > 1
    return [
        ShownReference(f"reference {place}" if several else "reference", _kind(path), source(path))
        for place, path in enumerate(references, start=1)
    ]


def _kind(path: Path) -> str:
    return "video" if path.suffix == ".mp4" else "image"


def when(step: int) -> str:
    return f"after step {step:,}" if step else "before"


def _spread(steps: Iterable[int]) -> list[int]:
    ordered = sorted(steps)
    if len(ordered) <= STEPS:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (STEPS - 1))] for i in range(STEPS)]


def _embedded(folder: Path, paths: Iterable[Path], room: int) -> dict[Path, str]:
    """Return data URIs of as many as there is room for; files that go away meanwhile are left out."""
    uris: dict[Path, str] = {}
    for path in paths:
        if path in uris:
            continue
        try:
            # Three bytes are four characters of base64.
            text = base64.b64encode(read_inside(folder, path, room // 4 * 3)).decode()
        except OSError:
            continue
        uris[path] = f"data:{TYPES[path.suffix]};base64,{text}"
        room -= len(text)
    return uris


def _find_answers(folder: Path) -> list[Answered]:
    """Return the answers to every validation prompt of a chat model's run; files that are torn are left out."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    paths = {
        int(match[1]): path
        for path in (folder / "samples").glob("step_*/answers.json")
        if (match := re.fullmatch(r"step_(\d{1,12})", path.parent.name))
    }
    for step in _spread(paths):
        try:
            records = parse_json(read_inside(folder, paths[step]))
        except (OSError, ValueError):
            continue
        if isinstance(records, list):
            by_step[step] = [one if isinstance(one, dict) else {} for one in records]
    if not by_step:
        return []
    return [
        Answered(
            str(one.get("prompt", "")),
            Path(str(one.get("media") or "")).name,
            [
                (when(step), str(answers[index].get("answer", "")))
                for step, answers in sorted(by_step.items())
                if index < len(answers)
            ],
        )
        for index, one in enumerate(by_step[max(by_step)][:PROMPTS])
    ]
