"""Write a guard's folder as a self-contained page: watched models, failed steps and actions taken."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.errors import format_event_kind
from dit_lora.files import can_open_inside_folder, read_json_lines
from dit_lora.guard.attach.guard_json import FILE_NAME, STATISTICS_FILE, read_guard_entries
from dit_lora.guard.attach.samples.row_names import is_sample_name
from dit_lora.redact import make_redactor
from dit_lora.report.charts.heat_map import ModuleHistory, build_heat_maps
from dit_lora.report.pages import render_page, write_page
from dit_lora.report.run.history import ensure_dict, get_diagnosis
from dit_lora.report.run.recipe_diff import format_value
from dit_lora.report.run.words import NO_VALUE, EventRow, HeadlineFigure, build_event_row

_NUM_VISIBLE_ROWS = 50
"""Number of table rows that are visible; the others can be expanded."""
_MAX_EVENTS = 1000
"""Number of events in the table, the latest; events.jsonl has all of them."""
_ACTION_TEXTS = {
    "skip": "skipped the step",
    "fallback": "switched the component off and skipped the step",
    "rollback": "restored an earlier snapshot of the weights and the optimizer",
    "stop": "stopped the loop",
}
# A single folder below `bundles/`: letters, digits, `_`, `.` and `-`, and no further slash.
_BUNDLE_PATH = re.compile(r"bundles/[\w.-]+")
_NUM_TICKS = 400
"""Number of distinct positions on a lane."""


@dataclass(frozen=True)
class Row:
    """One row of the guard's event table: an event, and those with the same message about the same samples."""

    repeats: str
    """Text on how often the event was repeated; empty if it was not."""
    cause: str
    module: str
    op: str
    samples: str
    bundle: str
    """Path of the bundle's folder relative to the page; empty if there is none."""
    event: EventRow


@dataclass(frozen=True)
class TimelineMark:
    """A guard event on a timeline: its position in percent, color class and text."""

    at: float
    color: str
    words: str


@dataclass(frozen=True)
class TimelineLane:
    """Timeline of the guard events of one cause over the steps."""

    cause: str
    count: int
    ticks: Sequence[TimelineMark]


@dataclass(frozen=True)
class GuardTimelines:
    """Report on one guard of the folder: what it watched, and its events over the steps."""

    title: str
    facts: Sequence[tuple[str, str]]
    steps: int
    """The last known step."""
    lanes: Sequence[TimelineLane]


def is_guard_folder(folder: Path) -> bool:
    """True for the folder of a guard in another training loop, False for a dit_lora run."""
    # A dit_lora run also writes events.jsonl, but only a run has a config.yaml.
    is_run = (folder / "config.yaml").exists()
    return not is_run and any((folder / name).exists() for name in (FILE_NAME, "events.jsonl"))


def write_guard_report(folder: Path) -> Path:
    """Write the guard's report, `folder/report.html`, atomically from the guard's files in the folder.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    clean = make_redactor()
    # Torn lines were being written when a process was killed.
    events, torn = read_json_lines(folder / "events.jsonl")
    events, starts = clean(events), clean(read_guard_entries(folder))
    rows = [_build_row(group, folder) for group in _group_equal_events(events[-_MAX_EVENTS:])]
    # From the whole list: the table below has only the latest events.
    # False until the guard is closed, and so also after a kill.
    has_ended = bool(starts) and bool(starts[-1].get("ended"))
    state, color = ("ended", "ok") if has_ended else ("running, or killed", "warn")
    if events and events[-1].get("action") == "stop":
        state, color = "stopped by the guard", "reject"
    lines = read_json_lines(folder / STATISTICS_FILE).objects
    history = ModuleHistory()
    for line in lines:
        # Steps of different guards overlap, so the map shows only the last guard that has any.
        if line.get("guard") == lines[-1].get("guard"):
            history.add_step(_to_count(line.get("step")), ensure_dict(line.get("modules")))
    heat = build_heat_maps(history)
    notes = [] if starts else [f"{FILE_NAME} is missing or damaged, so the watched models are not known."]
    if torn:
        count = "1 incomplete line" if len(torn) == 1 else f"{len(torn)} incomplete lines"
        notes.append(f"Ignored {count} of events.jsonl.")
    weights = sorted(
        path for path in folder.glob("last_good_step_*.safetensors") if can_open_inside_folder(folder, path)
    )
    page = render_page(
        "guard_page.html",
        scripts=("page.js",) if heat else (),
        name=folder.resolve().name,
        state=state,
        state_color=color,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        figures=_build_figures(events, starts),
        starts=_build_all_guard_timelines(events, starts),
        rows_open=rows[:_NUM_VISIBLE_ROWS],
        rows_more=rows[_NUM_VISIBLE_ROWS:],
        earlier=max(0, len(events) - _MAX_EVENTS),
        notes=notes,
        heat=heat,
        weights=[(path.name, f"{path.stat().st_size / 2**20:.3g} MiB") for path in weights],
        any_bundle=next((row.bundle for row in rows if row.bundle), ""),
        script=next((str(start["script"]) for start in reversed(starts) if start.get("script")), ""),
    )
    return write_page(folder / "report.html", page, allow_stream=False)


def _build_figures(events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> list[HeadlineFigure]:
    have_all_ended = bool(starts) and all(start.get("ended") is True for start in starts)
    # Counts of a start that did not end are as of its last write.
    caveat = "" if have_all_ended else "as of the last write"
    num_taken, lost = (sum(_to_count(start.get(name)) for start in starts) for name in ("taken", "lost"))
    event_counts = Counter(sample for event in events for sample in _to_strings(event.get("sample_ids")))
    # Row numbers are not names: they mean different samples in different micro-batches.
    named = {sample: count for sample, count in event_counts.items() if is_sample_name(sample)}
    worst = max(named, key=lambda sample: named[sample], default="")
    most_frequent = f"most often {worst} ({named[worst]}x)" if worst else ""
    unnamed = len(event_counts) - len(named)
    rows = f"and {unnamed} without a name" if unnamed else ""
    # Each fallback is an event, and guard.json lists what was off at its last write: take both.
    switched_off = {name for start in starts for name in _to_strings(start.get("switched_off"))}
    for event in events:
        if event.get("action") == "fallback":
            switched_off.add(str(get_diagnosis(event).get("switch", "")))
    switched_off.discard("")
    share = f"{100 * lost / (num_taken + lost):.1f}% of {num_taken + lost:,}" if lost else ""
    return [
        HeadlineFigure("Steps taken", f"{num_taken:,}" if starts else NO_VALUE, caveat),
        HeadlineFigure("Steps skipped", f"{lost:,}" if starts else NO_VALUE, share),
        HeadlineFigure("Bad samples", f"{len(named):,}", "; ".join(filter(None, (most_frequent, rows)))),
        HeadlineFigure(
            "Switched off", f"{len(switched_off):,}", ", ".join(sorted(switched_off)) or "no kernels or backends"
        ),
    ]


def _build_all_guard_timelines(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[GuardTimelines]:
    """Reports on the known guards, and an extra one for events that none of them has written."""
    entries = [_build_guard_timelines(entry, [e for e in events if e.get("guard") == entry["id"]]) for entry in starts]
    # guard.json may be missing or damaged while events.jsonl is complete.
    guard_ids = {str(entry["id"]) for entry in starts}
    unmatched_events = [entry for entry in events if str(entry.get("guard")) not in guard_ids]
    if unmatched_events:
        entries.append(_build_guard_timelines({}, unmatched_events))
    return entries


def _build_guard_timelines(facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> GuardTimelines:
    event_steps = [_to_count(event.get("step")) for event in events]
    # The lane's right end. At least 1, because positions are divided by it.
    steps = max([_to_count(facts.get("taken")) + _to_count(facts.get("lost")), *event_steps, 1])
    # In order of first appearance.
    causes = dict.fromkeys(_describe_cause(event) for event in events)
    lanes = [
        _build_timeline_lane(cause, [e for e in events if _describe_cause(e) == cause], steps) for cause in causes
    ]
    # Events may exist without an entry in guard.json, if that file is missing or damaged.
    title = str(facts.get("started", "")) or "Events of a guard that is not in guard.json"
    if not facts:
        return GuardTimelines(title, [], steps, lanes)
    ranks = _to_count(facts.get("ranks"))
    parts = [str(facts.get(name, "")) for name in ("script", "loop", "device")]
    if ranks > 1:
        parts.append(f"{ranks} processes")
    rows = [("Loop", ", ".join(filter(None, parts)))]
    models = facts.get("models")
    for model in map(ensure_dict, models if isinstance(models, list) else []):
        numbers = f"{_to_count(model.get('trained')):,} of {_to_count(model.get('parameters')):,} trained"
        dtypes = format_value(model.get("dtypes"))
        rows.append(("Model", f"{model.get('name')}: {numbers}" + (f", in {dtypes}" if dtypes else "")))
    ending = "" if facts.get("ended") is True else "; its end is not recorded"
    rows += [
        ("Optimizers", format_value(facts.get("optimizers"))),
        ("Checks", format_value(facts.get("checks"))),
        ("Steps", f"{_to_count(facts.get('taken')):,} taken, {_to_count(facts.get('lost')):,} skipped{ending}"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in ensure_dict(facts.get("versions")).items())),
        ("Settings", format_value(ensure_dict(facts.get("settings")))),
    ]
    return GuardTimelines(title, [(name, text) for name, text in rows if text], steps, lanes)


def _build_timeline_lane(cause: str, events: Sequence[Mapping[str, Any]], steps: int) -> TimelineLane:
    # Combine events at the same position in one mark: overlapping marks would show no more.
    # Events by position, an integer from 0 to the number of ticks.
    events_by_position: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        position = round(_NUM_TICKS * _to_count(event.get("step")) / steps)
        events_by_position.setdefault(min(position, _NUM_TICKS), []).append(event)
    ticks = []
    for position, position_events in sorted(events_by_position.items()):
        # A stop colours the mark even if others share the position.
        stops = any(event.get("action") == "stop" for event in position_events)
        more = f" and {len(position_events) - 1} more" if len(position_events) > 1 else ""
        text = f"step {position_events[0].get('step')}: {position_events[0].get('action')}{more}"
        ticks.append(TimelineMark(100 * position / _NUM_TICKS, "reject" if stops else "warn", text))
    return TimelineLane(cause, len(events), ticks)


def _group_equal_events(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group guard events with the same message, since a bad sample costs a step in each epoch."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for event in events:
        message = str(get_diagnosis(event).get("words"))
        # Same guard, cause, action, message and samples.
        key = (event.get("guard"), _describe_cause(event), event.get("action"), message)
        groups.setdefault((*map(str, key), *_to_strings(event.get("sample_ids"))), []).append(event)
    return list(groups.values())


def _build_row(group: Sequence[Mapping[str, Any]], folder: Path) -> Row:
    event = group[0]
    diagnosis = get_diagnosis(event)
    bundle = str(event.get("bundle", ""))
    # The file may be untrusted, so only a valid bundle path becomes a link.
    is_there = _BUNDLE_PATH.fullmatch(bundle) and can_open_inside_folder(folder, folder / bundle / "bundle.json")
    return Row(
        repeats=f"and {len(group) - 1:,} more, to step {group[-1].get('step')}" if len(group) > 1 else "",
        cause=_describe_cause(event),
        module=format_value(diagnosis.get("module")),
        op=format_value(diagnosis.get("op")),
        samples=", ".join(_to_strings(event.get("sample_ids"))),
        bundle=bundle if is_there else "",
        event=build_event_row(event, _ACTION_TEXTS),
    )


def _describe_cause(event: Mapping[str, Any]) -> str:
    cause = get_diagnosis(event).get("cause", "unknown")
    # Events that are only reported, such as spikes, have a kind but no cause.
    named = event.get("kind", cause) if cause == "unknown" else cause
    return format_event_kind(str(named))


def _to_strings(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _to_count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
