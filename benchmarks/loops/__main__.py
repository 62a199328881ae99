"""`python -m benchmarks.loops run` checks the corpus of loops; `compose` draws further loops and checks those."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tqdm import tqdm

from benchmarks.loops.composer.compose import compose_loops
from benchmarks.loops.driver import Driver, Selection, select, select_share
from benchmarks.loops.loop_file import LoopFile, find_loops
from benchmarks.loops.processes import RunResult, RunSpec
from benchmarks.loops.summary import describe_counts, describe_failures


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, run, and exit with 1 if a check failed."""
    options = _parse_options(argv)
    if options.command == "run":
        selections = _select(find_loops(options.only), options)
        sys.exit(_run(select_share(selections, options.share, options.healthy_share), options))
    with tempfile.TemporaryDirectory(prefix="loops_") as folder:
        loops = compose_loops(options.seed, options.count, options.keep or Path(folder))
        options.keep = None
        loops = [loop for loop in loops if fnmatch(loop.name, options.only)]
        sys.exit(_run(_select(loops, options), options))


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="check the loops of this folder")
    run.add_argument("--share", type=int, default=1, metavar="N", help="a fixed part of the faulty runs: 1 of N")
    run.add_argument("--healthy-share", type=int, default=1, metavar="N", help="1 of N of the loops without a fault")
    run.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what runs leave")
    compose = commands.add_parser("compose", help="draw loops by a seed, and check them")
    compose.add_argument("--seed", type=int, default=0)
    compose.add_argument("--count", type=int, default=200, metavar="N")
    compose.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the scripts")
    for command in (run, compose):
        command.add_argument("--only", default="*", metavar="GLOB", help="loops by name: 'plain/*'")
        command.add_argument("--fault", default="*", metavar="GLOB", help="`healthy` for none")
        command.add_argument("--guard", default="*", metavar="GLOB", help="command, watch, ...")
        command.add_argument("--jobs", type=int, default=2, help="processes at a time")
        command.add_argument("--json", type=Path, metavar="FILE", help="write every row")
        command.add_argument("--show", action="store_true", help="print what each run prints")
    return parser.parse_args(argv)


def _select(loops: Sequence[LoopFile], options: argparse.Namespace) -> list[Selection]:
    return select(
        loops,
        lambda fault: fnmatch(fault, options.fault),
        lambda guard: fnmatch(guard, options.guard),
    )


def _run(selections: Sequence[Selection], options: argparse.Namespace) -> int:
    """Run the selections with a progress bar, print the result, and return the exit code."""
    # The bar's own thread would be lost in forked processes, with what it has locked.
    tqdm.monitor_interval = 0
    bar = tqdm(total=sum(item.num_runs for item in selections), unit="run", disable=options.show)
    num_runs = 0

    def report(spec: RunSpec, result: RunResult) -> None:
        nonlocal num_runs
        num_runs += 1
        bar.set_postfix_str(spec.loop.name, refresh=False)
        bar.update()
        if options.show:
            print(describe_run(spec, result))

    driver = Driver(num_jobs=options.jobs, on_run=report, keep=options.keep)
    started, code = time.monotonic(), 0
    try:
        driver.run(selections)
    except KeyboardInterrupt:
        code = 130
    bar.close()
    rows = driver.rows
    num_failed = sum(not row.is_ok for row in rows)
    totals = f"{len(selections)} loops, {num_runs} runs, {len(rows)} checks, {num_failed} failed"
    parts = [describe_failures(rows), describe_counts(rows)]
    print("\n".join(part for part in parts if part))
    print(f"{totals}, {time.monotonic() - started:.0f} s{' (interrupted)' if code else ''}")
    if options.json:
        options.json.write_text(json.dumps([row.as_record() for row in rows], indent=1))
    return code or int(num_failed > 0)


def describe_run(spec: RunSpec, result: RunResult) -> str:
    """All that a run printed and planted, for `--show`."""
    head = f"=== {spec.loop.name} | {spec.fault or 'healthy'} | {spec.guard or 'no guard'}"
    planted = [json.dumps(note) for note in result.planted]
    events = [json.dumps(event)[:1000] for event in result.events]
    files = [
        f"{name}: {'not finite: ' + ', '.join(file.nonfinite[:4]) if file.nonfinite else 'finite'}"
        for name, file in result.files.items()
    ]
    parts = [result.stdout, result.stderr, *planted, *events, *files]
    lines = [head, f"exit code {result.exit_code}, {result.seconds:.2f} s", *parts]
    return "\n".join(line.rstrip() for line in lines if line)


if __name__ == "__main__":
    main()
