"""What a sweep found, as a table by place and kind, and every failure with the command that replays it."""

from collections.abc import Sequence

from benchmarks.verdicts.judge import QUESTIONS, Judgement

_HEAD = ("place", "kind", "faults", *QUESTIONS)


def table(judgements: Sequence[Judgement]) -> str:
    """One row a place and kind, with the number of faults that fail each question, and the sums."""
    pairs = sorted({(judgement.place, judgement.kind) for judgement in judgements})
    rows = [_row(*pair, [j for j in judgements if (j.place, j.kind) == pair]) for pair in pairs]
    rows.append(_row("all", "", judgements))
    widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
    lines = []
    for row in [_HEAD, *rows]:
        # Place and kind are text, the others are counts.
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(place_name: str, kind: str, judgements: Sequence[Judgement]) -> tuple[str, ...]:
    num_failures = [sum(question in judgement.failures for judgement in judgements) for question in QUESTIONS]
    return (
        place_name,
        kind,
        str(len(judgements)),
        *(str(count) if count else "." for count in num_failures),
    )


def failures(judgements: Sequence[Judgement], command: str) -> str:
    """Every fault that fails a question, in full, with the command that repeats only this fault."""
    parts = []
    for judgement in sorted(judgements, key=lambda judgement: judgement.name):
        if not judgement.failures:
            continue
        parts.append(f"{judgement.name}, {judgement.when}")
        parts += [f"    {question}: {answer}" for question, answer in judgement.failures.items()]
        events = "; ".join(judgement.told[:8]) or "none"
        parts.append(f"    exit {judgement.exit_code}, certified {judgement.certified}, events: {events}")
        parts.append(f"    {command} --only {judgement.name[:3]}")
    return "\n".join(parts)
