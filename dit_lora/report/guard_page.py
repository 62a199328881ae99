"""Write a guard's folder as a self-contained page: watched models, failed steps and actions taken."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.files import is_inside, read_lines
from dit_lora.guard.attach.guard_json import NAME, starts_in
from dit_lora.guard.attach.monitoring import STATISTICS
from dit_lora.guard.attach.samples.loaded_batches import is_sample_name
from dit_lora.redact import redactor
from dit_lora.report.charts.heat_map import ModuleHistory, heat_maps
from dit_lora.report.pages import render, write_page
from dit_lora.report.run.history import mapping
from dit_lora.report.run.recipe_diff import in_words
from dit_lora.report.run.words import NONE, EventRow, Figure, event_row

_SHOWN = 50
"""Number of table rows that are visible; the others can be expanded."""
_MOST = 1000
"""Number of events in the table, the latest; events.jsonl has all of them."""
_ACTIONS = {
    "skip": "left the step out",
    "fallback": "switched it off from here on, and left the step out",
    "rollback": "put an earlier snapshot of weights and optimizer back",
    "stop": "stopped the loop",
}
# A single folder below `bundles/`: letters, digits, `_`, `.` and `-`, and no further slash.
_PLACE = re.compile(r"bundles/[\w.-]+")
_TICKS = 400
"""Number of distinct positions on a lane."""


@dataclass(frozen=True)
class Row:
    """One event, and those with the same message about the same samples, for the table."""

    step: str
    again: str
    """Text on how often the event was repeated; empty if it was not."""
    cause: str
    words: str
    module: str
    op: str
    samples: str
    action: str
    bundle: str
    """Path of the bundle's folder relative to the page; empty if there is none."""
    told: EventRow


@dataclass(frozen=True)
class Tick:
    """A mark on a lane: its position in percent, color class and text."""

    at: float
    color: str
    words: str


@dataclass(frozen=True)
class Lane:
    """The events of one cause over the steps."""

    cause: str
    count: int
    ticks: Sequence[Tick]


@dataclass(frozen=True)
class Start:
    """One guard of the folder: what it watched, and its events over the steps."""

    title: str
    facts: Sequence[tuple[str, str]]
    steps: int
    """The last known step."""
    lanes: Sequence[Lane]


def is_guard_folder(folder: Path) -> bool:
    """True for the folder of a guard in another training loop, False for a dit_lora run."""
    # A dit_lora run also writes events.jsonl, but only a run has a config.yaml.
    is_run = (folder / "config.yaml").exists()
    return not is_run and any((folder / name).exists() for name in (NAME, "events.jsonl"))


def write_guard_report(folder: Path) -> Path:
    """Write `folder/report.html` atomically from the guard's files in the folder.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    clean = redactor()
    # Torn lines were being written when a process was killed.
    events, torn = read_lines(folder / "events.jsonl")
    events, starts = clean(events), clean(starts_in(folder))
    rows = [_row(group, folder) for group in _alike(events[-_MOST:])]
    # From the whole list: the table below has only the latest events.
    state, color = _state(events, starts)
    heat = heat_maps(_modules(folder))
    page = render(
        "guard_page.html",
        scripts=("page.js",) if heat else (),
        name=folder.resolve().name,
        state=state,
        state_color=color,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        figures=_figures(events, starts),
        starts=_starts(events, starts),
        rows_open=rows[:_SHOWN],
        rows_more=rows[_SHOWN:],
        earlier=max(0, len(events) - _MOST),
        notes=_notes(starts, torn),
        heat=heat,
        weights=_weights(folder),
        any_bundle=next((row.bundle for row in rows if row.bundle), ""),
        script=next(
            (str(start["script"]) for start in reversed(starts) if start.get("script")), ""
        ),
    )
    return write_page(folder / "report.html", page, allow_stream=False)


def _state(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """How the last start ended, as far as is known, and its color class."""
    if events and events[-1].get("action") == "stop":
        return "stopped by the guard", "reject"
    # False until the guard is closed, and so also after a kill.
    if not starts or not starts[-1].get("ended"):
        return "running, or ended without a word", "warn"
    return "ended", "ok"


def _figures(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    have_all_ended = bool(starts) and all(start.get("ended") is True for start in starts)
    # Counts of a start that did not end are as of its last write.
    caveat = "" if have_all_ended else "as far as known"
    num_taken, lost = (
        sum(_count(start.get(name)) for start in starts) for name in ("taken", "lost")
    )
    event_counts: dict[str, int] = {}
    for event in events:
        for sample in _listed(event.get("sample_ids")):
            event_counts[sample] = event_counts.get(sample, 0) + 1
    # Row numbers are not names: they mean different samples in different micro-batches.
    named = {sample: count for sample, count in event_counts.items() if is_sample_name(sample)}
    worst = max(named, key=lambda sample: named[sample], default="")
    most_frequent = f"most often {worst} ({named[worst]}x)" if worst else ""
    unnamed = len(event_counts) - len(named)
    rows = f"and {unnamed} not named" if unnamed else ""
    switched_off_names = sorted(_switched_off(events, starts))
    return [
        Figure("Steps taken", f"{num_taken:,}" if starts else NONE, caveat),
        Figure("Steps not taken", f"{lost:,}" if starts else NONE, _share(lost, num_taken + lost)),
        Figure("Samples blamed", f"{len(named):,}", "; ".join(filter(None, (most_frequent, rows)))),
        Figure(
            "Switched off",
            f"{len(switched_off_names):,}",
            ", ".join(switched_off_names) or "no kernel, no backend",
        ),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}% of {whole:,}" if part and whole else ""


def _switched_off(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> set[str]:
    # Each fallback is an event, and guard.json lists what was off at its last write: take both.
    from_events = {
        str(mapping(entry.get("verdict")).get("switch", "")) for entry in events if _falls(entry)
    }
    from_starts = {name for entry in starts for name in _listed(entry.get("switched_off"))}
    return (from_events | from_starts) - {""}


def _falls(event: Mapping[str, Any]) -> bool:
    return event.get("action") == "fallback"


def _starts(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[Start]:
    """The known guards, and an extra entry for events that none of them has written."""
    guard_ids = {str(entry["id"]) for entry in starts}
    # guard.json may be missing or damaged while events.jsonl is complete.
    unmatched_events = [entry for entry in events if str(entry.get("guard")) not in guard_ids]
    entries = [
        _start(entry, [e for e in events if e.get("guard") == entry["id"]]) for entry in starts
    ]
    return [*entries, *([_start({}, unmatched_events)] if unmatched_events else [])]


def _start(facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Start:
    event_steps = [_count(event.get("step")) for event in events]
    # The lane's right end. At least 1, because positions are divided by it.
    steps = max([_count(facts.get("taken")) + _count(facts.get("lost")), *event_steps, 1])
    # In order of first appearance.
    causes = dict.fromkeys(_cause(event) for event in events)
    lanes = [_lane(cause, [e for e in events if _cause(e) == cause], steps) for cause in causes]
    models = facts.get("models")
    rows = [
        ("Loop", _loop(facts)),
        *(
            ("Model", _model(mapping(model)))
            for model in (models if isinstance(models, list) else [])
        ),
        ("Optimizers", in_words(facts.get("optimizers"))),
        ("Checks", in_words(facts.get("checks"))),
        ("Steps", _steps(facts)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in mapping(facts.get("versions")).items())),
        ("Settings", in_words(mapping(facts.get("settings")))),
    ]
    # Events may exist without an entry in guard.json, if that file is missing or damaged.
    title = str(facts.get("started", "")) or "of a start that guard.json does not know"
    return Start(title, [(name, text) for name, text in rows if text], steps, lanes)


def _loop(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    ranks = _count(facts.get("ranks"))
    parts = [str(facts.get("script", "")), str(facts.get("loop", "")), str(facts.get("device", ""))]
    return ", ".join([*filter(None, parts), *([f"{ranks} processes"] if ranks > 1 else [])])


def _model(model: Mapping[str, Any]) -> str:
    dtypes = in_words(model.get("dtypes"))
    numbers = f"{_count(model.get('trained')):,} of {_count(model.get('parameters')):,} trained"
    return f"{model.get('name')}: {numbers}" + (f", in {dtypes}" if dtypes else "")


def _steps(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    ending = "" if facts.get("ended") is True else "; it has not said that it ended"
    return f"{_count(facts.get('taken')):,} taken, {_count(facts.get('lost')):,} not{ending}"


def _lane(cause: str, events: Sequence[Mapping[str, Any]], steps: int) -> Lane:
    # Combine events at the same position in one tick: overlapping marks would show no more.
    # Events by position, an integer from 0 to the number of ticks.
    events_by_position: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        position = round(_TICKS * _count(event.get("step")) / steps)
        events_by_position.setdefault(min(position, _TICKS), []).append(event)
    ticks = []
    for position, position_events in sorted(events_by_position.items()):
        # A stop colours the tick even if others share the position.
        stops = any(event.get("action") == "stop" for event in position_events)
        first_event, more = (
            position_events[0],
            f" and {len(position_events) - 1} more" if len(position_events) > 1 else "",
        )
        text = f"step {first_event.get('step')}: {first_event.get('action')}{more}"
        ticks.append(Tick(100 * position / _TICKS, "reject" if stops else "warn", text))
    return Lane(cause, len(events), ticks)


def _alike(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group events with the same message, since a bad sample costs a step in each epoch."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for event in events:
        message = str(mapping(event.get("verdict")).get("words"))
        # Same guard, cause, action, message and samples.
        key = (event.get("guard"), _cause(event), event.get("action"), message)
        groups.setdefault((*map(str, key), *_listed(event.get("sample_ids"))), []).append(event)
    return list(groups.values())


def _row(alike: Sequence[Mapping[str, Any]], folder: Path) -> Row:
    event = alike[0]
    verdict, base_row = mapping(event.get("verdict")), event_row(event, _ACTIONS)
    bundle = str(event.get("bundle", ""))
    # The file may be untrusted, so only a valid bundle path becomes a link.
    is_there = _PLACE.fullmatch(bundle) and is_inside(folder, folder / bundle / "bundle.json")
    return Row(
        step=base_row.step,
        again=f"{len(alike) - 1:,} more, to {alike[-1].get('step')}" if len(alike) > 1 else "",
        cause=_cause(event),
        words=base_row.words,
        module=in_words(verdict.get("module")),
        op=in_words(verdict.get("op")),
        samples=", ".join(_listed(event.get("sample_ids"))),
        action=base_row.action,
        bundle=bundle if is_there else "",
        told=base_row,
    )


def _notes(starts: Sequence[Mapping[str, Any]], torn: int) -> list[str]:
    notes = [] if starts else [f"{NAME} is not there or torn: what was watched is not known."]
    return notes + ([f"{torn} torn lines of events.jsonl are left out."] if torn else [])


def _modules(folder: Path) -> ModuleHistory:
    """Module statistics of the last guard that has any."""
    history = ModuleHistory()
    lines, _ = read_lines(folder / STATISTICS)
    for line in lines:
        # Steps of different guards overlap, so one map can show only one guard.
        if line.get("guard") == lines[-1].get("guard"):
            history.add(_count(line.get("step")), mapping(line.get("modules")))
    return history


def _weights(folder: Path) -> list[tuple[str, str]]:
    """Names and sizes of the files with the last good weights."""
    paths = sorted(
        path for path in folder.glob("last_good_step_*.safetensors") if is_inside(folder, path)
    )
    return [(path.name, f"{path.stat().st_size / 2**20:.3g} MiB") for path in paths]


def _cause(event: Mapping[str, Any]) -> str:
    cause = mapping(event.get("verdict")).get("cause", "unknown")
    # Events that are only reported, such as spikes, have a kind but no cause.
    named = event.get("kind", cause) if cause == "unknown" else cause
    return str(named).replace("_", " ")


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
