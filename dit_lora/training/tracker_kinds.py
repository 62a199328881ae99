"""How each tracker takes what a run has to say: its own objects, in the form that its pages show."""

import io
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from dit_lora.data.media import MediaFile
from dit_lora.data.opened import open_media, open_picture
from dit_lora.redact import redacted

Failures = tuple[type[Exception], ...]

LONGEST_SIDE = 320
"""Pixels of an animation in TensorBoard, whose files hold what they show."""
_FLUSH_SECONDS = 10
_FINISH_SECONDS = 60
"""How long the end of a run waits for uploads; what is left lies in the run's folder."""
_TALLY = "guard/events"
_COLUMNS = ("step", "kind", "cause", "module", "samples", "action", "words")


@dataclass(frozen=True)
class Start:
    """What a tracker is opened with."""

    folder: Path
    name: str
    """Unique, for a tracker that knows runs by name."""
    id: str
    config: Mapping[str, Any]
    again_from: int | None
    """Of a run that is gone on with: the step from which on it is logged anew."""

    @property
    def shown_name(self) -> str:
        return self.name.removesuffix(f"-{self.id}")


@dataclass(frozen=True)
class Sample:
    """A video (.mp4) or an image (.png), and what was asked for."""

    path: Path
    prompt: str

    @property
    def tag(self) -> str:
        return f"samples/{self.path.stem}"


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl as others may see it."""

    step: int
    kind: str
    cause: str
    module: str
    samples: str
    action: str
    words: str

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Event":
        public = redacted(line)
        verdict = public.get("verdict") or {}
        return cls(
            step=public["step"],
            kind=public["kind"],
            cause=verdict.get("cause") or "",
            module=verdict.get("module") or "",
            samples=", ".join(public.get("sample_ids") or ()),
            action=public.get("action") or "",
            words=verdict.get("words") or "",
        )

    def row(self) -> list[Any]:
        return [getattr(self, name) for name in _COLUMNS]


class Tracker(Protocol):
    """One tracker of a run; what it raises in trouble is among its `failures`."""

    name: ClassVar[str]

    def __init__(self, own: Any, start: Start) -> None: ...

    @staticmethod
    def options(start: Start) -> dict[str, Any]:
        """What Accelerate hands on to the tracker when it opens the run."""

    @staticmethod
    def options_offline(start: Start) -> dict[str, Any]:
        """The same for one that cannot be reached: it logs to the run's folder."""

    @staticmethod
    def failures() -> Failures: ...

    @staticmethod
    def unreachable() -> Failures:
        """What opening raises where `options_offline` would do."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def answers(self, said: Sequence[Mapping[str, Any]], step: int) -> None:
        """A chat model's: `prompt`, `media`, `answer`."""

    def event(self, event: Event, count: int) -> None:
        """One that has just been written; `count` are the run's so far."""

    def replayed(self, events: Sequence[Event]) -> None:
        """Those from before a resume, beyond the step that the run goes on from."""

    def finish(self, events: Sequence[Event], *, failed: bool) -> None: ...


class TensorBoard:
    """Event files in RUN/dit-lora; a resumed run purges what it does again."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self, own: Any, start: Start) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._writer = own
        flat = {key: _plain(value) for key, value in flattened(start.config).items()}
        # Not add_hparams, which opens a run of its own below this one, at every resume another.
        for summary in hparams(flat, {}):
            own.file_writer.add_summary(summary)

    @staticmethod
    def options(start: Start) -> dict[str, Any]:
        # At the first start too: TensorBoard takes the first mark for a beginning, the next for a restart.
        return {"purge_step": start.again_from or 0, "flush_secs": _FLUSH_SECONDS}

    @staticmethod
    def options_offline(start: Start) -> dict[str, Any]:
        return TensorBoard.options(start)

    @staticmethod
    def failures() -> Failures:
        return (OSError,)

    @staticmethod
    def unreachable() -> Failures:
        return ()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        for one in samples:
            data, (width, height) = _animation(one.path)
            self._writer.file_writer.add_summary(_image(one, data, width, height), step)

    def answers(self, said: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = [_answer_row(one) for one in said]
        self._writer.add_text("samples/answers", _markdown(_ANSWER_COLUMNS, rows), step)

    def event(self, event: Event, count: int) -> None:
        self._writer.add_scalar(_TALLY, count, event.step)
        self.replayed([event])

    def replayed(self, events: Sequence[Event]) -> None:
        for one in events:
            self._writer.add_text(f"guard/{one.kind}", _markdown(_COLUMNS, [one.row()]), one.step)

    def finish(self, events: Sequence[Event], *, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; by default it would log the machine, the command line and what is printed."""

    name: ClassVar[str] = "wandb"

    def __init__(self, own: Any, start: Start) -> None:
        self._wandb, self._run = load_wandb(), own
        # Its own count of steps never goes back, and a resumed or rolled back run does.
        own.define_metric("step")
        own.define_metric("*", step_metric="step")

    @staticmethod
    def options(start: Start) -> dict[str, Any]:
        settings = {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,
            "host": "",
            "username": "",
            "email": "",
            "finish_timeout": _FINISH_SECONDS,
        }
        return {
            "dir": str(start.folder),
            "name": start.shown_name,
            "id": start.id,
            "resume": "allow",
            "config": dict(start.config),
            "settings": settings,
        }

    @staticmethod
    def options_offline(start: Start) -> dict[str, Any]:
        load_wandb().teardown()  # its service still holds the id
        options = Wandb.options(start)
        return {**options, "settings": {**options["settings"], "mode": "offline"}}

    @staticmethod
    def failures() -> Failures:
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

        return (
            load_wandb().errors.Error,
            OSError,
            HandleAbandonedError,
            MailboxClosedError,
        )

    @staticmethod
    def unreachable() -> Failures:
        return (load_wandb().errors.Error,)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        shown = {
            one.tag: self._wandb.Video(str(one.path), caption=one.prompt, format="mp4")
            if one.path.suffix == ".mp4"
            else self._wandb.Image(str(one.path), caption=one.prompt)
            for one in samples
        }
        self._run.log({**shown, "step": step})

    def answers(self, said: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = [_answer_row(one) for one in said]
        table = self._wandb.Table(columns=list(_ANSWER_COLUMNS), data=rows)
        self._run.log({"samples/answers": table, "step": step})

    def event(self, event: Event, count: int) -> None:
        level = self._wandb.AlertLevel
        # One title a kind: at most one message a minute and kind is sent to those who asked for them.
        self._run.alert(
            title=f"guard: {event.kind}",
            text=f"step {event.step}: {event.words} ({event.action})",
            level=level.INFO if event.action == "report" else level.WARN,
        )
        self._run.log({_TALLY: count, "step": event.step})

    def replayed(self, events: Sequence[Event]) -> None:
        """It has them: nothing is purged."""

    def finish(self, events: Sequence[Event], *, failed: bool) -> None:
        if events:
            table = self._wandb.Table(columns=list(_COLUMNS), data=[one.row() for one in events])
            self._run.log({"guard/table": table, "step": events[-1].step})
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of Trackio, in its folder on this machine; it says what it fails at, and raises nothing itself."""

    name: ClassVar[str] = "trackio"

    def __init__(self, own: Any, start: Start) -> None:
        self._run = own

    @staticmethod
    def options(start: Start) -> dict[str, Any]:
        config = flattened(start.config)
        return {"name": start.name, "config": config, "resume": "allow", "embed": False}

    @staticmethod
    def options_offline(start: Start) -> dict[str, Any]:
        return Trackio.options(start)

    @staticmethod
    def failures() -> Failures:
        return (OSError, sqlite3.Error)

    @staticmethod
    def unreachable() -> Failures:
        return ()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        import trackio

        kinds = {".mp4": trackio.Video, ".png": trackio.Image}
        shown = {one.tag: kinds[one.path.suffix](one.path, caption=one.prompt) for one in samples}
        self._run.log(shown, step=step)

    def answers(self, said: Sequence[Mapping[str, Any]], step: int) -> None:
        import trackio

        rows = [_answer_row(one) for one in said]
        table = trackio.Table(columns=list(_ANSWER_COLUMNS), data=rows)
        self._run.log({"samples/answers": table}, step=step)

    def event(self, event: Event, count: int) -> None:
        import trackio

        level = trackio.AlertLevel.INFO if event.action == "report" else trackio.AlertLevel.WARN
        text = f"{event.words} ({event.action})"
        self._run.alert(f"guard: {event.kind}", text, level=level, step=event.step)
        self._run.log({_TALLY: count}, step=event.step)

    def replayed(self, events: Sequence[Event]) -> None:
        """It has them: nothing is purged."""

    def finish(self, events: Sequence[Event], *, failed: bool) -> None:
        self._run.finish()


KINDS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, Wandb, Trackio)}
_ANSWER_COLUMNS = ("prompt", "media", "answer")


def load_wandb() -> ModuleType:
    """The module, imported where it is used: it takes half a second."""
    import wandb

    return wandb


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined with dots as a recipe's overrides have them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> bool | int | float | str:
    """What TensorBoard takes as a hyperparameter; lists and null as JSON."""
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _answer_row(said: Mapping[str, Any]) -> list[str]:
    return [str(said.get(name) or "") for name in _ANSWER_COLUMNS]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _animation(path: Path) -> tuple[bytes, tuple[int, int]]:
    """A GIF of a video or a PNG of an image, no larger than `LONGEST_SIDE`, and its width and height."""
    milliseconds, frames = 0.0, []
    if path.suffix == ".mp4":
        with open_media(MediaFile(path)) as container:
            milliseconds = 1000 / float(container.streams.video[0].average_rate or 8)
            frames = [frame.to_image() for frame in container.decode(video=0)]
    else:
        with open_picture(MediaFile(path)) as image:
            frames = [image.convert("RGB")]
    for frame in frames:
        frame.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    data = io.BytesIO()
    if len(frames) > 1:
        more = {"save_all": True, "append_images": frames[1:], "duration": milliseconds, "loop": 0}
        frames[0].save(data, "GIF", **more)
    else:
        frames[0].save(data, "PNG")
    return data.getvalue(), frames[0].size


def _image(sample: Sample, data: bytes, width: int, height: int) -> Any:
    """TensorBoard's summary of an encoded image, animated or not, with its prompt as the description."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
    about = SummaryMetadata(summary_description=sample.prompt)
    return Summary(value=[Summary.Value(tag=sample.tag, image=image, metadata=about)])
