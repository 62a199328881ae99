"""Show a run's validation samples: videos, images and answers, before, during and after training."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av

from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.opened import open_media
from dit_lora.data.media.video_header import read_container_header
from dit_lora.files import can_open_inside_folder, read_file_inside_folder
from dit_lora.parsing import parse_json
from dit_lora.report.pages import choose_evenly
from dit_lora.report.run.saves import ADAPTER_FILES, list_step_folders

EMBED_LIMIT_BYTES = 64 * 2**20
"""Maximum bytes of embedded base64 media; further files are linked."""
MAX_SAMPLE_BYTES = 2**28
"""Maximum bytes of a sample that is shown."""
MAX_STEPS = 60
"""Maximum number of steps shown for one prompt; more are sampled evenly, with the first and the last."""
MAX_PROMPTS = 64
"""Maximum number of prompts shown."""
_CHECKPOINT_FILE = "trainable.safetensors"
CONTENT_TYPES = {".mp4": "video/mp4", ".png": "image/png", ".jpg": "image/jpeg"}


@dataclass(frozen=True)
class SampleClip:
    """One generated sample in the report; `source` is a data URI or a link."""

    step: int
    label: str
    source: str
    has_sound: bool = False


@dataclass(frozen=True)
class SampleReference:
    """A reference in the report that a prompt's samples are conditioned on; `source` is a data URI or a link."""

    label: str
    kind: str
    """`video` or `image`."""
    source: str
    has_sound: bool = False


@dataclass(frozen=True)
class PromptSamples:
    """Generated samples of one prompt, in the order of steps."""

    prompt: str
    kind: str
    """`video` or `image`."""
    clips: Sequence[SampleClip]
    references: Sequence[SampleReference] = ()


@dataclass(frozen=True)
class PromptAnswers:
    """A validation question and the chat model's answers, in the order of steps."""

    prompt: str
    media: str
    """Name of the media file; empty if the question has none."""
    answers: Sequence[tuple[str, str]]
    """For each sampled step its label and the answer."""


@dataclass(frozen=True)
class RunSamples:
    """All generated samples of a run. `linked` files are not embedded, and `hidden` steps are not shown."""

    samples: Sequence[PromptSamples] = ()
    answers: Sequence[PromptAnswers] = ()
    linked: int = 0
    hidden: int = 0
    checkpoint_steps: Sequence[int] = ()
    """Steps with a checkpoint, from which training can continue."""
    adapter_files: Mapping[int, Path] = field(default_factory=dict)
    """Files of the adapters that can be exported, by step."""

    @property
    def exportable_steps(self) -> list[tuple[int, str, str]]:
        """The shown steps that can be exported, with their labels and the names of their files."""
        files = self.adapter_files
        return [(step, label, files[step].name) for step, label in self.steps if step in files]

    @property
    def steps(self) -> list[tuple[int, str]]:
        """The steps that users can choose on the page, with their labels."""
        labels = {clip.step: clip.label for prompt_samples in self.samples for clip in prompt_samples.clips}
        return sorted(labels.items())


def find_samples(folder: Path, prompts: Sequence[str], *, embed: bool = True) -> RunSamples:
    """Find the generated samples of every prompt.

    They are linked without `embed`, or if the page would be too large.
    """
    files: dict[int, dict[int, Path]] = {}
    for path in (folder / "samples").glob("step_*/prompt_*.*"):
        # Step and prompt numbers, with bounded digits: names come from the file system.
        match = re.fullmatch(r"step_(\d{1,12})/prompt_(\d{1,6})\.(mp4|png)", f"{path.parent.name}/{path.name}")
        if match and can_open_inside_folder(folder, path, MAX_SAMPLE_BYTES):
            files.setdefault(int(match[2]), {})[int(match[1])] = path
    chosen = {
        index: choose_evenly(sorted(by_step), MAX_STEPS) for index, by_step in sorted(files.items())[:MAX_PROMPTS]
    }
    # The largest number over the prompts.
    hidden = max((len(files[index]) - len(steps) for index, steps in chosen.items()), default=0)
    references = _find_references(folder)
    # Embed the most informative files first: references, both ends of every prompt, then the latest steps.
    ordered_paths = [path for index in chosen for path in references.get(index, ())]
    ordered_paths += [files[i][step] for i, steps in chosen.items() for step in {steps[0], steps[-1]}]
    for step in sorted({step for steps in chosen.values() for step in steps}, reverse=True):
        ordered_paths += [files[i][step] for i, steps in chosen.items() if step in steps]
    # Files that do not fit are linked.
    embedded = _embed_files(folder, ordered_paths, EMBED_LIMIT_BYTES if embed else 0)

    def get_source(path: Path) -> str:
        return embedded.get(path) or path.relative_to(folder).as_posix()

    samples = []
    for index, steps in chosen.items():
        prompt = prompts[index] if index < len(prompts) else f"prompt {index}"
        paths = [files[index][step] for step in steps]
        clips = [
            SampleClip(step, format_step(step), get_source(path), _has_sound(path))
            for step, path in zip(steps, paths, strict=True)
        ]
        shown_references = []
        for position, path in enumerate(references.get(index, ()), start=1):
            label = f"reference {position}" if len(references[index]) > 1 else "reference"
            shown_references.append(SampleReference(label, _get_media_kind(path), get_source(path)))
        samples.append(PromptSamples(prompt, _get_media_kind(paths[-1]), clips, shown_references))
    # A data URI is embedded; any other source is a link.
    sources = [clip.source for sample in samples for clip in sample.clips]
    sources += [reference.source for sample in samples for reference in sample.references]
    linked = sum(1 for source in sources if not source.startswith("data:"))
    files_by_step = _find_adapter_files(folder)
    return RunSamples(
        samples, _find_answers(folder), linked, hidden, _list_checkpoint_steps(files_by_step), files_by_step
    )


def find_adapter_file(folder: Path, step: int) -> Path | None:
    """The file of a step's adapter: of its checkpoint, or of the adapter that stays when the checkpoint is deleted.

    None if the step has neither.
    """
    step_folder = folder / "checkpoints" / f"step_{step:06d}"
    paths = (step_folder / name for name in (_CHECKPOINT_FILE, *ADAPTER_FILES))
    return next((path for path in paths if can_open_inside_folder(folder, path)), None)


def find_checkpoint_steps(folder: Path) -> list[int]:
    """The steps with a checkpoint of the trained weights, in order."""
    return _list_checkpoint_steps(_find_adapter_files(folder))


def _list_checkpoint_steps(files_by_step: Mapping[int, Path]) -> list[int]:
    return [step for step, path in files_by_step.items() if path.name == _CHECKPOINT_FILE]


def _find_adapter_files(folder: Path) -> dict[int, Path]:
    steps = list_step_folders(folder / "checkpoints")
    return {step: path for step in steps if (path := find_adapter_file(folder, step)) is not None}


def _has_sound(path: Path) -> bool:
    try:
        with open_media(MediaFile(path)) as container:
            return read_container_header(container).has_sound
    except (av.error.FFmpegError, OSError, ValueError):  # it was removed meanwhile, or is incomplete
        return False


def _find_references(folder: Path) -> dict[int, list[Path]]:
    """Small copies of each prompt's reference pictures, in order."""
    numbered_paths: dict[int, list[tuple[int, Path]]] = {}
    for path in (folder / "samples" / "references").glob("prompt_*.*"):
        # Prompt and position of the reference.
        match = re.fullmatch(r"prompt_(\d{1,6})_(\d{1,6})\.(mp4|jpg)", path.name)
        if match and can_open_inside_folder(folder, path, MAX_SAMPLE_BYTES):
            numbered_paths.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {index: [path for _, path in sorted(paths)] for index, paths in numbered_paths.items()}


def _get_media_kind(path: Path) -> str:
    return "video" if path.suffix == ".mp4" else "image"


def format_step(step: int) -> str:
    return f"after step {step:,}" if step else "before training"


def _embed_files(folder: Path, paths: Iterable[Path], bytes_left: int) -> dict[Path, str]:
    """Data URIs of as many files as fit into `bytes_left` bytes; files removed meanwhile are left out."""
    uris: dict[Path, str] = {}
    for path in paths:
        # A run with two samples names its first and last step twice.
        if path in uris:
            continue
        try:
            # Three bytes become four characters of base64.
            text = base64.b64encode(read_file_inside_folder(folder, path, bytes_left // 4 * 3)).decode()
        except OSError:
            continue
        uris[path] = f"data:{CONTENT_TYPES[path.suffix]};base64,{text}"
        bytes_left -= len(text)
    return uris


def _find_answers(folder: Path) -> list[PromptAnswers]:
    """The answers to every validation prompt of a chat model's run; damaged files are left out."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    paths = {step: path / "answers.json" for step, path in list_step_folders(folder / "samples").items()}
    for step in choose_evenly([step for step, path in paths.items() if path.exists()], MAX_STEPS):
        try:
            records = parse_json(read_file_inside_folder(folder, paths[step]))
        except (OSError, ValueError):
            continue
        if isinstance(records, list):
            # Keep the positions: answers are matched to prompts by index.
            by_step[step] = [record if isinstance(record, dict) else {} for record in records]
    if not by_step:
        return []
    return [
        PromptAnswers(
            str(record.get("prompt", "")),
            Path(str(record.get("media") or "")).name,
            [
                (format_step(step), str(answers[index].get("answer", "")))
                for step, answers in sorted(by_step.items())
                if index < len(answers)
            ],
        )
        # The newest step decides which prompts exist.
        for index, record in enumerate(by_step[max(by_step)][:MAX_PROMPTS])
    ]
