"""Press Ctrl-C at random moments of `dit-lora train`: no traceback, a line on how to continue, and equal adapters.

    python -m benchmarks.interrupt [--rounds 10] [--steps 40] [--out DIR] [--seed 0]

A tiny CogVideoX trains on a CPU in the processes that a user starts, in a session of their own. SIGINT goes to all of
them, as from a terminal, after each part of the run in turn: imports, encoding, steps, saving, validation, the end.
The run is then continued with `train.resume=auto` and compared bit by bit with one that was not interrupted.
Continuations are forked from this process, which has imported everything. Exit code 1 if anything was wrong.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.forks import ROOT, Main, forked, load_script, wait
from benchmarks.kill_nine import SETTINGS, differences, open_folder
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.families import get_family
from dit_lora.training.tasks.registry import get_task_of_family

COMMAND = (sys.executable, "-m", "dit_lora", "train")
MOMENTS = (
    ("", 6.0),  # imports of the launcher and the script
    ("", 20.0),
    ("1 process on ", 2.0),  # encoding
    ("lora: ", 2.0),
    ("step 0: eval loss ", 1.0),
    ("step 10: saved ", 0.3),
    ("step 20: eval loss ", 0.3),
    ("step 30: ", 0.3),
    ("step 40: eval loss ", 1.0),  # the result is written and verified
    ("adapter: ", 1.0),
)
"""What the log shows before Ctrl-C, and the longest time after it in seconds."""
_CONTINUE = "train.resume=auto"


@dataclass(frozen=True)
class Trial:
    """A recipe whose runs are interrupted, and the folder for runs and logs."""

    main: Main
    args: list[str]
    work: Path
    steps: int

    def run_whole(self) -> None:
        if wait([forked(self.main, self.values("whole"), {}, self.log("whole"))]) != [0]:
            raise SystemExit(f"a run without an interruption failed: {self.log('whole')}")

    def interrupt(self, name: str, text: str, seconds: float) -> tuple[list[str], str]:
        """Interrupt a run some seconds after a text in its log, and continue it.

        Returns what was wrong, and the exit code with the log's last line.
        """
        process = self.start(name)
        while text not in self.log(name).read_text(errors="replace") and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        # The run may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait()
        log = self.log(name).read_text(errors="replace")
        problems = find_log_problems(code, log)
        continued = wait([forked(self.main, self.values(name), {}, self.work / f"{name}_continued.log")])
        if continued != [0]:
            problems.append(f"continued with exit code {continued[0]}")
        else:
            problems += differences(self.folder(name), self.folder("whole"), self.steps)
        last_line = (log.strip().splitlines() or [""])[-1]
        return problems, f"exit code {code}: {last_line}"

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        with self.log(name).open("wb") as log:
            # A session of its own: without a terminal, as in a job, and with a group to signal.
            return subprocess.Popen(
                [*COMMAND, *self.values(name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background job ignores SIGINT, and so would what it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def values(self, name: str) -> list[str]:
        return [*self.args, f"run.dir={self.folder(name)}", f"train.steps={self.steps}", _CONTINUE]

    def folder(self, name: str) -> Path:
        return self.work / "runs" / name

    def log(self, name: str) -> Path:
        return self.work / f"{name}.log"


def find_log_problems(code: int, log: str) -> list[str]:
    """Problems of an interrupted run: its exit code, and the text of its log."""
    problems = []
    if "Traceback" in log or "Exception ignored" in log:
        problems.append("printed a traceback")
    # A run that had ended before the signal has exit code 0.
    if code not in (0, 130):
        problems.append(f"ended with exit code {code}")
    if code == 130 and _CONTINUE not in log:
        problems.append("did not say how to continue")
    return problems


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    chance, has_failed = random.Random(options.seed), False
    with open_folder(options.out) as folder:
        get_task_of_family("cogvideox")  # imported here, once
        get_family("cogvideox").build_tiny_checkpoint("cogvideox-2b", folder / "model", 0)
        write_shapes(folder / "clips", clips=5, frames=9, height=64, width=96, fps=8)
        recipe = str(ROOT / "recipes" / "smoke" / "cogvideox.yaml")
        paths = [f"model.path={folder / 'model'}", f"data.path={folder / 'clips'}"]
        args = [recipe, *paths, *SETTINGS, "train.save_every=10", "validation.every=10"]
        trial = Trial(load_script().main, args, folder, options.steps)
        trial.run_whole()
        for number in range(options.rounds):
            text, longest = MOMENTS[number % len(MOMENTS)]
            seconds = chance.uniform(0.0, longest)
            # Some of the runs encode, which only a cache of their own makes them do.
            cache = [f"data.cache={folder / f'cache_{number}'}"] if number % 3 == 2 else []
            round_trial = Trial(trial.main, [*args, *cache], folder, options.steps)
            problems, end = round_trial.interrupt(f"round_{number:02d}", text, seconds)
            has_failed = has_failed or bool(problems)
            sys.stdout.write(f"{seconds:.1f} s after {text!r}, {end}\n")
            sys.stdout.writelines(f"  {problem}\n" for problem in problems)
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"rounds": options.rounds, "failed": has_failed}) + "\n")
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
