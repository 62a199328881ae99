"""What a run of the corpus prints: a table of counts, and every failure with the command that repeats it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.loops.checks import Row


def count_outcomes(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """Counts of healthy runs that are equal or different, and of faulty ones, in total and by fault."""
    by_run: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.guard:
            by_run[row.loop, row.fault, row.guard].append(row)
    counts: dict[str, Counter[str]] = {"healthy": Counter(), "faulty": Counter()}
    for (_loop, fault, _guard), checks in by_run.items():
        if not fault:
            counts["healthy"]["equal" if all(row.is_ok for row in checks) else "different"] += 1
            continue
        naming = next(row.naming for row in checks if row.check == "names") or "unknown"
        failed = {row.check for row in checks if not row.is_ok}
        outcome = Counter({"runs": 1, naming: 1})
        outcome["worse"] = bool(failed & {"exit code", "file names", "weights"})
        outcome["silent files"] = "silent files" in failed
        counts["faulty"] += outcome
        counts.setdefault(fault, Counter())
        counts[fault] += outcome
    return counts


def describe_counts(rows: Sequence[Row]) -> str:
    """The table of counts, as lines of text."""
    counts = count_outcomes(rows)
    healthy, faulty = counts.pop("healthy"), counts.pop("faulty")
    columns = ("runs", "named", "unknown", "wrong", "worse", "silent files")
    lines = [f"healthy runs: {healthy['equal']} equal, {healthy['different']} different"]
    lines.append("".join(["fault".ljust(14), *(column.rjust(14) for column in columns)]))
    for fault, outcomes in [*sorted(counts.items()), ("all", faulty)]:
        lines.append("".join([fault.ljust(14), *(str(outcomes[column]).rjust(14) for column in columns)]))
    return "\n".join(lines)


def describe_failures(rows: Sequence[Row]) -> str:
    """Every check that failed, with its reason and the command that repeats it; one block per run."""
    blocks: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if not row.is_ok:
            blocks[row.loop, row.fault or "healthy", row.guard or "no guard"].append(row)
    lines = []
    for key, failures in blocks.items():
        lines.append(f"{' | '.join(key)}    {failures[0].command}")
        lines += [f"    {row.check}: {row.reason}" for row in failures]
    return "\n".join(lines)
