"""Measure what gradient checks cost at the automatic interval, in time and in memory.

    python -m benchmarks.gradient_check.cost [--family wan] [--micro-batches 16] [--checks 3] [--work FOLDER]

The time is that of the processor, so other processes do not change it. More micro-batches make a step longer, so that
it lasts about as long as one of a real model. The memory is what a check allocates apart from the forward pass.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gradient_check.__main__ import check_step
from benchmarks.gradient_check.tiny_training import TinyTraining
from dit_lora.guard.gradient_check.check import check_gradient
from dit_lora.numerics.precision import DTYPES
from dit_lora.training.check_budget import count_steps_to_cover_check
from dit_lora.training.execution.fake_step import AllocationTracker, count_tensor_bytes


def measure_extra_memory(dtype: torch.dtype, size_mib: int = 64) -> float:
    """Peak memory that a check allocates besides forward passes, relative to its trained weights."""
    generator = torch.Generator().manual_seed(0)
    parameters = {f"{k}.weight": torch.randn(16 * size_mib, 2048, generator=generator) for k in range(8)}
    for parameter in parameters.values():
        parameter.grad = parameter.clone()
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    losses = torch.ones(4)
    with AllocationTracker([*parameters.values(), *gradients, losses]) as tracker:
        check_gradient(lambda: losses, parameters, dtype=dtype)
    return tracker.max_bytes / count_tensor_bytes(parameters.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="wan")
    parser.add_argument("--micro-batches", type=int, default=16, metavar="N")
    parser.add_argument("--checks", type=int, default=3, metavar="N")
    parser.add_argument("--weights", type=int, default=64, metavar="MIB", help="size of the weights for memory")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps tiny checkpoints for the next call")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| dtype | step, s | check, s | evaluations | interval, steps | share of the run | extra memory / weights |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(exist_ok=True)
        for dtype in ("fp32", "bf16"):
            training = TinyTraining.from_family(
                arguments.family, work, DTYPES[dtype], num_micro_batches=arguments.micro_batches
            )
            training.train(1)
            step_s, check_s, num_evaluations = 0.0, 0.0, 0
            for _ in range(arguments.checks):
                began = time.process_time()
                training.train(1)
                step_s += time.process_time() - began
                training.run_backward()
                began = time.process_time()
                num_evaluations += check_step(training).num_evaluations
                check_s += time.process_time() - began
            interval = count_steps_to_cover_check(num_evaluations // arguments.checks)
            share = check_s / (interval * step_s)
            ratio = measure_extra_memory(training.dtype, arguments.weights)
            cells = (
                *(dtype, f"{step_s / arguments.checks:.2f}", f"{check_s / arguments.checks:.2f}"),
                *(num_evaluations // arguments.checks, interval, f"{share:.2%}", f"{ratio:.2f}"),
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
