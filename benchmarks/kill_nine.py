"""Kill a run at random moments, over and over: every restart continues, and the end equals the undisturbed run's.

    python -m benchmarks.kill_nine [--rounds 100] [--steps 240] [--out DIR] [--seed 0]

A tiny CogVideoX trains on a CPU, saves every third step and measures eval losses. `kill -9` comes while it
starts, between any two instructions of training, while a checkpoint is written, and just as it gets its name. A
fifth of the rounds have two ranks, and one or both are killed. In some rounds the newest checkpoint is cut
short besides, as a lost disk cache would leave it. Runs are forked from this process, which has imported everything.
Exit code 1, and a list of what was wrong, if anything was.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.forks import ROOT, Main, ended, forked, free_port, load_script, wait
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.families import get_family
from dit_lora.training.tasks.registry import get_task_of_family

MOMENTS = {"start": 2.0, "training": 0.4, "write": 0.012, "rename": 0.004}
"""What is waited for, and the seconds after it within which the kill comes."""
_PATIENCE = 300.0
"""Seconds after which a process that neither ends nor reaches its moment is a failure."""
_SAVED = ("trainable.safetensors", "optimizer.safetensors", "ema.safetensors")
_VALUES = ("step", "loss", "grad_norm", "lr", "samples")


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    """By the moment that was waited for."""
    left: Counter[str] = field(default_factory=Counter)
    """What a kill left of a checkpoint under way."""
    restarts: int = 0
    """Starts that said where they go on, each from the newest whole checkpoint."""
    passed_over: int = 0
    """Checkpoints cut short that a restart skipped with a word."""
    ended: int = 0
    """Killed runs that came to their end, equal to the undisturbed one."""
    failures: list[str] = field(default_factory=list)


class Writes:
    """Counts the checkpoints that a run begins to write."""

    def __init__(self, run: Path, num_writes: int) -> None:
        self._run, self._remaining = run, num_writes
        self._was_writing = is_writing(run)  # a leftover

    def begun(self) -> bool:
        is_writing_now = is_writing(self._run)
        self._remaining -= is_writing_now and not self._was_writing
        self._was_writing = is_writing_now
        return self._remaining <= 0


@dataclass
class Trial:
    """A recipe, killed and started again until it ends; then compared with its undisturbed run."""

    main: Main
    args: list[str]
    work: Path
    steps: int
    chance: random.Random
    tally: Tally = field(default_factory=Tally)
    ranks: int = 1
    number: int = 0
    torn: set[Path] = field(default_factory=set)
    """Checkpoints that were cut short, not killed."""
    counted_leftovers: set[tuple[Path, int]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.ranks}_ranks_{self.number:02d}"

    @property
    def folder(self) -> Path:
        return self.work / "runs" / self.name

    @property
    def reference(self) -> Path:
        return self.work / "runs" / f"{self.ranks}_ranks_undisturbed"

    def undisturbed(self) -> None:
        codes = wait(self._start(self.reference, "none"))
        if any(codes):
            raise SystemExit(f"the undisturbed run failed: {self._log(self.reference)}")

    def round(self) -> None:
        """One start and one kill; a run that ends before it is compared, and the next start is a new run's."""
        torn = self._tear()
        before = whole_checkpoints(self.folder)
        log = self._log(self.folder)
        log_start = log.stat().st_size if log.exists() else 0
        pids = self._start(self.folder, "auto")
        moment = self.chance.choice(list(MOMENTS))
        ended = self._await(moment, pids)
        if ended is not None:
            self._over(wait(pids, ended))
        else:
            self.tally.kills[moment] += 1
            self._kill(pids)
            self._record_leftovers()
        self._check_start(log.read_bytes()[log_start:].decode(errors="replace"), before, torn)
        checkpoints_after = whole_checkpoints(self.folder)
        if ended is None and before and (not checkpoints_after or checkpoints_after[-1] < before[-1]):
            self._record_failure(f"had checkpoint {before[-1]}, and after a kill {checkpoints_after}")
        if ended is not None:
            self.number += 1

    def to_the_end(self) -> None:
        self._over(wait(self._start(self.folder, "auto")))
        self.number += 1

    def _record_failure(self, message: str) -> None:
        self.tally.failures.append(f"{self.name}: {message} (see {self._log(self.folder)})")

    def _log(self, folder: Path) -> Path:
        return self.work / f"{folder.name}.log"

    def _start(self, folder: Path, resume: str) -> list[int]:
        values = [f"run.dir={folder}", f"train.resume={resume}", f"train.steps={self.steps}"]
        common = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pids = []
        for rank in range(self.ranks):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            pids.append(forked(self.main, [*self.args, *values], environment, self._log(folder)))
        return pids

    def _await(self, kind: str, pids: Sequence[int]) -> dict[int, int] | None:
        """Wait for the moment; the exit codes so far if a process ended before it."""
        is_here, reached_at = self._moment(kind), None
        delay, deadline = self.chance.uniform(0, MOMENTS[kind]), time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if reached_at is None and is_here():
                reached_at = time.monotonic()
            if reached_at is not None and time.monotonic() >= reached_at + delay:
                return None
            codes = ended(pids)
            if codes:
                return codes
            time.sleep(0.0002)
        self._record_failure(f"did not reach {kind} in {_PATIENCE:.0f} s")
        return None

    def _moment(self, kind: str) -> Callable[[], bool]:
        """Whether it is there, asked again and again."""
        lines, checkpoints = count_lines(self.folder), set(saved(self.folder))
        if kind == "start":
            return lambda: True
        if kind == "training":
            return lambda: count_lines(self.folder) > lines
        if kind == "rename":
            return lambda: bool(saved(self.folder) - checkpoints)
        return Writes(self.folder, self.chance.randint(1, 3)).begun

    def _kill(self, pids: Sequence[int]) -> None:
        """One rank or all; the others end as a launcher ends them, by SIGTERM and then by force."""
        victims = self.chance.choice([list(pids), *([pid] for pid in pids)])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        codes: dict[int, int] = {}
        for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, _PATIENCE)):
            deadline = time.monotonic() + seconds
            for pid in set(pids) - codes.keys() - set(victims):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while len(codes) < len(pids) and time.monotonic() < deadline:
                codes |= ended([pid for pid in pids if pid not in codes])
                time.sleep(0.005)

    def _tear(self) -> Path | None:
        """Sometimes, cut a file of the newest checkpoint short."""
        checkpoints = whole_checkpoints(self.folder)
        if len(checkpoints) < 2 or self.chance.random() > 0.15:
            return None
        path = self.folder / "checkpoints" / f"step_{checkpoints[-1]:06d}"
        file = self.chance.choice(sorted(path.iterdir()))
        os.truncate(file, self.chance.randrange(file.stat().st_size))
        self.torn.add(path)
        return path

    def _record_leftovers(self) -> None:
        """What the kill left; a folder with a checkpoint's name is a whole one, or was cut short before."""
        folder = self.folder / "checkpoints"
        for path in folder.glob(".step_*"):
            version = (path, path.stat().st_ctime_ns)
            if version not in self.counted_leftovers:
                self.counted_leftovers.add(version)
                self.tally.left[path.suffix.removeprefix(".")] += 1
        checkpoints = whole_checkpoints(self.folder)
        newest = max(checkpoints, default=0)
        for path in folder.glob("step_*"):
            # Of older ones the adapter stays, and a kill may come while their state is deleted.
            is_pruned = step_of(path) < newest and (path / "pytorch_lora_weights.safetensors").is_file()
            if step_of(path) not in checkpoints and path not in self.torn and not is_pruned:
                self._record_failure(f"{path.name} is not whole")

    def _check_start(self, log_text: str, before: list[int], torn: Path | None) -> None:
        """It goes on from the newest whole checkpoint; from step 0 only if there is none."""
        match = re.search(r"resumed at step (\d+)", log_text)
        starts_afresh = "yet; starting at step 0" in log_text
        if not match and not starts_afresh:
            return  # killed before it said so
        self.tally.restarts += 1
        at = int(match[1]) if match else 0
        if at != (before[-1] if before else 0):
            self._record_failure(f"went on from step {at}, with checkpoints {before}")
        if torn and "skipped" in log_text and torn.name in log_text:
            self.tally.passed_over += 1
        elif torn:
            self._record_failure(f"said nothing of {torn.name}, which was cut short")

    def _over(self, codes: Sequence[int]) -> None:
        if any(codes):
            self._record_failure(f"ended with exit codes {list(codes)}")
            return
        problems = differences(self.folder, self.reference, self.steps)
        checkpoints, reference_checkpoints = (
            sorted(p.name for p in (at / "checkpoints").iterdir()) for at in (self.folder, self.reference)
        )
        if checkpoints != reference_checkpoints:
            problems.append(f"checkpoints/ holds {checkpoints}, and undisturbed {reference_checkpoints}")
        for problem in problems:
            self._record_failure(problem)
        self.tally.ended += not problems


def differences(run: Path, reference: Path, steps: int) -> list[str]:
    """What a run ended with that its undisturbed run did not, bit by bit."""
    problems = []
    last_checkpoint = f"checkpoints/step_{steps:06d}"
    exact = [
        *(f"{last_checkpoint}/{name}" for name in _SAVED),
        "eval_loss.jsonl",
        "checkpoints/best.json",
    ]
    exact += [str(path.relative_to(reference)) for path in (reference / "adapter").iterdir()]
    for name in exact:
        if content(run / name) != content(reference / name):
            problems.append(f"{name} differs from the undisturbed run's")
    run_values, theirs = (values(at / "metrics.jsonl") for at in (run, reference))
    if [line[0] for line in run_values] != list(range(1, steps + 1)):
        problems.append("metrics.jsonl has not each step once")
    elif run_values != theirs:
        problems.append("metrics.jsonl has other values")
    return problems


def content(path: Path) -> tuple[Any, bytes]:
    """A file's bytes; of safetensors apart from its header, whose metadata has no order."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return None, data
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def values(path: Path) -> list[tuple[float, ...]]:
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [tuple(line[name] for name in _VALUES) for line in lines]


def whole_checkpoints(run: Path) -> list[int]:
    """Steps of checkpoints that are what their manifest says, ascending; read without our own code."""
    return sorted(step_of(p) for p in (run / "checkpoints").glob("step_*") if _is_whole(p))


def _is_whole(path: Path) -> bool:
    try:
        digests = json.loads((path / "manifest.json").read_text())["sha256"]
        return bool(digests) and all(
            hashlib.sha256((path / name).read_bytes()).hexdigest() == digest for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def is_writing(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step_*.partial"))


def saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step_*")}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def count_lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


@contextlib.contextmanager
def open_folder(destination: Path | None) -> Iterator[Path]:
    if destination is not None:
        destination.mkdir(parents=True)
        yield destination
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


SETTINGS = (
    "data.height=32",
    "data.width=48",
    "train.batch_size=1",
    "train.save_every=3",
    "train.keep=2",
    "train.keep_best=1",
    "train.ema=0.9",
    "lora.rank=16",
    "lora.dropout=0.1",
    "guard.preflight=false",
    "validation.prompts=[]",
    "validation.every=6",
    "validation.eval_draws=1",
    "validation.eval_clips=2",
)


def play(trial: Trial, rounds: int, *, progress: bool = True) -> None:
    """The undisturbed run, `rounds` kills, and the way to the end."""
    trial.undisturbed()
    with tqdm(total=rounds, desc=f"kills, {trial.ranks} rank(s)", disable=not progress) as bar:
        kills_before = trial.tally.kills.total()
        while (num_kills := trial.tally.kills.total() - kills_before) < rounds and not trial.tally.failures:
            trial.round()
            bar.update(trial.tally.kills.total() - kills_before - num_kills)
    trial.to_the_end()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=240, help="of a run on one rank; half on two")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    began, tally, chance = time.monotonic(), Tally(), random.Random(options.seed)
    with open_folder(options.out) as folder:
        get_task_of_family("cogvideox")  # imported here, once
        get_family("cogvideox").build_tiny_checkpoint("cogvideox-2b", folder / "model", 0)
        write_shapes(folder / "clips", clips=5, frames=9, height=64, width=96, fps=8)
        recipe = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")
        args = [
            recipe,
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'clips'}",
            *SETTINGS,
        ]
        script: Any = load_script()
        pairs = options.rounds // 5
        for ranks, rounds, steps in ((1, options.rounds - pairs, options.steps), (2, pairs, options.steps // 2)):
            if rounds:
                play(Trial(script.main, args, folder, steps, chance, tally, ranks), rounds)
        result = {**vars(tally), "seed": options.seed, "seconds": round(time.monotonic() - began)}
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
