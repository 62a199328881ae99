"""Compare the cause that the guard names with the one that was planted."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Naming = Literal["named", "unknown", "wrong"]
_INDEX = re.compile(r"dataset index (\d+)(?!\d)")
_ALTERNATIVES = re.compile(r"dataset index \d+[^,;:]*?(?: or dataset index \d+[^,;:]*?)+(?=[,;:]|$)")
_ROW = re.compile(r"(?:row|sample) (\d+) of (?:the batch|micro-batch|the micro-batch|call)")
_NUMBERED_ROW = re.compile(r"(row|sample) \d+ of ")
_GUARD_LINE = re.compile(r"(^|\W)guard: ")
_MAX_GRADIENTS = 20
"""An event has no more names of gradients than these."""
_OWN_NAME = re.compile(r"[A-Z]|optimizer\.")
_WATCHING = re.compile(r"guard: watching ")
_LOOPS_OWN_LOSS = re.compile(r"loss.*\b(own|loop|script|outside)|\b(own|loop|script).*loss", re.I)
_EMPTY = re.compile(r"\bempty\b|\b(no|0|zero|without) (rows?|samples?|elements?|values?)", re.I)
_OF_STATE = {"weights", "optimizer", "learning_rate"}
_OF_DATA = {"data", "labels", "inputs"}
_OF_DEVICE = {"kernel", "attention_backend", "rank"}
# Causes, as `verdict.cause` of an event, that contradict what was planted.
_CONTRADICTIONS = {
    "sample": {*_OF_STATE, *_OF_DEVICE, "transient", "precision", "loss"},
    "target": {"weights", "learning_rate", *_OF_DEVICE, "transient"},
    "gradient": {*_OF_DATA, *_OF_STATE, *_OF_DEVICE, "loss"},
    "moment": {*_OF_DATA, *_OF_DEVICE, "weights", "learning_rate", "loss"},
    "weight": {*_OF_DATA, *_OF_DEVICE, "optimizer", "learning_rate", "loss"},
    "loss": {*_OF_DATA, *_OF_STATE, *_OF_DEVICE, "precision"},
    "state": {*_OF_DATA, *_OF_STATE, *_OF_DEVICE, "loss"},
    "empty": {*_OF_STATE, *_OF_DEVICE},
    "oom": set(),
}


@dataclass(frozen=True)
class GuardReport:
    """What the guard said about a run: its events, and its messages on stderr."""

    events: Sequence[Mapping[str, Any]]
    messages: Sequence[str]
    """Each with the lines that belong to it, joined by a space."""


def guard_messages(stderr: str) -> list[str]:
    """The guard's messages: lines with `guard:`, each with the indented lines that follow it."""
    messages: list[str] = []
    is_open = False
    for line in stderr.splitlines():
        if _GUARD_LINE.search(line):
            messages.append(line.strip())
            is_open = True
        elif is_open and line.startswith("  "):
            messages[-1] += f" {line.strip()}"
        else:
            is_open = False
    return messages


def is_watching_message(message: str) -> bool:
    """True for the line that lists the guarded optimizers; healthy runs have it too."""
    return _WATCHING.search(message) is not None


def compare_causes(
    planted: Sequence[Mapping[str, Any]],
    report: GuardReport,
    spreads: Sequence[str] = (),
    bad_rows: Collection[int] = (),
) -> tuple[Naming, str]:
    """Say whether the planted cause was named, nothing was, or something else, and why.

    Args:
        planted: Notes of `plant`: kind, and index or name.
        report: What the guard said.
        spreads: Words for what the fault spoils in the loop itself; a message that has one of them is right.
        bad_rows: Rows of the models' inputs that are not finite; empty if that is not known.
    """
    indices = {note["index"] for note in planted if "index" in note}
    problem = _wrong_indices(indices, report) or _wrong_ids(indices, report)
    problem = problem or _wrong_rows(bad_rows, report) or _wrong_gradients(planted, report)
    for event in report.events:
        problem = problem or _contradiction(event, planted, spreads)
    if problem:
        return "wrong", problem
    named_notes = [note for note in planted if is_named(note, report)]
    if named_notes:
        return "named", f"names {_describe(named_notes[0])}"
    if not report.events and not report.messages:
        return "unknown", "the guard said nothing"
    return "unknown", f"does not name {_describe(planted[0]) if planted else 'anything'}"


def _describe(note: Mapping[str, Any]) -> str:
    facts = [f"{key} {value}" for key, value in note.items() if key != "planted"]
    return " ".join([str(note["planted"]), *facts])


def event_texts(event: Mapping[str, Any]) -> list[str]:
    """Sample ids and words of an event; keys of an older and a newer form are read."""
    details = event.get("verdict") or event.get("diagnosis") or {}
    evidence = details.get("evidence") or {}
    messages = [details.get("words"), details.get("message"), event.get("message")]
    lists = [value for value in evidence.values() if isinstance(value, list)]
    strings = [str(part) for value in lists for part in value]
    return [
        *map(str, event.get("sample_ids") or ()),
        *(message for message in messages if message),
        *strings,
    ]


def _texts(report: GuardReport) -> Iterable[str]:
    for event in report.events:
        yield from event_texts(event)
    yield from (message for message in report.messages if not is_watching_message(message))


def _wrong_indices(planted: set[int], report: GuardReport) -> str:
    for text in _texts(report):
        remaining = text
        # "dataset index 3 or dataset index 7" is right if one of them is.
        for match in _ALTERNATIVES.finditer(text):
            if planted & set(map(int, _INDEX.findall(match[0]))):
                remaining = remaining.replace(match[0], "")
        strangers = sorted(set(map(int, _INDEX.findall(remaining))) - planted)
        if strangers:
            expected = f"planted: {sorted(planted)}" if planted else "no sample was planted"
            return f"names dataset index {strangers[0]} ({expected}): {text[:200]}"
    return ""


def _wrong_ids(planted: set[int], report: GuardReport) -> str:
    """Samples under any name where no sample is bad, or under a name that has not the planted number in it."""
    for event in report.events:
        for sample in map(str, event.get("sample_ids") or ()):
            if not planted:
                return f"names {sample}, but no sample was planted: {event_texts(event)[-1][:200]}"
            numbers = set(map(int, re.findall(r"\d+", sample)))
            if not _NUMBERED_ROW.match(sample) and not numbers & planted:
                return f"names {sample} (planted: {sorted(planted)})"
    return ""


def _wrong_rows(bad_rows: Collection[int], report: GuardReport) -> str:
    """Rows that are named by their number, where other rows are bad."""
    for text in _texts(report):
        for number in map(int, _ROW.findall(text)):
            if bad_rows and number not in bad_rows:
                return f"names row {number} (bad: {sorted(bad_rows)}): {text[:200]}"
    return ""


def _wrong_gradients(planted: Sequence[Mapping[str, Any]], report: GuardReport) -> str:
    """Describe a gradient that the guard names as bad although another one was planted; empty if there is none."""
    names = [note["name"] for note in planted if note["planted"] == "gradient"]
    for event in report.events:
        gradients = [str(gradient) for gradient in _bad_gradients(event)]
        # The guard has names of its own, `Embedding_2.weight`, where the loop's parameters are in several modules.
        is_complete = len(gradients) < _MAX_GRADIENTS and not any(map(_OWN_NAME.match, gradients))
        is_right = any(
            has_name(gradient, name) or has_name(name, gradient) for gradient in gradients for name in names
        )
        if names and gradients and is_complete and not is_right:
            return f"names the gradient of {gradients[0]} (planted: {names[0]})"
    return ""


def _bad_gradients(event: Mapping[str, Any]) -> Sequence[Any]:
    details = event.get("verdict") or event.get("diagnosis") or {}
    return (details.get("evidence") or {}).get("gradients") or ()


def _contradiction(event: Mapping[str, Any], planted: Sequence[Mapping[str, Any]], spreads: Sequence[str]) -> str:
    """Why an event's cause cannot be right; empty if it can."""
    details = event.get("verdict") or event.get("diagnosis") or {}
    cause = details.get("cause") or event.get("cause")
    text = " ".join(event_texts(event))
    if any(word in text for word in spreads):
        return ""
    for note in planted:
        # A bad moment makes its own weight bad: that is true, if not the cause.
        if note["planted"] in ("moment", "state") and has_name(text, note["name"]):
            return ""
    kinds = [str(note["planted"]) for note in planted if note["planted"] != "oom"]
    if kinds and all(cause in _CONTRADICTIONS[kind] for kind in kinds):
        return f"says {cause}, planted: {_describe(planted[0])}: {text[:200]}"
    return ""


def has_name(text: str, name: str) -> bool:
    """True if a tensor's name is in the text, perhaps with the name of a wrapper before it."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def is_named(note: Mapping[str, Any], report: GuardReport) -> bool:
    """True if an event or a message names what was planted."""
    texts = list(_texts(report))
    kind = note["planted"]
    if kind in ("sample", "target"):
        return any(note["index"] in map(int, _INDEX.findall(text)) for text in texts) or any(
            note["index"] in map(int, re.findall(r"\d+", str(sample)))
            for event in report.events
            for sample in event.get("sample_ids") or ()
            if not _NUMBERED_ROW.match(str(sample))
        )
    if kind == "loss":
        return any(_LOOPS_OWN_LOSS.search(text) for text in texts)
    if kind == "empty":
        return any(_EMPTY.search(text) for text in texts)
    if kind == "oom":
        return False
    texts = [text for text in texts if has_name(text, note["name"])]
    if kind == "gradient":
        return any("gradient" in text for text in texts) or _has_bad_gradient(note["name"], report)
    if kind == "moment":
        return any(note["state"] in text or "moment" in text for text in texts)
    return bool(texts)


def _has_bad_gradient(name: str, report: GuardReport) -> bool:
    return any(has_name(str(gradient), name) for event in report.events for gradient in _bad_gradients(event))
