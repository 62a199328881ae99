"""Every kernel against eager PyTorch, autocast, torch.compile and libraries, at the sizes of real models.

    python kernels/bench/bench.py [--op OP ...] [--shapes NAME ...] [--device cuda|cpu] [--out FOLDER]
                                  [--seconds-per-case S] [--budget S]

Needs torch and, on a GPU, Triton; nothing else. Prints a Markdown table and writes it, with rows as JSON lines,
to the folder. What the columns mean: README.md here. Exits with 1 if anything failed, after all else was measured.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks.machine
sys.path.insert(0, str(Path(__file__).parents[1]))  # dit_lora_kernels, where it is not installed

import cases
import report
import torch
from columns import FAILURES, Row, measure, rows_of
from shapes import SHAPES
from timing import Clock

HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if anything failed, 2 if it was not started."""
    args = _arguments(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _refuse("there is no CUDA device here; --device cpu runs the references")
    for kind, asked, names in (("op", args.op, cases.OPS), ("shape", args.shapes, (*SHAPES, "tiny"))):
        if unknown := [name for name in asked if name not in names]:
            return _refuse(f"no {kind} is called {', '.join(unknown)}; there are {', '.join(names)}")
    # Every op at its first shape, then each at its second, so that a short run has seen every op. One list an op, read
    # across: ops that a model lacks leave gaps, which zip_longest fills with None.
    columns = [[(op, name) for name in args.shapes if cases.applies(op, name)] for op in args.op]
    pairs = [pair for rank in itertools.zip_longest(*columns) for pair in rank if pair is not None]
    if not pairs:
        return _refuse(f"{', '.join(args.shapes)} has no {', '.join(args.op)}")
    run = _Run(Clock(device), args.seconds_per_case, time.monotonic() + args.budget)
    text = ""
    for op, name in _progress(pairs):
        run.take(op, name)
        text = run.save(args.out)  # after each case: what is measured outlives an interrupt
    sys.stdout.write(text)
    for line in run.failures():
        _tell(f"failed: {line}")
    return 1 if run.failures() else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", default=list(cases.OPS), metavar="OP")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--seconds-per-case", type=float, default=0.5, metavar="S", help="of a row's samples")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="no row begins after it")
    return parser.parse_args(argv)


class _Run:
    """Rows so far, what was left out, and what could not even be built."""

    def __init__(self, clock: Clock, seconds: float, ends: float) -> None:
        self.clock, self.seconds, self.ends = clock, seconds, ends
        self.rate = clock.copy_rate()
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self.unbuilt: list[str] = []

    def take(self, op: str, name: str) -> None:
        """Measure an op at a shape, if there is time."""
        if time.monotonic() > self.ends:
            self.left_out.append(f"{op} {name}")
            return
        try:
            case = cases.build(op, name, self.clock.device)
        except FAILURES as error:
            self.unbuilt.append(f"{op} {name}: {type(error).__name__}: {error}")
            return
        for row in rows_of(case):
            if time.monotonic() > self.ends:
                self.left_out.append(f"{op} {name} {row.passed}")
                continue
            measure(case, row, self.clock, self.rate, self.seconds)
            self.rows.append(row)

    def failures(self) -> list[str]:
        """Return a line for each case that could not be built and each column that failed."""
        return [*self.unbuilt, *(line for row in self.rows for line in row.failures())]

    def save(self, folder: Path) -> str:
        """Write all there is, in the order of ops and shapes, and return the Markdown."""
        order = [*SHAPES, "tiny"]
        rows = sorted(self.rows, key=lambda r: (cases.OPS.index(r.op), order.index(r.shape)))
        about = report.facts(self.clock.device, sys.argv, self.rate)
        text = report.markdown(about, rows, self.left_out, self.failures())
        report.write(folder, about, text, rows)
        return text


def _progress(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs, with a bar on a terminal and lines in a log."""
    bar: Any = None
    if sys.stderr.isatty():
        with suppress(ImportError):  # without tqdm there are lines
            from tqdm import tqdm

            bar = tqdm(total=len(pairs), file=sys.stderr)
    for index, (op, name) in enumerate(pairs):
        if bar is None:
            _tell(f"{index + 1}/{len(pairs)} {op} {name}")
            yield op, name
            continue
        bar.set_description(f"{op} {name}")
        yield op, name
        bar.update()


def _refuse(reason: str) -> int:
    _tell(f"bench: {reason}")
    return 2


def _tell(line: str) -> None:
    # Where it does not mix with the table.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
