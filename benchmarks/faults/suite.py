"""Run the faults, in this process or on several ranks.

    torchrun --nproc_per_node 2 -m benchmarks.faults.suite OUT.json VARIANT KIND ENGINE [PATTERN]

is the command that `python -m benchmarks.faults --ranks 2` starts.
"""

import fnmatch
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from benchmarks.faults import (
    altered,
    blame,
    data,
    late,
    loop_damage,
    loop_kinds,
    loops,
    ops,
    phases,
    samples,
    state,
)
from benchmarks.faults.chat import data as chat_data
from benchmarks.faults.chat import loops as chat_loops
from benchmarks.faults.chat import steps as chat_steps
from benchmarks.faults.fault import Fault, FaultResult
from benchmarks.faults.target_table import DEFAULT, targets_for
from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.world import Engine, World, engine_of
from dit_lora.errors import DitLoraError
from dit_lora.files import write_atomically
from dit_lora.numerics.ranks import broadcast_object

_LOOPS = (*loops.FAULTS, *loop_kinds.FAULTS, *loop_damage.FAULTS)
"""Foreign loops have models of their own."""


def catalog(targets: FaultTargets, ranks: int = 1, engine: Engine = "ddp") -> list[Fault]:
    """All faults that apply to a tiny checkpoint on this number of ranks, in the table's order."""
    all_faults = [
        *samples.FAULTS,
        *data.FAULTS,
        *state.FAULTS,
        *altered.FAULTS,
        *blame.FAULTS,
        *ops.FAULTS,
        *late.FAULTS,
        *phases.FAULTS,
        *chat_data.FAULTS,
        *chat_steps.FAULTS,
        *chat_loops.FAULTS,
        *(_LOOPS if targets.variant == DEFAULT and targets.kind == "lora" else ()),
    ]
    return [fault for fault in all_faults if fault.fits(targets, ranks, engine)]


def chosen(pattern: str | None, targets: FaultTargets, ranks: int = 1, engine: Engine = "ddp") -> list[Fault]:
    """The faults whose name matches a pattern such as `*latent*`; all if it is None."""
    faults_here = catalog(targets, ranks, engine)
    faults = [f for f in faults_here if pattern is None or fnmatch.fnmatchcase(f.name, pattern)]
    if not faults:
        names = ", ".join(fault.name for fault in faults_here)
        raise DitLoraError(f"no fault is called {pattern!r}; there are: {names}")
    return faults


def run_suite(
    pattern: str | None,
    ranks: int,
    variant: str = DEFAULT,
    engine: Engine = "ddp",
    kind: str = "lora",
) -> list[FaultResult]:
    """Judge every chosen fault on one tiny checkpoint, in this process or on ranks that torchrun starts."""
    targets = targets_for(variant, kind)
    faults = chosen(pattern, targets, ranks, engine)
    if ranks == 1:
        bar = tqdm(judge_all(faults, targets), total=len(faults), desc="faults", unit="fault")
        return list(bar)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "judged.json"
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        arguments = [str(output), variant, kind, engine, *([pattern] if pattern else [])]
        command = [sys.executable, "-m", *launch, "-m", "benchmarks.faults.suite", *arguments]
        # One thread a rank: they share this machine's processors.
        process = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ})
        if process.returncode or not output.exists():
            raise DitLoraError(f"the suite ended with {process.returncode} on {ranks} ranks")
        lines = json.loads(output.read_text(encoding="utf-8"))
    return [FaultResult(**{**line, "why": tuple(line["why"])}) for line in lines]


def totals(results: Sequence[FaultResult]) -> dict[str, int]:
    """Totals for the last line of the table."""
    return {
        "faults": len(results),
        "named": sum(judgment.named for judgment in results),
        "recovered": sum(judgment.recovered for judgment in results),
        "poisoned_files": sum(judgment.poisoned_files for judgment in results),
    }


def judge_all(faults: Sequence[Fault], targets: FaultTargets, engine: Engine = "ddp") -> Iterator[FaultResult]:
    """Inject one fault after the other, each in a separate run; equal on all ranks."""
    logging.getLogger("dit_lora").setLevel(logging.ERROR)
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        world = World(Path(broadcast_object(folder)), accelerator, targets, engine)
        world.reference("clean", ())  # encodes the clips that the faults' caches begin with
        for fault in faults:
            yield fault.judge(world)
        accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.1)  # gloo lets go of its tensors (docs/log.md)
    accelerator.end_training()


def main(argv: Sequence[str]) -> None:
    """Judge on every rank; the main process writes the lines."""
    output, targets, engine = Path(argv[0]), targets_for(argv[1], argv[2]), engine_of(argv[3])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    faults = chosen(argv[4] if len(argv) > 4 else None, targets, ranks, engine)
    is_main = os.environ.get("RANK", "0") == "0"
    bar = tqdm(
        judge_all(faults, targets, engine),
        total=len(faults),
        desc="faults",
        unit="fault",
        disable=not is_main,
    )
    lines = [asdict(judgment) for judgment in bar]
    if is_main:
        write_atomically(output, json.dumps(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
