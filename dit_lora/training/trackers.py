"""TensorBoard, Weights & Biases and Trackio, started by Accelerate: scalars, samples and guard events of a run.

A tracker is told, never asked: what it fails at is said once, it is left out from there, and training goes on.
What it gets holds no absolute path and no token (`dit_lora.redact`).
"""

import importlib.util
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.redact import redacted
from dit_lora.training import tracker_kinds
from dit_lora.training.tracker_kinds import Event, Sample, Tracker, load_wandb

PROJECT = "dit-lora"
IDENTITY = "trackers.json"
"""In the run's folder: by which name its trackers know the run, so that a resumed one goes on there."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `DitLoraError` for trackers that are not installed: Accelerate leaves them out in silence."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise DitLoraError(
            f"run.trackers: {', '.join(missing)} not installed; pip install 'dit-lora[{','.join(missing)}]'"
        )


def login_problem(names: Sequence[str]) -> DitLoraError | None:
    """What is wrong if Weights & Biases would ask for a login in the middle of a run."""
    if "wandb" not in names:
        return None
    wandb = load_wandb()
    if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
        return None
    return DitLoraError(
        "run.trackers: wandb has no API key on this machine: run `wandb login`, or log to the run's folder "
        "with WANDB_MODE=offline (`wandb sync` sends it later)"
    )


class Trackers:
    """The trackers of one run; without any, and on all processes but the main one, it does nothing."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        names: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._names = names if accelerator.is_main_process else ()
        self._say = say
        self._open: list[Tracker] = []

    def start(self, config: Mapping[str, Any], start_step: int) -> None:
        """Open or go on with the run's entry in each; what `start_step` is followed by replaces what was logged.

        `config` is a nested mapping of plain values.
        """
        if not self._names:
            return
        path = self._folder / IDENTITY
        known = _identity(path)
        run_id = known or secrets.token_hex(4)
        if known is None:
            write_whole(path, json.dumps({"id": run_id}) + "\n")
        start = tracker_kinds.Start(
            folder=self._folder,
            name=f"{self._folder.resolve().name}-{run_id}",
            id=run_id,
            config=redacted(config),
            again_from=None if known is None else start_step + 1 if start_step else 0,
        )
        for name in self._names:
            kind = tracker_kinds.KINDS[name]
            failures = kind.failures()  # imported now, and not in trouble
            try:
                self._open.append(kind(self._opened(name, kind, start), start))
            except failures as error:
                self._accelerator.trackers.clear()
                self._say(_left_out(name, error))
        if start.again_from is not None:
            # They do not happen again: what was quarantined stays so.
            again = [event for event in self._events() if event.step >= start.again_from]
            self._each(lambda one: one.replayed(again))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda one: one.scalars(values, step))

    def samples(self, step: int, prompts: Sequence[str]) -> None:
        """What lies in samples/step_NNNNNN: videos, images, or a chat model's answers."""
        if not self._open:
            return
        folder = self._folder / "samples" / f"step_{step:06d}"
        found = [
            Sample(path, redacted(_prompt_of(path, prompts)))
            for path in sorted(folder.glob("prompt_*.*"))
            if path.suffix in (".mp4", ".png")
        ]
        if found:
            self._each(lambda one: one.samples(found, step))
        answers = folder / "answers.json"
        if answers.is_file():
            said = redacted(json.loads(answers.read_text(encoding="utf-8")))
            self._each(lambda one: one.answers(said, step))

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl, as it is written."""
        if self._open:
            count = len(self._events())
            public = Event.of(event)
            self._each(lambda one: one.event(public, count))

    def finish(self, *, failed: bool) -> None:
        """Close them all; called once, whatever ended the run."""
        if self._open:
            events = self._events()
            self._each(lambda one: one.finish(events, failed=failed))
        self._open.clear()

    def _opened(self, name: str, kind: type[Tracker], start: "tracker_kinds.Start") -> Any:
        """The tracker's own object, by way of Accelerate."""
        accelerator = self._accelerator
        accelerator.trackers.clear()
        accelerator.log_with = [name]
        try:
            accelerator.init_trackers(PROJECT, init_kwargs={name: kind.options(start)})
        except kind.unreachable() as error:
            self._say(f"warning: {name}: {_words(error)}; logging to the run's folder instead")
            accelerator.trackers.clear()
            options = kind.options_offline(start)
            accelerator.init_trackers(PROJECT, init_kwargs={name: options})
        own = accelerator.get_tracker(name, unwrap=True)
        # Closed by `finish`; Accelerate's end_training would let what they raise end the run.
        accelerator.trackers.clear()
        return own

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for one in list(self._open):
            try:
                tell(one)
            except one.failures() as error:
                self._open.remove(one)
                self._say(_left_out(one.name, error))

    def _events(self) -> list[Event]:
        path = self._folder / "events.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Event.of(event) for line in lines if (event := _parsed(line)) is not None]


def _is_installed(name: str) -> bool:
    """A folder of that name, as `wandb` makes one, is no package: it has no origin."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # sys.modules has None, or a module without a spec
        return False
    return spec is not None and spec.origin is not None


def _identity(path: Path) -> str | None:
    found = _parsed(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found.get("id") if isinstance(found, dict) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None  # torn by a killed process


def _prompt_of(path: Path, prompts: Sequence[str]) -> str:
    match = re.fullmatch(r"prompt_(\d+)", path.stem)
    index = int(match[1]) if match else len(prompts)
    return prompts[index] if index < len(prompts) else path.stem


def _left_out(name: str, error: Exception) -> str:
    return f"warning: run.trackers: {name} is left out from here: {_words(error)}"


def _words(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
