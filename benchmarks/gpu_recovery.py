"""A tiny run on a GPU that meets a bad sample, and one that is killed and resumed: both come to their ends.

    python -m benchmarks.gpu_recovery [--device cuda|cpu] [--steps 120] [--work FOLDER]

Each run is `recipes/lora.py` in a separate process. A sample's latents become NaN on the device from the fourth step
on: the guard has to name and quarantine it, and the run has to end with a finite adapter. Then a run is ended with
`kill -9` half way and resumed: its losses must equal those of an uninterrupted run. On a CPU they must be bitwise
equal; on a GPU, where sums have no fixed order, the printed relative difference may be up to 1e-3. Problems are
listed, and the exit code is then 1.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.forks import ROOT, load_script
from dit_lora.data.loading.batch import Batch
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.errors import report_errors_and_exit
from dit_lora.families import get_family
from dit_lora.training import loop as training_loop

_CLOSE = 1e-3
"""Relative difference of losses below which two runs on a GPU are the same training."""
_PATIENCE = 300.0
_POISONED_FROM = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, help="by default a folder that is deleted")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_recovery: there is no CUDA device here; --device cpu runs\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs((args.work or Path(folder)).resolve(), args.device, args.steps)
        runs.prepare()
        problems = [*runs.poisoned(), *runs.killed()]
    for line in problems:
        print(f"WRONG: {line}")
    print("recovery: " + (f"{len(problems)} wrong" if problems else "as it should be"))
    return 1 if problems else 0


class Runs:
    """Runs of the smoke recipe in one folder, on one device."""

    def __init__(self, work: Path, device: str, steps: int) -> None:
        self.work, self.device, self.steps = work, device, steps

    def prepare(self) -> None:
        get_family("cogvideox").build_tiny_checkpoint("cogvideox-5b", self.work / "model", 0)
        write_shapes(self.work / "clips", clips=6, frames=9, height=64, width=96, fps=8)

    def poisoned(self) -> list[str]:
        """Run with a bad sample and list the problems."""
        name = "poisoned"
        problems = self._failed(self._start(name, poisoned=True))
        left_out = _lines(self.work / name / "quarantine.jsonl")
        for event in _lines(self.work / name / "events.jsonl"):
            message = event.get("verdict", {}).get("words", "")
            print(f"step {event.get('step')}: {event.get('kind')}, {event.get('action')}: {message}")
        if not left_out:
            problems.append("the poisoned sample was not quarantined")
        return [*problems, *self._unfinished(name)]

    def killed(self) -> list[str]:
        """Kill a run, resume it, compare it with an uninterrupted run and list the problems."""
        problems = self._failed(self._start("undisturbed"))
        process = self._start("resumed")
        num_done = self._until("resumed", self.steps // 2, process)
        if process.poll() is not None:
            return [*problems, f"the run to be killed ended by itself: {self._log('resumed')}"]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"killed after step {num_done} of {self.steps}")
        problems += self._failed(self._start("resumed", "train.resume=auto"))
        for name in ("undisturbed", "resumed"):
            problems += self._unfinished(name)
        return problems or self._differences()

    def _differences(self) -> list[str]:
        """List the losses and adapters that differ between the two runs by more than is allowed."""
        losses, resumed_losses = (_losses(self.work / name) for name in ("undisturbed", "resumed"))
        if losses.keys() != resumed_losses.keys():
            return [f"steps {len(losses)} and {len(resumed_losses)}"]
        worst = max(abs(losses[step] - resumed_losses[step]) / abs(losses[step]) for step in losses)
        adapters = [load_file(_adapter(self.work / name)) for name in ("undisturbed", "resumed")]
        are_equal = all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
        message = f"losses differ by at most {worst:.1e} relative; adapters are " + (
            "equal to the bit" if are_equal else "not equal to the bit"
        )
        print(f"undisturbed and resumed: {message}")
        is_right = worst <= _CLOSE if self.device == "cuda" else worst == 0.0 and are_equal
        return [] if is_right else [message]

    def _start(self, name: str, *overrides: str, poisoned: bool = False) -> "subprocess.Popen[str]":
        recipe = [
            str(ROOT / "recipes" / "smoke" / "cogvideox.yaml"),
            f"model.path={self.work / 'model'}",
            f"data.path={self.work / 'clips'}",
            f"data.cache={self.work / 'cache'}",
            f"run.dir={self.work / name}",
            f"train.steps={self.steps}",
            f"train.save_every={max(1, self.steps // 6)}",
            "validation.prompts=[]",
            *overrides,
        ]
        script = ["-m", "benchmarks.gpu_recovery", "--as-run", "poisoned" if poisoned else "plain"]
        environment = dict(os.environ)
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with self._log(name).open("a") as log:
            return subprocess.Popen(
                [sys.executable, *script, *recipe],
                env=environment, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip

    def _failed(self, process: "subprocess.Popen[str]") -> list[str]:
        """Wait for its end; return its code as words where that is not 0."""
        try:
            code = process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [f"no end after {_PATIENCE:.0f} s"]
        logs = "".join(f"\n{log.read_text()[-2000:]}" for log in sorted(self.work.glob("*.log")))
        return [f"a run ended with {code}:{logs}"] if code else []

    def _until(self, name: str, steps: int, process: "subprocess.Popen[str]") -> int:
        """Wait until a run has taken so many steps, or has ended; return how many it has."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and process.poll() is None:
            num_steps = len(_losses(self.work / name))
            if num_steps >= steps:
                return num_steps
            time.sleep(0.02)
        return len(_losses(self.work / name))

    def _unfinished(self, name: str) -> list[str]:
        num_steps = len(_losses(self.work / name))
        if num_steps != self.steps:
            return [f"{name}: {num_steps} of {self.steps} steps"]
        tensors = load_file(_adapter(self.work / name))
        return [f"{name}: {tensor_name} is not finite" for tensor_name, t in tensors.items() if not t.isfinite().all()]

    def _log(self, name: str) -> Path:
        return self.work / f"{name}.log"


def _adapter(run: Path) -> Path:
    return run / "adapter" / "pytorch_lora_weights.safetensors"


def _losses(run: Path) -> dict[int, float]:
    """The loss of each step; of a repeated step, the last attempt. Skips a line that is still being written."""
    lines = _lines(run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _poison() -> None:
    """Make the latents of one sample NaN on the device, from the fourth step on, whenever a step takes it."""
    move_batch, read_batch = Batch.to, training_loop._Step.read_batch
    victims: list[str] = []
    poisons = False

    def read_poisoned(step: training_loop._Step, *args: Any) -> Batch:
        nonlocal poisons
        poisons = step.number >= _POISONED_FROM
        try:
            return read_batch(step, *args)
        finally:
            poisons = False

    def to(self: Batch, device: torch.device) -> Batch:
        batch = move_batch(self, device)
        if poisons and not victims:
            victims.append(batch.ids[0])
        if not poisons or victims[0] not in batch.ids:
            return batch
        # A copy: on a CPU these are the loader's own tensors.
        tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        tensors["latent_mean"][batch.ids.index(victims[0])] = math.nan
        return replace(batch, tensors=tensors)

    Batch.to = to  # type: ignore[method-assign]
    training_loop._Step.read_batch = read_poisoned  # type: ignore[method-assign]


def _as_run(kind: str, arguments: list[str]) -> None:
    """Run `recipes/lora.py` in this process, which was started for it."""
    if kind == "poisoned":
        _poison()
    with report_errors_and_exit():
        load_script().main(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-run"]:
        _as_run(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
