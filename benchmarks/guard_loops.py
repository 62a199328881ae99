"""CPU time and memory that the guard adds to a healthy step of somebody else's loop.

    python -m benchmarks.guard_loops [--tensors 20 200 800] [--rounds 30]

The bare and the guarded loop run in separate processes on the same core, in turns of 20 steps: a guard in the same
process would slow the bare loop too. Times are CPU time, which other processes disturb less than wall time. The peer,
in the bare loop's process, is the cost of finding a NaN with torch's functions: a norm of every gradient and weight,
as clipping takes it. A third process runs the loop with the fewest operations that a guard needs, written by hand: it
is the limit that Python can reach. Memory is that of all live tensors after a step, in multiples of the trained
weights: with AdamW the snapshot is three times the weights.
"""

import argparse
import gc
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from operator import attrgetter

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.guard import Guard

WIDTH = 8
STEPS_IN_TURN = 20
Step = Callable[[], None]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[20, 200, 800])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    print(
        "| loop | trained tensors | step, us | on top, us: median | mean | on top by hand, us | peer, us "
        "| ratio to the peer | memory on top, x weights |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for count in args.tensors:
        for name, make in LOOPS.items():
            print(f"| {name} | {count} | {row(make, count, args.rounds)} |", flush=True)


def row(make: Callable[..., tuple[Step, nn.Module]], count: int, rounds: int) -> str:
    """Run a loop bare, guarded and checked by hand in turns; returns the last seven columns."""
    runners = [Runner(make, count, False), Runner(make, count, True)]
    if make is plain:
        runners.append(Runner(checked_by_hand, count, True))
    steps: list[list[float]] = [[] for _ in runners]
    peers: list[float] = []
    for _ in range(rounds):
        for runner, times in zip(runners, steps, strict=True):
            times += runner.ask("step")
        peers += runners[0].ask("peer")
    snapshot_bytes = [runner.ask("bytes")[0] for runner in runners[:2]]
    weights = runners[0].ask("weights")[0]
    for runner in runners:
        runner.end()
    bare, guarded = steps[:2]
    peer = statistics.median(peers)
    median = statistics.median(guarded) - statistics.median(bare)
    by_hand = f"{statistics.median(steps[2]) - statistics.median(bare):.0f}" if len(steps) > 2 else ""
    mean = statistics.mean(guarded) - statistics.mean(bare)
    memory = (snapshot_bytes[1] - snapshot_bytes[0]) / weights
    times = f"{statistics.median(bare):.0f} | {median:.0f} | {mean:.0f} | {by_hand} | {peer:.0f}"
    return f"{times} | {median / peer:.2f} | {memory:.1f}"


class Runner:
    """A loop in a separate process, which runs steps on request."""

    def __init__(self, make: Callable[..., tuple[Step, nn.Module]], count: int, guarded: bool) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=serve, args=(theirs, make, count, guarded), daemon=True)
        self._process.start()

    def ask(self, request: str) -> list[float]:
        self._ours.send(request)
        answer: list[float] = self._ours.recv()
        return answer

    def end(self) -> None:
        self._ours.send("end")
        self._process.join()


def serve(
    connection: Connection,
    make: Callable[..., tuple[Step, nn.Module]],
    count: int,
    guarded: bool,
) -> None:
    """Answer a runner's questions until it ends."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    step, model = make(count, guarded=guarded)
    for _ in range(STEPS_IN_TURN):
        step()
    while (question := connection.recv()) != "end":
        if question == "step":
            connection.send([timed(step) for _ in range(STEPS_IN_TURN)])
        elif question == "peer":
            connection.send([timed(lambda: norms(model)) for _ in range(STEPS_IN_TURN)])
        elif question == "bytes":
            connection.send([float(tensor_bytes())])
        else:
            connection.send([float(sum(p.nbytes for p in model.parameters()))])


def timed(act: Step) -> float:
    """Microseconds of CPU time."""
    began = time.thread_time()
    act()
    return (time.thread_time() - began) * 1e6


def norms(model: nn.Module) -> None:
    """Find the norm of every gradient and weight, and read them."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    values = [*grads, *(p.detach() for p in model.parameters())]
    torch.stack(torch._foreach_norm(values, 2)).tolist()


def tensor_bytes() -> int:
    """Bytes in the memory of all tensors that are alive."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def model_of(tensors: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)))


def plain(tensors: int, *, guarded: bool) -> tuple[Step, nn.Module]:
    """A step of a loop in plain PyTorch, and its model."""
    model = model_of(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if guarded:
        Guard.watch(model, optimizer)
    x = torch.randn(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model


def checked_by_hand(tensors: int, *, guarded: bool) -> tuple[Step, nn.Module]:
    """A step of the plain loop with the tensor operations that any guard needs, and its model.

    Gradients are checked before the step and weights after it; the random state, input, output, the output's gradient
    and the loss are kept for a replay. Nothing is decided, counted, named or protected from errors.
    """
    model = model_of(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    parameters = list(model.parameters())
    # Tensors of one shape are joined without flattening.
    groups = [[p for p in parameters if p.ndim == ndim] for ndim in (1, 2)]
    weights = [p.detach().view(-1) for p in parameters]
    x = torch.randn(4, WIDTH)
    get_gradient = attrgetter("grad")
    recorded: list[torch.Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        recorded[:] = [torch.get_rng_state(), x.detach()]
        output = model(x)
        output.register_hook(lambda gradient: recorded.append(gradient.detach()))
        loss = output.square().mean()
        recorded.extend((output.detach(), loss.detach()))
        loss.backward()
        norms = [torch.linalg.vector_norm(torch.cat(list(map(get_gradient, group)))) for group in groups]
        assert all(math.isfinite(float(norm)) for norm in norms)
        optimizer.step()
        assert math.isfinite(float(torch.linalg.vector_norm(torch.cat(weights))))

    return step, model


def accelerated(tensors: int, *, guarded: bool) -> tuple[Step, nn.Module]:
    """A step of an Accelerate loop that clips, and its model."""
    bare = model_of(tensors)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, foreach=True)
    accelerator = Accelerator(cpu=True)
    model, prepared_optimizer = accelerator.prepare(bare, optimizer)
    if guarded:
        Guard.attach(accelerator, model, prepared_optimizer)
    x = torch.randn(4, WIDTH)

    def step() -> None:
        prepared_optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(bare.parameters(), 1.0)
        prepared_optimizer.step()

    return step, bare


LOOPS = {"plain PyTorch": plain, "Accelerate": accelerated}


if __name__ == "__main__":
    main()
