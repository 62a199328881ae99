"""The folder of a guard in any loop as one self-contained page: models watched, steps failed, and actions taken."""

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
"""Rows of the table that are open; the others are in a fold."""
_MOST = 1000
"""Events of the table, the last ones; events.jsonl has all."""
_ACTIONS = {
    "skip": "left the step out",
    "fallback": "switched it off from here on, and left the step out",
    "rollback": "put an earlier snapshot of weights and optimizer back",
    "stop": "stopped the loop",
}
_PLACE = re.compile(r"bundles/[\w.-]+")
_TICKS = 400
"""Places on a lane that can be told apart."""


@dataclass(frozen=True)
class Row:
    """One event, and those that say the same of the same samples, for the table."""

    step: str
    again: str
    """Words on how often it came again; empty where it did not."""
    cause: str
    words: str
    module: str
    op: str
    samples: str
    action: str
    bundle: str
    """Path of the bundle's folder below the page's; empty where there is none."""
    told: EventRow


@dataclass(frozen=True)
class Tick:
    """A place on a lane, in percent, with the color's class and words."""

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
    """The last step that is known."""
    lanes: Sequence[Lane]


def is_guard_folder(folder: Path) -> bool:
    """Return True for a folder that a guard of a loop that is not ours writes to, and no run of ours."""
    is_run = (folder / "config.yaml").exists()
    return not is_run and any((folder / name).exists() for name in (NAME, "events.jsonl"))


def write_guard_report(folder: Path) -> Path:
    """Write `folder/report.html` in one rename, from what is in the folder; raises `DitLoraError` if it cannot be."""
    clean = redactor()
    events, torn = read_lines(folder / "events.jsonl")
    events, starts = clean(events), clean(starts_in(folder))
    rows = [_row(alike, folder) for alike in _alike(events[-_MOST:])]
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
        script=next((str(one["script"]) for one in reversed(starts) if one.get("script")), ""),
    )
    return write_page(folder / "report.html", page, allow_stream=False)


def _state(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return how the last start ended, as far as the folder says, and the class of its color."""
    if events and events[-1].get("action") == "stop":
        return "stopped by the guard", "reject"
    if not starts or not starts[-1].get("ended"):
        return "running, or ended without a word", "warn"
    return "ended", "ok"


def _figures(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[Figure]:
    whole = bool(starts) and all(one.get("ended") is True for one in starts)
    known = "" if whole else "as far as known"
    taken, lost = (sum(_count(one.get(name)) for one in starts) for name in ("taken", "lost"))
    blamed: dict[str, int] = {}
    for event in events:
        for sample in _listed(event.get("sample_ids")):
            blamed[sample] = blamed.get(sample, 0) + 1
    named = {sample: count for sample, count in blamed.items() if is_sample_name(sample)}
    worst = max(named, key=lambda sample: named[sample], default="")
    most = f"most often {worst} ({named[worst]}x)" if worst else ""
    unnamed = len(blamed) - len(named)
    rows = f"and {unnamed} not named" if unnamed else ""
    off = sorted(_switched_off(events, starts))
    return [
        Figure("Steps taken", f"{taken:,}" if starts else NONE, known),
        Figure("Steps not taken", f"{lost:,}" if starts else NONE, _share(lost, taken + lost)),
        Figure("Samples blamed", f"{len(named):,}", "; ".join(filter(None, (most, rows)))),
        Figure("Switched off", f"{len(off):,}", ", ".join(off) or "no kernel, no backend"),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}% of {whole:,}" if part and whole else ""


def _switched_off(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> set[str]:
    said = {str(mapping(one.get("verdict")).get("switch", "")) for one in events if _falls(one)}
    noted = {name for one in starts for name in _listed(one.get("switched_off"))}
    return (said | noted) - {""}


def _falls(event: Mapping[str, Any]) -> bool:
    return event.get("action") == "fallback"


def _starts(
    events: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[Start]:
    """Return the guards that are known, and one more for events that none of them has written."""
    known = {str(one["id"]) for one in starts}
    loose = [one for one in events if str(one.get("guard")) not in known]
    told = [_start(one, [e for e in events if e.get("guard") == one["id"]]) for one in starts]
    return [*told, *([_start({}, loose)] if loose else [])]


def _start(facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Start:
    seen = [_count(event.get("step")) for event in events]
    steps = max([_count(facts.get("taken")) + _count(facts.get("lost")), *seen, 1])
    causes = dict.fromkeys(_cause(event) for event in events)
    lanes = [_lane(cause, [e for e in events if _cause(e) == cause], steps) for cause in causes]
    models = facts.get("models")
    rows = [
        ("Loop", _loop(facts)),
        *(("Model", _model(mapping(one))) for one in (models if isinstance(models, list) else [])),
        ("Optimizers", in_words(facts.get("optimizers"))),
        ("Checks", in_words(facts.get("checks"))),
        ("Steps", _steps(facts)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in mapping(facts.get("versions")).items())),
        ("Settings", in_words(mapping(facts.get("settings")))),
    ]
    title = str(facts.get("started", "")) or "of a start that guard.json does not know"
    return Start(title, [(name, words) for name, words in rows if words], steps, lanes)


def _loop(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    ranks = _count(facts.get("ranks"))
    words = [str(facts.get("script", "")), str(facts.get("loop", "")), str(facts.get("device", ""))]
    return ", ".join([*filter(None, words), *([f"{ranks} processes"] if ranks > 1 else [])])


def _model(model: Mapping[str, Any]) -> str:
    dtypes = in_words(model.get("dtypes"))
    numbers = f"{_count(model.get('trained')):,} of {_count(model.get('parameters')):,} trained"
    return f"{model.get('name')}: {numbers}" + (f", in {dtypes}" if dtypes else "")


def _steps(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    how = "" if facts.get("ended") is True else "; it has not said that it ended"
    return f"{_count(facts.get('taken')):,} taken, {_count(facts.get('lost')):,} not{how}"


def _lane(cause: str, events: Sequence[Mapping[str, Any]], steps: int) -> Lane:
    # Several events of one place are one tick: a page of a thousand marks on top of each other shows no more.
    at: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        place = round(_TICKS * _count(event.get("step")) / steps)
        at.setdefault(min(place, _TICKS), []).append(event)
    ticks = []
    for place, here in sorted(at.items()):
        stops = any(one.get("action") == "stop" for one in here)
        first, more = here[0], f" and {len(here) - 1} more" if len(here) > 1 else ""
        words = f"step {first.get('step')}: {first.get('action')}{more}"
        ticks.append(Tick(100 * place / _TICKS, "reject" if stops else "warn", words))
    return Lane(cause, len(events), ticks)


def _alike(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return events in groups that say the same: a bad sample costs a step in each epoch."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for event in events:
        words = str(mapping(event.get("verdict")).get("words"))
        same = (event.get("guard"), _cause(event), event.get("action"), words)
        groups.setdefault((*map(str, same), *_listed(event.get("sample_ids"))), []).append(event)
    return list(groups.values())


def _row(alike: Sequence[Mapping[str, Any]], folder: Path) -> Row:
    event = alike[0]
    verdict, told = mapping(event.get("verdict")), event_row(event, _ACTIONS)
    bundle = str(event.get("bundle", ""))
    # Nothing that a stranger wrote becomes an address.
    is_there = _PLACE.fullmatch(bundle) and is_inside(folder, folder / bundle / "bundle.json")
    return Row(
        step=told.step,
        again=f"{len(alike) - 1:,} more, to {alike[-1].get('step')}" if len(alike) > 1 else "",
        cause=_cause(event),
        words=told.words,
        module=in_words(verdict.get("module")),
        op=in_words(verdict.get("op")),
        samples=", ".join(_listed(event.get("sample_ids"))),
        action=told.action,
        bundle=bundle if is_there else "",
        told=told,
    )


def _notes(starts: Sequence[Mapping[str, Any]], torn: int) -> list[str]:
    notes = [] if starts else [f"{NAME} is not there or torn: what was watched is not known."]
    return notes + ([f"{torn} torn lines of events.jsonl are left out."] if torn else [])


def _modules(folder: Path) -> ModuleHistory:
    """Return the statistics of the last guard that has any."""
    history = ModuleHistory()
    lines, _ = read_lines(folder / STATISTICS)
    for line in lines:
        if line.get("guard") == lines[-1].get("guard"):
            history.add(_count(line.get("step")), mapping(line.get("modules")))
    return history


def _weights(folder: Path) -> list[tuple[str, str]]:
    """Return the files of last good weights, and their sizes in words."""
    found = sorted(
        path for path in folder.glob("last_good_step_*.safetensors") if is_inside(folder, path)
    )
    return [(path.name, f"{path.stat().st_size / 2**20:.3g} MiB") for path in found]


def _cause(event: Mapping[str, Any]) -> str:
    cause = mapping(event.get("verdict")).get("cause", "unknown")
    # What is only reported, as a spike is, has a kind rather than a cause.
    named = event.get("kind", cause) if cause == "unknown" else cause
    return str(named).replace("_", " ")


def _listed(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
