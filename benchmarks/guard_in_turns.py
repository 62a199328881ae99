"""What the guard costs a whole step on one model: the same fused model with it and without it, in turns.

    python -m benchmarks.guard_in_turns [--model dit-xl2-b32] [--rounds 8] [--steps 6] [--device cuda|cpu]

Each round takes as many steps without the guard as with it, in alternating order, so that a machine whose speed
drifts favours neither. Printed: the median and the range of the rounds' ratios.
`--model tiny-sana` runs on a CPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.step import build_batch
from benchmarks.step_models import MODELS, TINY
from benchmarks.step_settings import SETTINGS, Steps, build_steps

WARM_UP = 3


def main(argv: Sequence[str] | None = None) -> int:
    models = {**MODELS, **TINY}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models, default="dit-xl2-b32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of each kind in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    device = torch.device(args.device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    entry = models[args.model]
    model = entry.build(device)
    batches = [build_batch(model, entry, number, device) for number in range(args.steps + 1)]
    fused = next(setting for setting in SETTINGS if setting.name == "ours")
    guarded = next(setting for setting in SETTINGS if setting.name == "ours, guard")
    # The model is fused once: the two kinds of step share its patches and adapters, each with an optimizer.
    unguarded_steps = build_steps(model, entry, fused, batches, wait)
    guarded_steps = build_steps(model, entry, guarded, batches, wait, fuse_model=False)

    def measure(steps: Steps) -> float:
        wait()
        began = time.perf_counter()
        steps.take(0, args.steps - 1, lambda *_: None)
        wait()
        return (time.perf_counter() - began) / args.steps

    ratios, bare_seconds = [], []
    for number in range(args.rounds + WARM_UP):
        pair = (unguarded_steps, guarded_steps) if number % 2 == 0 else (guarded_steps, unguarded_steps)
        seconds = {id(steps): measure(steps) for steps in pair}
        if number >= WARM_UP:
            bare_seconds.append(seconds[id(unguarded_steps)])
            ratios.append(seconds[id(guarded_steps)] / seconds[id(unguarded_steps)])
            print(f"round {number - WARM_UP + 1}: {bare_seconds[-1]:.4f} s, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{args.model}: {statistics.median(bare_seconds):.4f} s a step without the guard, with it "
        f"{statistics.median(ratios):.3f} times that (median of {args.rounds} rounds; "
        f"{min(ratios):.3f} to {max(ratios):.3f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
