"""The checks of one run with the guard against the same run without it; each gives a row with a reason."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.loops.causes import (
    GuardReport,
    Naming,
    compare_causes,
    guard_messages,
    has_name,
    is_watching_message,
)
from benchmarks.loops.loop_file import LoopFile
from benchmarks.loops.processes import RunResult, RunSpec

_COMPOSED = re.compile(r"composed/seed_(\d+)_(\d+)")
_ABOUT_A_SAVE = re.compile(r"sav|writ|wrote|file|checkpoint|dump", re.I)
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|error)\b")
_TIME_OF_DAY = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+\]")
_DURATION = re.compile(r"_runtime|_per_second")
_NOT_FINITE = re.compile(r"\bnan\b|\binf\b|finite", re.I)


@dataclass(frozen=True)
class Row:
    """One check of one run."""

    loop: str
    fault: str
    guard: str
    check: str
    is_ok: bool
    reason: str = ""
    naming: Naming | None = None
    """Whether the planted cause was named; of the check `names`."""
    seconds: float = 0.0

    def as_record(self) -> dict[str, Any]:
        """The row as plain values, with the command that repeats it."""
        return {**asdict(self), "command": self.command}

    @property
    def command(self) -> str:
        command = "run"
        if composed := _COMPOSED.fullmatch(self.loop):
            seed, number = map(int, composed.groups())
            command = f"compose --seed {seed} --count {number + 1}"
        options = f"--only '{self.loop}' --fault {self.fault or 'healthy'} --show"
        return f"python -m benchmarks.loops {command} {options}"


def _row(spec: RunSpec, result: RunResult, check: str, problem: str, **more: Any) -> Row:
    reason = more.pop("reason", "")
    return Row(
        spec.loop.name,
        spec.fault,
        spec.guard,
        check,
        not problem,
        problem or reason,
        seconds=round(result.seconds, 3),
        **more,
    )


def check_bare(spec: RunSpec, result: RunResult) -> list[Row]:
    """Check a run without the guard: the corpus itself is right if a fault does what its name says."""
    if result.has_timed_out:
        return [_row(spec, result, "corpus", "the run without the guard timed out")]
    bad = [f"{name}: {', '.join(tensors[:3])}" for name, tensors in _bad_tensors(result, spec.loop.infinite).items()]
    broken = [f"{name}: {file.problem}" for name, file in result.files.items() if file.problem]
    is_known = not spec.fault or "*" not in spec.loop.survives
    survives = not spec.fault or spec.fault in spec.loop.survives
    problem = ""
    if broken and is_known:
        problem = f"cannot read {broken[0]}"
    elif not result.files and is_known:
        problem = "it writes no file"
    elif spec.fault and not result.planted:
        problem = "the fault was not planted"
    elif not is_known:
        problem = ""
    elif survives and result.exit_code:
        problem = f"exit code {result.exit_code}: {_last_line(result.stderr)}"
    elif survives and bad:
        problem = f"not finite: {bad[0]}"
    elif not survives and not result.exit_code and not bad:
        problem = "the fault has no effect: exit code 0 and every file is finite (add it to SURVIVES)"
    return [_row(spec, result, "corpus", problem)]


def check_healthy(spec: RunSpec, bare: RunResult, guarded: RunResult) -> list[Row]:
    """Check that a healthy run is the same with the guard."""
    messages = [m for m in guard_messages(guarded.stderr) if not is_watching_message(m)]
    problems = {
        "exit code": _exit_problem(bare, guarded),
        "stdout": _stdout_difference(bare, guarded),
        "files": _files_difference(spec.loop, bare, guarded),
        "events": f"event: {guarded.events[0]}"[:300] if guarded.events else "",
        "messages": f"says: {messages[0]}"[:300] if messages else "",
    }
    return [_row(spec, guarded, check, problem) for check, problem in problems.items()]


def check_faulty(spec: RunSpec, bare: RunResult, guarded: RunResult) -> list[Row]:
    """Check that a run with a fault ends no worse with the guard, and that what it says is right."""
    report = GuardReport(guarded.events, guard_messages(guarded.stderr))
    notes = guarded.planted or bare.planted
    planted = [note for number, note in enumerate(notes) if note not in notes[:number]]
    naming, reason = compare_causes(planted, report, spec.loop.spreads, bare.bad_rows)
    problems = {
        "exit code": _exit_problem(bare, guarded) if not bare.exit_code else "",
        "file names": _names_difference(bare, guarded),
        "weights": _spoiled_by_guard(bare, guarded),
        "silent files": _silent_file(guarded, report.messages, spec.loop.infinite),
    }
    if guarded.has_timed_out:
        problems["exit code"] = "timed out"
    rows = [_row(spec, guarded, check, problem) for check, problem in problems.items()]
    problem = reason if naming == "wrong" else ""
    return [*rows, _row(spec, guarded, "names", problem, reason=reason, naming=naming)]


def _last_line(text: str) -> str:
    """The line that says why a process ended: the last error's, or the last line."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1][:300]


def _exit_problem(bare: RunResult, guarded: RunResult) -> str:
    if guarded.has_timed_out:
        return "timed out"
    if guarded.exit_code == bare.exit_code:
        return ""
    codes = f"exit code {guarded.exit_code}, without the guard {bare.exit_code}"
    return f"{codes}: {_last_line(guarded.stderr)}"


def _stdout_lines(result: RunResult) -> list[str]:
    """Lines of stdout, without times of the day, and without lines that say how long something took."""
    lines = (_TIME_OF_DAY.sub("", line) for line in result.stdout.splitlines())
    return [line for line in lines if not _DURATION.search(line)]


def _stdout_difference(bare: RunResult, guarded: RunResult) -> str:
    bare_lines, guarded_lines = _stdout_lines(bare), _stdout_lines(guarded)
    pairs = zip(bare_lines, guarded_lines, strict=False)
    for number, (bare_line, guarded_line) in enumerate(pairs):
        if bare_line != guarded_line:
            return f"line {number + 1} of stdout is {guarded_line[:100]!r}, without the guard {bare_line[:100]!r}"
    if len(bare_lines) == len(guarded_lines):
        return ""
    return f"stdout has {len(guarded_lines)} lines, without the guard {len(bare_lines)}"


def _names_difference(bare: RunResult, guarded: RunResult) -> str:
    missing = sorted(set(bare.files) - set(guarded.files))
    if missing:
        return f"not written: {', '.join(missing)}"
    # A script that fails by itself may well get further with the guard.
    extra_files = sorted(set(guarded.files) - set(bare.files)) if not bare.exit_code else []
    return f"written with the guard only: {', '.join(extra_files)}" if extra_files else ""


def _files_difference(loop: LoopFile, bare: RunResult, guarded: RunResult) -> str:
    if difference := _names_difference(bare, guarded):
        return difference
    for name, file in bare.files.items():
        guarded_file = guarded.files[name]
        if not loop.varies_in(name) and not file.equals(guarded_file):
            keys = [
                key
                for key in sorted({*file.leaves, *guarded_file.leaves})
                if file.leaves.get(key) != guarded_file.leaves.get(key)
            ]
            return f"{name} differs{f' in {keys[0]}' if keys else ''} {guarded_file.problem}".strip()
    return ""


def _bad_tensors(result: RunResult, infinite: Sequence[str]) -> dict[str, list[str]]:
    """Names of tensors that are not finite by no design of the loop, by file."""
    bad = {
        name: [tensor for tensor in file.nonfinite if tensor not in infinite] for name, file in result.files.items()
    }
    return {name: tensors for name, tensors in bad.items() if tensors}


def _spoiled_by_guard(bare: RunResult, guarded: RunResult) -> str:
    for name, file in bare.files.items():
        guarded_file = guarded.files.get(name)
        if guarded_file is None or file.problem:
            continue
        if guarded_file.problem:
            return f"{name} cannot be read: {guarded_file.problem}"
        spoiled = sorted(set(guarded_file.nonfinite) - set(file.nonfinite))
        if spoiled:
            return f"{name}: {spoiled[0]} is finite without the guard, and not with it"
    return ""


def _silent_file(guarded: RunResult, messages: Sequence[str], infinite: Sequence[str]) -> str:
    """A file that is not finite, and that no message names: neither the file, nor one of the bad tensors in it."""
    matching_messages = [message for message in messages if _NOT_FINITE.search(message)]
    for name, bad in _bad_tensors(guarded, infinite).items():
        if not any(_mentions(message, name, bad) for message in matching_messages):
            return f"{name} is not finite ({bad[0]}), and no message says so"
    return ""


def _mentions(message: str, file_name: str, tensors: Sequence[str]) -> bool:
    if has_name(message, file_name.rpartition("/")[2]):
        return True
    is_about_a_save = _ABOUT_A_SAVE.search(message) is not None
    # A tensor's path in the file is `model/0.weight`, say; in a message it may be `0.weight`.
    return is_about_a_save and any(has_name(message, t.rpartition("/")[2]) for t in tensors)
