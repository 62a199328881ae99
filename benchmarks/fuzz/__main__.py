"""Damage files that strangers may have written, and read them: each ends in a result or in one line of error.

    python -m benchmarks.fuzz [--count 2000] [--seed 0] [--only PARSER ...]

For each parser a sound sample is written, one of its files is damaged by a seeded mutation, and the parser of the
library reads it. Reported are exceptions that are not a `DitLoraError`, errors without
words, inputs that take more than 10 s or 1 GiB, and damage that is certain (a file cut short, a required field of a
wrong type) and was accepted. Each finding prints the parser and the number of the input: `--only PARSER --first N
--count 1` repeats it. Exit code 1 if there are findings.
"""

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fuzz.mutations import damage
from benchmarks.fuzz.parsers import PARSERS
from dit_lora.errors import DitLoraError

MAX_SECONDS = 10.0
MAX_BYTES = 2**30


@dataclass(frozen=True)
class Finding:
    parser: str
    number: int
    mutation: str
    problem: str

    def __str__(self) -> str:
        return f"{self.parser} --first {self.number}: {self.mutation}: {self.problem}"


class _TooLongError(BaseException):
    """Not an `Exception`: no reader may catch it."""


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_input(name: str, number: int, seed: int, sample: Path, work: Path) -> Finding | None:
    """Damage a copy of the sample in `work`, seeded with the number, and read it. Returns the problem, or None."""
    parser = PARSERS[name]
    folder = work / "input"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sample, folder)
    mutation, is_certain = damage(folder, parser, random.Random(f"{seed}/{name}/{number}"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    accepted, error_type = False, ""
    try:
        with _time_limit():
            accepted = bool(parser.read(folder))
    except DitLoraError as error:
        message = str(error)
        error_type = "" if message.strip() else "an error without words"
    except OSError as error:
        # Commands turn it into a line.
        error_type = "" if error.filename else f"OSError without a file: {error}"
    except _TooLongError:
        error_type = f"more than {MAX_SECONDS:g} s"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/dit_lora/" in f.filename]
        at = ours[-1] if ours else frame
        message = " ".join(str(error).split())[:100]
        error_type = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {message}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
    if not error_type and grown > MAX_BYTES:
        error_type = f"{grown / 2**30:.1f} GiB"
    if not error_type and is_certain and accepted:
        error_type = "certain damage was accepted"
    return Finding(name, number, mutation, error_type) if error_type else None


def fuzz(name: str, numbers: range, seed: int, folder: Path) -> list[Finding]:
    """Try these inputs of a parser; raises `AssertionError` if the undamaged sample is not accepted."""
    torch.manual_seed(seed)
    sample = folder / f"{name}_sample"
    sample.mkdir()
    PARSERS[name].write(sample)
    sound = folder / f"{name}_sound"
    shutil.copytree(sample, sound)
    assert PARSERS[name].read(sound), f"{name}: the sample is not sound"
    findings = (try_input(name, number, seed, sample, folder / name) for number in numbers)
    return [finding for finding in findings if finding is not None]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="inputs for each parser")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PARSERS, default=list(PARSERS))
    args = parser.parse_args(argv)
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for name in args.only:
            began = time.monotonic()
            numbers = range(args.first, args.first + args.count)
            findings = fuzz(name, numbers, args.seed, Path(root))
            failed |= bool(findings)
            print(f"{name}: {args.count} inputs, {time.monotonic() - began:.0f} s, {len(findings)} findings")
            kinds: dict[str, list[Finding]] = {}
            for finding in findings:
                kinds.setdefault(finding.problem, []).append(finding)
            for same_kind in sorted(kinds.values(), key=len, reverse=True):
                print(f"  {len(same_kind)} times: {same_kind[0]}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
