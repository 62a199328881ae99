"""Check right gradients of tiny models: none may be reported as wrong.

    python -m benchmarks.gradient_check.healthy [--checks 100] [--families wan sana] [--dtypes fp32] [--only int8]
        [--work FOLDER] [--results FILE.jsonl] [--minutes 3]

Each combination of family, dtype and what may change a gradient's rounding (adapter kinds, quantised bases,
checkpointing, compilation, the references of fused kernels) is a training in which every step is checked. Rows in FILE
are not computed again, and `--minutes` ends a part.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import torch
from accelerate.utils import DistributedType
from torch import nn

from benchmarks.gradient_check.__main__ import check_step
from benchmarks.gradient_check.stored_rows import StoredRows
from benchmarks.gradient_check.tiny_training import TinyTraining
from dit_lora.config.lora import AdapterKind
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES
from dit_lora.fuse.api import OPS, fuse
from dit_lora.guard.gradient_check.check import GradientReport
from dit_lora.numerics.precision import DTYPES
from dit_lora.numerics.quantized_linear import Quantization
from dit_lora.training.execution.activation_checkpointing import CheckpointingMode, set_checkpointing
from dit_lora.training.execution.compiled import compile_blocks

_COMPILED_FAMILIES = ("wan", "sana")
"""Compiling a block takes half a minute on a CPU."""
_STEPS_OF_TRAINING = 30
"""Steps that are checked before a new training begins, with another adapter."""


@dataclass(frozen=True)
class HealthyRun:
    """Trainings of a tiny model in which every step is right."""

    family: str
    dtype: str
    adapter: AdapterKind = "lora"
    quantize: Quantization | None = None
    checkpointing: CheckpointingMode = "none"
    is_compiled: bool = False
    has_fused_ops: bool = False

    @property
    def name(self) -> str:
        base = f"{self.quantize} base" if self.quantize else ""
        checkpointing = f"checkpointing {self.checkpointing}" if self.checkpointing != "none" else ""
        fused = "fused ops" if self.has_fused_ops else ""
        parts = (self.family, self.dtype, self.adapter, base, checkpointing, "compiled" * self.is_compiled, fused)
        return " ".join(filter(None, parts))

    def make_training(self, work: Path, seed: int) -> TinyTraining:
        training = TinyTraining.from_family(
            self.family,
            work,
            DTYPES[self.dtype],
            seed=seed,
            adapter=self.adapter,
            quantize=self.quantize,
            num_micro_batches=1,
        )
        if self.has_fused_ops:
            fuse_all(training.model)
        if self.checkpointing != "none":
            set_checkpointing(training.model, self.checkpointing)
        if self.is_compiled:
            recipe: Any = SimpleNamespace(train=SimpleNamespace(compile=True), cache_dir=work)
            accelerator: Any = SimpleNamespace(distributed_type=DistributedType.NO, device=torch.device("cpu"))
            compile_blocks(recipe, training.model, accelerator)
        return training

    def check(self, count: int, work: Path, stored: StoredRows) -> Iterator[dict[str, Any]]:
        """Rows of the checks of this many steps."""
        training: TinyTraining | None = None
        for number in range(count):
            key = (self.name, number)
            if not stored.has(*key):
                if stored.is_time_over:
                    return
                step = number % _STEPS_OF_TRAINING
                if training is None or step < training.step:
                    training = self.make_training(work, seed=number - step)
                training.train(step - training.step)
                training.run_backward()
                stored.add(key, make_row(check_step(training)))
            yield stored.get(*key)


def fuse_all(model: nn.Module) -> None:
    """Use every fused op that the model has, with the op's reference in PyTorch."""
    modes = dict.fromkeys(OPS, "off")
    for op in OPS:
        # fp8 is refused by name: its rounding is no part of the gradient.
        if op == "fp8":
            continue
        try:
            fuse(model, cast(Any, {**modes, op: "on"}), check=False)
        # The model has no such op.
        except DitLoraError:
            continue
        modes[op] = "on"
    if "on" in modes.values():
        fuse(model, cast(Any, modes), check=False)


def make_row(report: GradientReport) -> dict[str, Any]:
    """A check as a row: its result and, for each direction, how far slope and gradient are apart."""
    row: dict[str, Any] = {"result": report.result, "evaluations": report.num_evaluations, "directions": []}
    for comparison in report.comparisons:
        estimate = comparison.estimate
        if estimate is None or not estimate.projection:
            continue
        figures = (estimate.slope_difference, estimate.measurement_bound, estimate.gradient_error, estimate.scale)
        row["directions"].append([comparison.direction, comparison.result, *figures])
    if report.result == "differs":
        row["message"] = report.message
    return row


@dataclass
class Summary:
    """Results of checks of right gradients."""

    results: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Differences of slope and gradient, in bounds, along the gradient."""
    evaluations: list[int] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.results.append(row["result"])
        self.evaluations.append(row["evaluations"])
        for label, _result, difference, measurement, gradient, _scale in row["directions"]:
            if label.startswith("gradient"):
                self.shares.append(abs(difference) / (measurement + gradient))

    def __str__(self) -> str:
        count = self.results.count
        text = f"{count('differs')} false alarms of {len(self.results)} checks, {count('cannot tell')} cannot tell"
        if not self.shares:
            return text
        return (
            f"{text}; difference at most {max(self.shares):.2f} bounds; evaluations "
            f"{statistics.median(self.evaluations):.0f} (at most {max(self.evaluations)})"
        )


def list_runs(families: Sequence[str], dtypes: Sequence[str]) -> list[HealthyRun]:
    """All combinations: adapter kinds with each family, and what changes rounding with a LoRA."""
    runs = []
    for family in families:
        for dtype in dtypes:
            runs += [HealthyRun(family, dtype, adapter=adapter) for adapter in get_args(AdapterKind)]
            runs += [HealthyRun(family, dtype, quantize=kind) for kind in get_args(Quantization)]
            runs += [HealthyRun(family, dtype, checkpointing=mode) for mode in ("selective", "full")]
            runs.append(HealthyRun(family, dtype, has_fused_ops=True))
            if family in _COMPILED_FAMILIES:
                runs.append(HealthyRun(family, dtype, is_compiled=True))
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=30, metavar="N", help="for each combination")
    parser.add_argument("--families", nargs="+", default=list(DIFFUSION_FAMILIES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("fp32", "bf16"))
    parser.add_argument("--only", default="", metavar="WORDS", help="combinations with these words in their name")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps rows for the next call")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after so many minutes")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps tiny checkpoints for the next call")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    stored = StoredRows(arguments.results, arguments.minutes)
    totals = {dtype: Summary() for dtype in arguments.dtypes}
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(exist_ok=True)
        for run in list_runs(arguments.families, arguments.dtypes):
            if arguments.only not in run.name:
                continue
            summary = Summary()
            for row in run.check(arguments.checks, work, stored):
                summary.add(row)
                totals[run.dtype].add(row)
                if row["result"] == "differs":
                    print(f"FALSE ALARM: {run.name}: {row['message']}", flush=True)
            if summary.results:
                print(f"{run.name}: {summary}", flush=True)
    if stored.is_time_over:
        print("time is over: the same command goes on from here")
    for dtype, summary in totals.items():
        print(f"all {dtype}: {summary}")
    return 1 if any("differs" in summary.results for summary in totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
