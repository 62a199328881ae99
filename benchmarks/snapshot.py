"""Snapshots of a large adapter with its optimizer, against a plain `torch.clone` of the same tensors.

    python -m benchmarks.snapshot [--rounds 7] [--pairs 168]

Rank-64 LoRA of CogVideoX-5B: 168 pairs of A (64, 3072) and B (3072, 64) with AdamW's two moments, 66 M fp32
parameters in all. Each round takes two snapshots, which allocate, then a third into the first one's buffers,
clones every tensor on its device, and restores; so other work on the machine slows all of them, and the medians are
compared. Freed memory goes back to the system before each (glibc's `malloc_trim`), so what allocates
pays for its pages. Times on CUDA run until the device is done, and for `take` also until it returns.
"""

import argparse
import ctypes
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from dit_lora.guard.snapshots import Snapshots

RANK, WIDTH = 64, 3072


def build_state(device: torch.device, pairs: int) -> dict[str, torch.Tensor]:
    """The adapter and AdamW's state after one step."""
    torch.manual_seed(0)
    shapes = {"A": (RANK, WIDTH), "B": (WIDTH, RANK)}
    parameters = {
        f"{pair}.{name}": torch.nn.Parameter(torch.randn(shape, device=device))
        for pair in range(pairs)
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moments = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {**parameters, **moments}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=168, help="of A and B; CogVideoX-5B has 168")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    state = build_state(device, arguments.pairs)
    seconds = measure(state, device, arguments.rounds)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    trained = sum(t.numel() for t in state.values() if isinstance(t, torch.nn.Parameter))
    clone = statistics.median(seconds["torch.clone"])
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}, {device.type}: "
        f"{trained / 1e6:.2f} M parameters, {nbytes / 1e9:.3f} GB in {len(state)} tensors, "
        f"median of {arguments.rounds}"
    )
    print("| | s | GB/s | lowest to highest, s | x torch.clone |\n|---|---:|---:|---:|---:|")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        rate, ratio = nbytes / 1e9 / median, median / clone
        print(f"| {name} | {median:.3f} | {rate:.2f} | {spread} | {ratio:.2f} |")


def measure(state: dict[str, torch.Tensor], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each action in each round; one round more, the first, is dropped."""
    seconds = defaultdict(list)
    for _ in range(rounds + 1):
        for name, value in one_round(state, device).items():
            seconds[name].append(value)
    return {name: values[1:] for name, values in seconds.items()}


def one_round(state: dict[str, torch.Tensor], device: torch.device) -> dict[str, float]:
    snapshots = Snapshots(lambda: state, interval_steps=1)
    seconds = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        wait(device)
        began = time.perf_counter()
        action()
        returned = time.perf_counter() - began
        wait(device)
        seconds[name] = time.perf_counter() - began
        if device.type == "cuda" and name.startswith("take"):
            seconds[f"{name}, until it returns"] = returned

    timed("take, allocating", lambda: snapshots.take_snapshot(1))
    snapshots.take_snapshot(2)
    timed("take, into used buffers", lambda: snapshots.take_snapshot(3))
    timed("torch.clone", lambda: [tensor.detach().clone() for tensor in state.values()])
    timed("not_finite", lambda: snapshots.find_nonfinite(3))
    timed("restore", lambda: snapshots.restore_snapshot(3))
    return seconds


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
