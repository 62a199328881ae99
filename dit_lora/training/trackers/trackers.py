"""Log a run's scalars, samples and guard events to TensorBoard, Weights & Biases and Trackio, through Accelerate.

A tracker that fails is dropped with one message, and training continues. Logged values hold no absolute path and no
token (`dit_lora.redact`).
"""

import importlib
import io
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from dit_lora.config.records import Answer, read_typed_json
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.opened import open_media, open_picture
from dit_lora.errors import DitLoraError
from dit_lora.files import read_json_lines, write_atomically
from dit_lora.redact import redact_value

T = TypeVar("T")

PROJECT = "dit-lora"
TRACKERS_FILE = "trackers.json"
"""File in the run's folder with the run's id in its trackers, so that a resumed run continues there."""
_ANSWER_COLUMNS = ("prompt", "media", "answer")
_EVENT_COLUMNS = ("step", "kind", "cause", "module", "samples", "action", "words")
_MAX_SIDE_PIXELS = 320
"""Pixels of an animation's longest side: TensorBoard embeds them in its files."""
_MAX_TABLE_ROWS = 100
"""Number of last events in a table: it is sent again with each new event."""
_WANDB_SETTINGS = {
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "host": "",
    "username": "",
    "email": "",
    "finish_timeout": 60,
}
"""By default wandb would log the machine, the command line and all output, and wait indefinitely for uploads."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `DitLoraError` for trackers that are not installed: Accelerate would drop them silently."""
    missing = [name for name in names if not any(metadata.distributions(name=name))]
    if missing:
        raise DitLoraError(
            f"run.trackers: {', '.join(missing)} not installed; pip install 'dit-lora[{','.join(missing)}]'"
        )


def find_login_problem(names: Sequence[str]) -> DitLoraError | None:
    """The error to raise if Weights & Biases would ask for a login in the middle of a run; else None."""
    if "wandb" not in names:
        return None
    import wandb

    try:
        if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
            return None
    # Its service does not start: the tracker will be dropped, with the reason.
    except Exception:
        return None
    return DitLoraError(
        "run.trackers: wandb has no API key on this machine: run `wandb login`, or log to the run's folder "
        "with WANDB_MODE=offline (`wandb sync` sends it later)"
    )


class Trackers:
    """The trackers of one run. Used on the main process; does nothing if `names` is empty."""

    def __init__(self, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
        self._folder, self._names, self._say = folder, names, say
        self._open_trackers: list[GeneralTracker] = []
        self._events: list[dict[str, Any]] = []

    def start_trackers(self, config: Mapping[str, Any], start_step: int) -> None:
        """Open the run in each tracker, or continue it after `start_step`.

        `config` is a nested mapping of plain values.
        """
        if self._names:
            self._run_or_log_error("all are left out", lambda: self._open_all(config, start_step))

    def _open_all(self, config: Mapping[str, Any], start_step: int) -> None:
        # A resumed run continues under the id of its first start.
        earlier_id = (read_json_lines(self._folder / TRACKERS_FILE).objects or [{}])[0].get("id")
        run_id = earlier_id or secrets.token_hex(4)
        if not earlier_id:
            write_atomically(self._folder / TRACKERS_FILE, json.dumps({"id": run_id}) + "\n")
        # Steps that a killed run has logged after its last checkpoint are taken and logged again.
        again_from = start_step + 1 if earlier_id and start_step else 0
        for name in self._names:
            opened = self._run_or_log_error(
                _format_dropped_tracker(name),
                partial(self._open_tracker, name, run_id, redact_value(config), again_from),
            )
            if opened is not None:
                self._open_trackers.append(opened)
        self._events = [
            _select_public_columns(line) for line in read_json_lines(self._folder / "events.jsonl").objects
        ]
        # TensorBoard drops the steps that are repeated.
        if earlier_id and self._events:
            self._call_each_tracker(lambda tracker: _log_events(tracker, self._events, again_from))

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of a step to all trackers."""
        self._call_each_tracker(lambda tracker: _log_values(tracker, values, step))

    def log_samples(self, step: int, prompts: Sequence[str]) -> None:
        """Log the files in samples/step_NNNNNN to all trackers: videos, images, or a chat model's answers."""
        if self._open_trackers:
            consequence = f"the samples of step {step} are left out"
            self._run_or_log_error(consequence, lambda: self._log_sample_files(step, prompts))

    def _log_sample_files(self, step: int, prompts: Sequence[str]) -> None:
        folder = self._folder / "samples" / f"step_{step:06d}"
        captions = {
            path: redact_value(_find_prompt(path, prompts))
            for path in sorted(folder.glob("prompt_*.*"))
            if path.suffix in (".mp4", ".png")
        }
        if captions:
            self._call_each_tracker(lambda tracker: _log_samples(tracker, captions, step))
        answers = folder / "answers.json"
        if answers.is_file():
            answers_read = redact_value(read_typed_json(answers, list[Answer]))
            rows = [[str(answer.get(name) or "") for name in _ANSWER_COLUMNS] for answer in answers_read]
            self._call_each_tracker(
                lambda tracker: _log_table(tracker, "samples/answers", _ANSWER_COLUMNS, rows, step)
            )

    def log_event(self, line: Mapping[str, Any]) -> None:
        """Log a line of events.jsonl to all trackers."""
        if self._open_trackers:
            self._events.append(_select_public_columns(line))
            self._call_each_tracker(lambda tracker: _log_events(tracker, self._events, line["step"]))
            self._call_each_tracker(lambda tracker: _send_alert(tracker, self._events[-1]))

    def finish(self, *, failed: bool) -> None:
        """Close all trackers. Called once, however the run ended."""
        self._call_each_tracker(lambda tracker: _close_tracker(tracker, failed=failed))
        self._open_trackers.clear()

    def _open_tracker(
        self, name: str, run_id: str, config: Mapping[str, Any], first_repeated_step: int
    ) -> GeneralTracker:
        label = redact_value(self._folder.resolve().name)
        if name == "tensorboard":
            # Purge from 0 too: TensorBoard takes the first purge mark for a start, the next for a restart.
            tracker = TensorBoardTracker(PROJECT, self._folder, purge_step=first_repeated_step, flush_secs=10)
            tracker.start()
            _add_hyperparameters(tracker, config)
        elif name == "trackio":
            options = {"config": flatten(config), "resume": "allow", "embed": False}
            tracker = TrackioTracker(PROJECT, name=f"{label}-{run_id}", **options)
            tracker.start()
        else:
            tracker = self._open_wandb(id=run_id, name=label, config=dict(config))
        return tracker

    def _open_wandb(self, **options: Any) -> GeneralTracker:
        """Start a run of Weights & Biases; offline in the run's folder if the service cannot be reached."""
        import wandb

        options |= {"dir": str(self._folder), "resume": "allow"}
        try:
            tracker = WandBTracker(PROJECT, settings=_WANDB_SETTINGS, **options)
            tracker.start()
        except wandb.errors.Error as error:
            self._say(f"warning: wandb: {_format_error(error)}; logging to the run's folder instead")
            # Its service still uses the id.
            wandb.teardown()
            tracker = WandBTracker(PROJECT, settings={**_WANDB_SETTINGS, "mode": "offline"}, **options)
            tracker.start()
        # Its own step counter never goes back, but a resumed or rolled back run does.
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")
        return tracker

    def _call_each_tracker(self, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in list(self._open_trackers):
            if not self._run_or_log_error(
                _format_dropped_tracker(tracker.name), partial(_call_tracker, call, tracker)
            ):
                self._open_trackers.remove(tracker)

    def _run_or_log_error(self, consequence: str, work: Callable[[], T]) -> T | None:
        """Run `work`; on any error log `consequence` and return None: trackers must never end a run."""
        try:
            return work()
        # Third-party clients: the exception classes they raise change with their versions.
        except Exception as error:
            self._say(f"warning: run.trackers: {consequence}: {_format_error(error)}")
            return None


def _call_tracker(call: Callable[[GeneralTracker], None], tracker: GeneralTracker) -> bool:
    call(tracker)
    return True


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings; keys are joined with dots, as in a recipe's overrides."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _add_hyperparameters(tracker: TensorBoardTracker, config: Mapping[str, Any]) -> None:
    """Add the hyperparameters to the TensorBoard run itself.

    Accelerate would open another run below it at every resume.
    """
    from torch.utils.tensorboard.summary import hparams

    flat = flatten(config)
    plain = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in flat.items()}
    # Three records: the experiment, and the start and end of the session.
    for summary in hparams(plain, {}):
        tracker.tracker.file_writer.add_summary(summary)


def _log_values(tracker: GeneralTracker, values: Mapping[str, Any], step: int) -> None:
    if isinstance(tracker, WandBTracker):
        tracker.log({**values, "step": step})
    else:
        tracker.log(dict(values), step=step)


def _log_samples(tracker: GeneralTracker, captions: Mapping[Path, str], step: int) -> None:
    """Log videos and images with their captions to a tracker. Accelerate's `log_images` does not support this."""
    if isinstance(tracker, TensorBoardTracker):
        for path, caption in captions.items():
            _add_animation(tracker.tracker, f"samples/{path.stem}", path, caption, step)
        return
    library = importlib.import_module(tracker.name)
    kinds = {".mp4": library.Video, ".png": library.Image}
    media = {
        f"samples/{path.stem}": kinds[path.suffix](str(path), caption=caption) for path, caption in captions.items()
    }
    _log_values(tracker, media, step)


def _add_animation(writer: Any, tag: str, path: Path, caption: str, step: int) -> None:
    """Add a GIF of a video (.mp4) or a PNG of an image to a `SummaryWriter`, with the caption as its description.

    PyTorch's `add_video` needs moviepy and FFmpeg, and stores no caption.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    milliseconds = 0.0
    if path.suffix == ".mp4":
        with open_media(MediaFile(path)) as container:
            # Time per frame; 8 frames per second if the file does not say.
            milliseconds = 1000 / float(container.streams.video[0].average_rate or 8)
            frames = [frame.to_image() for frame in container.decode(video=0)]
    else:
        with open_picture(MediaFile(path)) as image:
            frames = [image.convert("RGB")]
    for frame in frames:
        # In place; keeps the aspect ratio.
        frame.thumbnail((_MAX_SIDE_PIXELS, _MAX_SIDE_PIXELS))
    data, kind = io.BytesIO(), "GIF" if len(frames) > 1 else "PNG"
    # These options have no effect on a PNG.
    frames[0].save(data, kind, save_all=kind == "GIF", append_images=frames[1:], duration=milliseconds, loop=0)
    width, height = frames[0].size
    picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data.getvalue())
    value = Summary.Value(tag=tag, image=picture, metadata=SummaryMetadata(summary_description=caption))
    writer.file_writer.add_summary(Summary(value=[value]), step)


def _log_table(
    tracker: GeneralTracker, tag: str, columns: Sequence[str], rows: Sequence[list[Any]], step: int
) -> None:
    if not isinstance(tracker, TensorBoardTracker):
        table = importlib.import_module(tracker.name).Table
        _log_values(tracker, {tag: table(columns=list(columns), data=rows)}, step)
        return
    lines = [columns, ["---"] * len(columns), *rows]
    # Markdown: a bar would end the cell, a line break the table.
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    _log_values(tracker, {tag: "\n".join(f"| {' | '.join(line)} |" for line in cells)}, step)


def _log_events(tracker: GeneralTracker, events: Sequence[Mapping[str, Any]], step: int) -> None:
    _log_values(tracker, {"guard/events": len(events)}, step)
    rows = [list(event.values()) for event in events[-_MAX_TABLE_ROWS:]]
    _log_table(tracker, "guard/table", _EVENT_COLUMNS, rows, step)


def _send_alert(tracker: GeneralTracker, event: Mapping[str, Any]) -> None:
    """Send an alert to subscribers of a Weights & Biases run; TensorBoard has no alerts."""
    if isinstance(tracker, TensorBoardTracker):
        return
    # wandb and trackio have the same interface for alerts.
    levels = importlib.import_module(tracker.name).AlertLevel
    at = {"step": event["step"]} if isinstance(tracker, TrackioTracker) else {}
    tracker.tracker.alert(
        title=f"guard: {event['kind']}",
        text=f"step {event['step']}: {event['words']} ({event['action']})",
        level=levels.INFO if event["action"] == "report" else levels.WARN,
        **at,
    )


def _close_tracker(tracker: GeneralTracker, *, failed: bool) -> None:
    if isinstance(tracker, WandBTracker):
        # Accelerate's `finish` would mark every run as finished.
        tracker.tracker.finish(exit_code=int(failed))
    else:
        tracker.finish()


def _select_public_columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a guard event that may be published, from a line of events.jsonl."""
    event = redact_value(line)
    samples = ", ".join(event.get("sample_ids") or ())
    # The event's own keys win over those of its diagnosis.
    values = {**(event.get("verdict") or {}), **event, "samples": samples}
    return {name: values[name] if values.get(name) is not None else "" for name in _EVENT_COLUMNS}


def _find_prompt(path: Path, prompts: Sequence[str]) -> str:
    # `prompt_03.mp4` is the sample of `prompts[3]`.
    match = re.fullmatch(r"prompt_(\d+)", path.stem)
    index = int(match[1]) if match else len(prompts)
    return prompts[index] if index < len(prompts) else path.stem


def _format_dropped_tracker(name: str) -> str:
    return f"{name} is not used any more"


def _format_error(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
