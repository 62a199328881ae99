"""What the guard costs: a healthy step of a stock loop with and without it, and the diagnosis of one event.

    python -m benchmarks.guard [--pairs 50] [--batch 3] [--faults NAME ...]

Healthy: two equal models train side by side in plain accelerate loops (non-fused AdamW, as stock scripts have),
one of them guarded, alternating step by step. Diagnosis: the seconds that events of the fault suite took; `--faults`
are patterns of its names.
"""

import argparse
import fnmatch
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from benchmarks.faults.suite import catalog
from benchmarks.faults.target_table import DEFAULT, targets_for
from benchmarks.faults.world import World
from benchmarks.overhead import build_model, fixed_batches
from dit_lora.data.loading.batch import Batch
from dit_lora.guard.attach.guard import Guard

DIAGNOSED = ("*one sample*", "*kernel that gives NaN", "*flash*NaN", "*bf16", "NaN in an adapter weight")


def stock_step(accelerator: Accelerator, *, guarded: bool) -> Callable[[Batch], float]:
    """One model, its optimizer, and a function that trains it on a batch and says how long that took."""
    model, _ = build_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    prepared_model, optimizer = accelerator.prepare(model, optimizer)
    if guarded:
        Guard.attach(accelerator, prepared_model, optimizer)

    def step(batch: Batch) -> float:
        began = time.perf_counter()
        noise = torch.randn_like(batch.tensors["latent_mean"]).transpose(1, 2)
        output = prepared_model(
            hidden_states=noise,
            encoder_hidden_states=batch.tensors["prompt_embeds"],
            timestep=torch.randint(0, 1000, (len(batch.ids),)),
            return_dict=False,
        )[0]
        accelerator.backward((output - noise).square().mean())
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def healthy(pairs: int, size: int) -> tuple[list[float], list[float]]:
    """Seconds of bare and guarded steps; the first three of each are dropped."""
    # Two accelerators: a guard wraps the methods of its own.
    bare = stock_step(Accelerator(cpu=True), guarded=False)
    guarded = stock_step(Accelerator(cpu=True), guarded=True)
    batches = fixed_batches(size)
    times: tuple[list[float], list[float]] = ([], [])
    for number in tqdm(range(pairs + 3), desc="pairs of steps"):
        batch = next(batches)
        order = [(0, bare), (1, guarded)]
        for loop_name, step in order if number % 2 else order[::-1]:
            times[loop_name].append(step(batch))
    return times[0][3:], times[1][3:]


def diagnosed(folder: str, patterns: Sequence[str]) -> dict[str, float]:
    """Seconds from the trip to the action, of the slowest event of each cause."""
    world = World(Path(folder), Accelerator(cpu=True), targets_for(DEFAULT))
    world.reference("clean", ())
    slowest: dict[str, float] = {}
    for fault in catalog(world.targets):
        if fault.play is None and any(fnmatch.fnmatchcase(fault.name, name) for name in patterns):
            observation = world.observe(fault.name, fault.arm, fault.overrides)
            for event in observation.events:
                cause = event["verdict"]["cause"]
                slowest[cause] = max(slowest.get(cause, 0.0), event["seconds"])
    return slowest


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--faults", nargs="+", default=DIAGNOSED, metavar="NAME")
    arguments = parser.parse_args(argv)
    bare, guarded = healthy(arguments.pairs, arguments.batch)
    ratios = [guarded_time / bare_time for guarded_time, bare_time in zip(guarded, bare, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"stock loop: {1e3 * statistics.median(bare):.1f} ms a step, bare")
    print(f"guarded:    {1e3 * statistics.median(guarded):.1f} ms a step")
    print(f"ratio of medians: {statistics.median(guarded) / statistics.median(bare):.4f}")
    print(f"ratio pair by pair: median {quartiles[1]:.4f}, quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        for cause, seconds in sorted(diagnosed(folder, arguments.faults).items()):
            print(f"diagnosis of {cause}: {seconds:.2f} s at most")


if __name__ == "__main__":
    main()
