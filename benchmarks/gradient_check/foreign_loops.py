"""Check gradients in loops of other people: planted faults must be found, and healthy loops must not be reported.

    python -m benchmarks.gradient_check.foreign_loops [--loops plain/adamw training/gan] [--all] [--only detached]
        [--results FILE.jsonl] [--minutes 3]

Each of the loops in benchmarks/loops runs under the guard, with a check in every second step. A fault is planted in
the model's backward pass from the first step that was found healthy on; every value stays finite. With `--all`, all
loops run, without faults: `false alarm` must not occur. Rows in FILE are not computed again.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gradient_check.stored_rows import StoredRows
from dit_lora.config.recovery_settings import LoopConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.calls.gradient_check import EVENT_KIND
from dit_lora.guard.attach.run_script import run_script

LOOPS_FOLDER = Path(__file__).parents[1] / "loops"
LOOPS = (
    "plain/adamw",
    "plain/accumulation",
    "plain/autocast_bf16",
    "plain/clip_each_micro_batch",
    "models/checkpoint_nonreentrant",
    "models/adapter_peft",
    "optim/closure",
    "training/gan",
    "trainers/accelerate_accumulate",
    "trainers/trainer",
)
"""One of each kind: loops in which faults are planted."""
_TIMEOUT_S = 600
_HEALTHY = "none"


@dataclass
class PlantedFault:
    """A fault in the backward pass of one layer, from the first healthy check on."""

    kind: str
    layers: list[nn.Module] = field(default_factory=list)
    """Layers with trained weights, in the order of their calls."""
    is_on: bool = False

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Record a layer, or detach its input."""
        has_weights = not any(module.children()) and any(p.requires_grad for p in module.parameters())
        if has_weights and not any(module is layer for layer in self.layers) and not self.is_on:
            self.layers.append(module)
        if self.kind != "detached" or not self._is_target(module):
            return None
        return tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)

    def after_forward(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """Give the same value another gradient."""
        if not self._is_target(module) or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return None
        if self.kind == "scaled":
            return output.detach() + 1.1 * (output - output.detach())
        if self.kind == "disturbed":
            generator = torch.Generator().manual_seed(0)
            noise = 1 + 0.3 * torch.randn(output.shape, generator=generator, dtype=output.dtype)
            return output.detach() + noise * (output - output.detach())
        return None

    def _is_target(self, module: nn.Module) -> bool:
        return self.is_on and bool(self.layers) and module is self.layers[-1]

    def skip_clearing(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: torch.optim.Optimizer | nn.Module, set_to_none: bool = True) -> None:
            if not (self.is_on and self.kind == "stale"):
                original(owner, set_to_none)

        return zero_grad

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        # Trainers call that of the model.
        clearing = {owner: owner.zero_grad for owner in (torch.optim.Optimizer, nn.Module)}
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self.before_forward),
            nn.modules.module.register_module_forward_hook(self.after_forward),
        ]
        for owner, zero_grad in clearing.items():
            owner.zero_grad = self.skip_clearing(zero_grad)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for owner, zero_grad in clearing.items():
                owner.zero_grad = zero_grad  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


FAULTS = {
    "scaled": "a layer's backward 10 % too large",
    "disturbed": "a layer's backward with 30 % noise",
    "detached": "a layer's input detached",
    "stale": "gradients not cleared",
}


def run_loop(name: str, fault: str) -> dict[str, Any]:
    """Run a loop under the guard in this process, in a new folder. Returns a row of the results."""
    planted = PlantedFault(fault)
    lines: list[str] = []

    def log(_host: LoopProcessContext, line: str) -> None:
        lines.append(line)
        # From now on: the same code was healthy before.
        planted.is_on |= fault != _HEALTHY and "the gradient agrees" in line

    LoopProcessContext.log = log  # type: ignore[method-assign]
    config = LoopConfig(gradient_every=2, snapshot_every=0, bundles=0)
    error = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), planted.install():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                run_script(str(LOOPS_FOLDER / f"{name}.py"), [], config=config, folder=Path(folder))
            # Some loops end with an error on purpose; any other ends the process, and the row is `not run`.
            except (DitLoraError, RuntimeError, ValueError, SystemExit) as raised:
                error = f"{type(raised).__name__}: {raised}"
        events = _read_events(Path(folder))
    return {
        "loop": name,
        "fault": fault,
        # No loop fails without the guard.
        "outcome": "ended with an error" if error else name_outcome(fault, events, lines, is_planted=planted.is_on),
        "events": [event["verdict"] for event in events],
        "lines": lines,
        "error": error,
    }


def _read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in events if event["kind"] == EVENT_KIND]


def name_outcome(fault: str, events: Sequence[dict[str, Any]], lines: Sequence[str], *, is_planted: bool) -> str:
    """The result of one run."""
    if fault == _HEALTHY:
        if events:
            return "false alarm"
        return "agrees" if any("the gradient agrees" in line for line in lines) else "cannot tell"
    if not is_planted:
        return "cannot tell"
    if events:
        return "found"
    return "cannot tell" if any("cannot be checked" in line for line in lines) else "missed"


def _run_in_child(name: str, fault: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send(run_loop(name, fault))
    connection.close()
    # Threads of a loop must not keep the process.
    os._exit(0)


def run_apart(name: str, fault: str) -> dict[str, Any]:
    """Run a loop in a forked process, which has imported torch already."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(name, fault, sender))
    process.start()
    sender.close()
    row: dict[str, Any] = {"loop": name, "fault": fault, "outcome": "not run", "events": [], "lines": []}
    if receiver.poll(_TIMEOUT_S):
        with contextlib.suppress(EOFError):
            row = receiver.recv()
    process.kill()
    process.join()
    return row


def list_all_loops() -> list[str]:
    """Loops of one process, by name."""
    names = [path.relative_to(LOOPS_FOLDER).with_suffix("").as_posix() for path in sorted(LOOPS_FOLDER.glob("*/*.py"))]
    return [name for name in names if not name.startswith(("composer/", "ranks/")) and "__init__" not in name]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", default=LOOPS)
    parser.add_argument("--all", action="store_true", help="all loops, without faults")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults with these words in their name")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps rows for the next call")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after so many minutes")
    arguments = parser.parse_args(argv)
    stored = StoredRows(arguments.results, arguments.minutes)
    loops = list_all_loops() if arguments.all else arguments.loops
    faults = [_HEALTHY] if arguments.all else [f for f in (_HEALTHY, *FAULTS) if arguments.only in f]
    counts: Counter[str] = Counter()
    for name, fault in ((name, fault) for name in loops for fault in faults):
        if not stored.has(name, fault):
            if stored.is_time_over:
                print("time is over: the same command goes on from here")
                break
            stored.add((name, fault), run_apart(name, fault))
        row = stored.get(name, fault)
        counts[row["outcome"]] += 1
        layers = ", ".join(event.get("module", event["cause"]) for event in row["events"][:1])
        print(f"| {name} | {FAULTS.get(fault, 'healthy')} | {row['outcome']} | {layers} |", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["false alarm"] or counts["ended with an error"] else 0


if __name__ == "__main__":
    sys.exit(main())
