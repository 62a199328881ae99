"""Draw faults by a seed, put each into a tiny run, and ask whether anything innocent is lost.

    python -m benchmarks.verdicts --seed 0 [--faults 300] [--families sana-600m dit ...] [--places 'random loss' ...]
                                  [--ranks 1|2|4] [--jobs 2] [--only 017] [--json FILE] [--describe]

Each fault is one run of six steps, compared with the clean run of the same recipe. Exit code 1 if any fault fails
a question; each failure is listed with the command that repeats only this fault. Ctrl-C prints the results so far.
"""

import argparse
import fnmatch
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Before torch is imported: two threads on busy cores can be a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tqdm import tqdm

from benchmarks.faults.target_table import FAULT_TARGETS
from benchmarks.verdicts.cases import Drawn
from benchmarks.verdicts.draw import described, draw_faults
from benchmarks.verdicts.judge import QUESTIONS, Judgement
from benchmarks.verdicts.places import PLACES
from benchmarks.verdicts.sweep import Sweep
from benchmarks.verdicts.table import failures, table
from dit_lora.files import write_atomically

_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.describe:
        questions = [f"  {name:10} {question}" for name, question in QUESTIONS.items()]
        print("\n".join([described(), "", "asked of each:", *questions]))
        return 0
    ranks = (args.ranks,) if args.ranks else (1, 2)
    if unknown_places := sorted(set(args.places) - {*PLACES}):
        raise SystemExit(f"--places {', '.join(unknown_places)}: there are {', '.join(PLACES)}")
    faults = draw_faults(args.seed, args.faults, _variants(args.families), ranks, args.places)
    chosen = [fault for fault in faults if args.only is None or _is(fault, args.only)]
    if not chosen:
        raise SystemExit(f"no fault of this sweep is called {args.only!r}")
    if args.keep and Path(args.keep).exists() and any(Path(args.keep).iterdir()):
        raise SystemExit(f"--keep {args.keep}: that folder is not empty; name another")
    logging.getLogger("dit_lora").setLevel(logging.ERROR)
    began, judgements = time.monotonic(), list[Judgement]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        interrupted = _sweep(Sweep(Path(args.keep or folder), args.jobs), chosen, judgements)
    print(table(judgements))
    print(f"\n{len(judgements)} of {len(chosen)} faults, seed {args.seed}, ", end="")
    print(f"{time.monotonic() - began:.0f} s with {args.jobs} jobs")
    message = failures(judgements, _command(args))
    if message:
        print(f"\n{message}")
    if args.json:
        sums = {name: sum(name in judgement.failures for judgement in judgements) for name in QUESTIONS}
        record = {"seed": args.seed, "faults": [asdict(judgement) for judgement in judgements], "wrong": sums}
        write_atomically(Path(args.json), json.dumps(record, indent=1) + "\n")
    if interrupted:
        return _INTERRUPTED
    return 1 if message else 0


def _sweep(sweep: Sweep, faults: Sequence[Drawn], judgements: list[Judgement]) -> bool:
    """Judge them, into `judged`; whether it was interrupted."""
    variants = list(dict.fromkeys(fault.variant for fault in faults))
    try:
        list(tqdm(sweep.build(variants), total=len(variants), desc="tiny models", unit="model"))
        with tqdm(total=len(faults), desc="faults", unit="fault", smoothing=0.1) as bar:
            num_failures = 0
            for judgement in sweep.run(faults):
                judgements.append(judgement)
                num_failures += bool(judgement.failures)
                bar.set_postfix(wrong=num_failures, refresh=False)
                bar.update()
    except KeyboardInterrupt:
        return True
    return False


def _variants(requested_names: Sequence[str]) -> list[str]:
    """Tiny checkpoints by their own name or by their family's."""
    names = [
        v for v, targets in FAULT_TARGETS.items() if not requested_names or {v, targets.family} & set(requested_names)
    ]
    all_names = {*FAULT_TARGETS, *(targets.family for targets in FAULT_TARGETS.values())}
    if unknown := sorted(set(requested_names) - all_names):
        raise SystemExit(f"--families {' '.join(unknown)}: there are {', '.join(sorted(all_names))}")
    return names


def _is(fault: Drawn, name: str) -> bool:
    return name in (fault.name, f"{fault.number:03d}") or fnmatch.fnmatchcase(fault.name, name)


def _command(args: argparse.Namespace) -> str:
    parts = [f"python -m benchmarks.verdicts --seed {args.seed} --faults {args.faults}"]
    parts += [f"--families {' '.join(args.families)}"] if args.families else []
    parts += [f"--places {shlex.join(args.places)}"] if args.places else []
    parts += [f"--ranks {args.ranks}"] if args.ranks else []
    return " ".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--families", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--places", nargs="+", default=[], metavar="NAME", help="by default all")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), help="by default one and two")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", metavar="NAME", help="a fault's number, or a pattern of names")
    parser.add_argument("--json", metavar="FILE", help="write every judgement here")
    parser.add_argument("--keep", metavar="DIR", help="leave logs and tiny models here")
    parser.add_argument("--describe", action="store_true", help="say what is drawn, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
