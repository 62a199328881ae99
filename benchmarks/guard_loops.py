"""Host time that the guard adds to a healthy step of a loop that is not ours, beside what finding a NaN costs at the least.

    python -m benchmarks.guard_loops [--tensors 20 200 800] [--steps 300]

Two equal small models train in turns, one of them guarded; a row says by how much the guarded step's median and fastest are
longer. On a CPU that holds the arithmetic too, so the last column is torch's own largest magnitudes of the same gradients
and weights, which a gradient norm for clipping costs once more.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.guard import Guard

WIDTH = 8
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[20, 200, 800])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| loop | trained tensors | step, us | on top, us: median | fastest | largest magnitudes, us |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for count in args.tensors:
        for name, made in (("plain PyTorch", plain), ("Accelerate", accelerated)):
            bare, _ = made(count, guarded=False)
            guarded, parameters = made(count, guarded=True)
            times = in_turns((bare, guarded), args.steps)
            off, on = times
            median = statistics.median(on) - statistics.median(off)
            floor = min(in_turns((lambda p=parameters: magnitudes(p),), args.steps)[0])
            print(
                f"| {name} | {count} | {statistics.median(off):.0f} | {median:.0f} | {min(on) - min(off):.0f} | {floor:.0f} |",
                flush=True,
            )


def in_turns(steps: tuple[Step, ...], rounds: int) -> list[list[float]]:
    """Return the microseconds of each step's rounds, without the first tenth."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            began = time.perf_counter()
            step()
            taken.append((time.perf_counter() - began) * 1e6)
    return [taken[rounds // 10 :] for taken in times]


def model_of(tensors: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)))


def plain(tensors: int, *, guarded: bool) -> tuple[Step, list[nn.Parameter]]:
    """Return a step of a loop in plain PyTorch, and what it trains."""
    model = model_of(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if guarded:
        Guard.watch(model, optimizer)
    x = torch.randn(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, list(model.parameters())


def accelerated(tensors: int, *, guarded: bool) -> tuple[Step, list[nn.Parameter]]:
    """Return a step of an Accelerate loop that clips, and what it trains."""
    bare = model_of(tensors)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, foreach=True)
    own = Accelerator(cpu=True)
    model, prepared = own.prepare(bare, optimizer)
    if guarded:
        Guard.attach(own, model, prepared)
    x = torch.randn(4, WIDTH)

    def step() -> None:
        prepared.zero_grad()
        own.backward(model(x).square().mean())
        own.clip_grad_norm_(bare.parameters(), 1.0)
        prepared.step()

    return step, list(bare.parameters())


def magnitudes(parameters: list[nn.Parameter]) -> None:
    """Find the largest magnitude of every gradient and weight, and read them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm([*grads, *(p.detach() for p in parameters)], float("inf"))
    torch.stack(norms).tolist()


if __name__ == "__main__":
    main()
