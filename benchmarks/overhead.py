"""What our training step costs: a bare loop, our loop without its gate, and our loop, in one process.

    python -m benchmarks.overhead [--rounds 50] [--batch 3]

Bare: the family's losses, backward, torch's `clip_grad_norm_`, AdamW. Ours: `dit_lora.training.loop.train` with
generators, gather of metrics, metrics.jsonl, progress bar, gate and replayable micro-batches. Without gate: the same
loop without the last two. Each round takes one step of each, in random order, so that other work on the machine slows
all three. The cost of snapshots and statistics is timed separately and spread over the steps between them.
"""

import argparse
import io
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from diffusers import CogVideoXTransformer3DModel
from tqdm import tqdm

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.config.recipe import GuardConfig, LoraConfig, ModelConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.environment.progress_bar import hide_progress_bars
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training import loop as training_loop
from dit_lora.training.distributed import engine as training_engine
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.journal import Journal, build_metrics_line
from dit_lora.training.loop import LoopCallbacks, TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule, build_optimizer
from dit_lora.training.optim.state import optimizer_state
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure
from dit_lora.training.step import StepResult
from dit_lora.training.tasks.diffusion.task import average_by_timestep

FAMILY = get_family("cogvideox")
OPTIM = OptimConfig(groups=GroupsConfig(adapter=GroupConfig(lr=1e-4)))
GUARD = GuardConfig()
WARM_UP = 3
WATCHED = math.lcm(GUARD.snapshot_every, GUARD.monitor_every)
WATCHED_ROUNDS = 5
"""In the last of so many rounds a step with a snapshot and statistics is timed too."""
Step = Callable[[int], float]
"""Takes the step of a number; the seconds it took."""


class NoRecovery:
    """Ends the benchmark if a step fails, since its times would mean nothing."""

    lr_scale = 1.0

    def recover(self, failure: RunFailure) -> int:
        raise RuntimeError(f"{failure.kind} in step {failure.step}")


@dataclass
class TimedCallbacks(LoopCallbacks):
    """Records when a step asks for its data.

    A run enters `train` once and goes through all modules to set their mode; here each step enters it.
    """

    batches: Iterator[Batch]
    report: Callable[[StepResult], None]
    began: float = 0.0

    def load_batches(self, start_step: int) -> Iterator[Batch]:
        self.began = time.perf_counter()
        return self.batches

    def on_step(self, result: StepResult) -> None:
        self.report(result)


def build_model() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        time_embed_dim=64,
        text_embed_dim=32,
        num_layers=4,
        sample_width=12,
        sample_height=8,
        sample_frames=9,
    ).requires_grad_(False)
    attach_lora(transformer, LoraConfig(rank=16), FAMILY.lora_targets, seed=0)
    groups = build_recipe_groups(transformer, OPTIM.groups, FAMILY.group_patterns)
    return transformer.train(), build_optimizer(groups, OPTIM)


def fixed_batches(size: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "latent_mean": torch.randn(size, 4, 3, 8, 12, generator=generator),
        "latent_logvar": torch.full((size, 4, 3, 8, 12), -6.0),
        "prompt_embeds": torch.randn(size, 226, 32, generator=generator),
    }
    position = 0
    while True:
        draws = tuple(range(position, position + size))
        yield Batch(tuple(map(str, draws)), draws, tensors)
        position += size


def _wait(accelerator: Accelerator) -> None:
    """Wait until a GPU has done the step: ours reads its row, a bare one would only launch it."""
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)


def bare_loop(checkpoint: Checkpoint, accelerator: Accelerator, size: int) -> Step:
    model, optimizer = build_model()
    model.to(accelerator.device)
    batches = fixed_batches(size)

    def step(number: int) -> float:
        began = time.perf_counter()
        batch = next(batches).to(accelerator.device)
        output = checkpoint.losses(model, batch.tensors, RandomStreams(42, batch.sample_seeds))
        output.losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(accelerator)
        return time.perf_counter() - began

    return step


def our_loop(checkpoint: Checkpoint, accelerator: Accelerator, size: int, folder: Path, *, guarded: bool) -> Step:
    model, optimizer = build_model()
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    snapshots = Snapshots(
        lambda: {**get_trainable_parameters(model), **optimizer_state(optimizer)},
        interval_steps=GUARD.snapshot_every,
    )
    watcher = StepMonitor(snapshots, Monitor(model, interval_steps=GUARD.monitor_every if guarded else 0))
    folder.mkdir()
    journal, bar = Journal(folder, start_step=0), tqdm(file=io.StringIO(), position=0)

    def on_step(result: StepResult) -> None:
        line = build_metrics_line(
            result, {"loss_by_timestep": average_by_timestep(result, checkpoint.denoiser.timestep_range)}
        )
        journal.write_step(line, watcher.collect_statistics(result.step))
        bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
        bar.update()
        if guarded and snapshots.is_snapshot_due(result.step):
            snapshots.take_snapshot(result.step)

    callbacks = TimedCallbacks(fixed_batches(size), on_step)
    loop = TrainingLoopComponents(
        engine=Engine(accelerator, prepared_model, prepared_optimizer),
        loss_function=lambda m, batch, streams: checkpoint.losses(m, batch.tensors, streams),
        schedule=LearningRateSchedule(OPTIM, 1_000_000),
        optim=OPTIM,
        accumulate=1,
        seed=42,
        recovery=NoRecovery(),
        watcher=watcher,
        callbacks=callbacks,
    )

    def step(number: int) -> float:
        with nullcontext() if guarded else without_gate():
            train(loop, start_step=number - 1, steps=number)
            _wait(accelerator)
            return time.perf_counter() - callbacks.began

    return step


class NotReplayable:
    """Keeps nothing of a micro-batch."""

    @staticmethod
    def from_batch(*_: Any) -> None:
        return


class OpenGate:
    """A gate that checks nothing."""

    local_flags = torch.zeros(3, dtype=torch.bool)  # of one micro-step

    def record_losses(self, losses: torch.Tensor, *, bad_data: bool) -> None:
        return

    def record_gradient_norms(self, norms: Mapping[str, torch.Tensor]) -> None:
        return

    def reduce_flags(self) -> None:
        return


@contextmanager
def without_gate() -> Iterator[None]:
    """Inside, the loop neither checks anything nor keeps what a replay needs."""
    healthy = torch.zeros((), dtype=torch.bool)
    replacements: dict[str, Callable[..., Any]] = {
        "Gate": lambda accelerator: OpenGate(),
        "ReplayableBatch": NotReplayable,
    }
    in_engine: dict[str, Callable[..., Any]] = {
        "take_step_unless_bad": lambda optimizer, bad: optimizer.step(),
        "has_nonfinite_weights": lambda optimizer: healthy,
    }
    with ExitStack() as stack:
        for name, function in replacements.items():
            stack.enter_context(mock.patch.object(training_loop, name, function))
        for name, function in in_engine.items():
            stack.enter_context(mock.patch.object(training_engine, name, function))
        yield


@dataclass
class Times:
    """Seconds of steps, by round."""

    bare: list[float] = field(default_factory=list)
    unguarded: list[float] = field(default_factory=list)
    guarded: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    """Seconds of guarded steps that also take a snapshot and statistics."""


def measure(checkpoint: Checkpoint, folder: Path, rounds: int, size: int) -> Times:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    bare = bare_loop(checkpoint, accelerator, size)
    unguarded = our_loop(checkpoint, accelerator, size, folder / "unguarded", guarded=False)
    guarded = our_loop(checkpoint, accelerator, size, folder / "guarded", guarded=True)
    for number in range(1, WARM_UP + 1):
        for step in (bare, unguarded, guarded):
            step(number)
    guarded(WATCHED)
    times, order = Times(), random.Random(0)
    for turn in tqdm(range(rounds), desc="rounds", position=0):
        number = (turn + 1) * WATCHED + 1
        kinds = [(bare, times.bare), (unguarded, times.unguarded), (guarded, times.guarded)]
        for step, seconds in order.sample(kinds, 3):
            seconds.append(step(number))
        if turn % WATCHED_ROUNDS == WATCHED_ROUNDS - 1:
            times.watched.append(guarded(number - 1 + WATCHED))
    return times


def ratio(durations: Sequence[float], reference_durations: Sequence[float]) -> str:
    """Of medians; and of the steps of each round, their median with its standard error."""
    ratios = [measured / reference for measured, reference in zip(durations, reference_durations, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    # 1.349 sigma lie between the quartiles of a normal; its median's error is 1.253 sigma / sqrt(n).
    error = 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios))
    overall = statistics.median(durations) / statistics.median(reference_durations)
    return f"{overall:.4f} (by round {middle:.4f} +- {error:.4f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=3)
    arguments = parser.parse_args(argv)
    if arguments.rounds < WATCHED_ROUNDS:
        parser.error(f"--rounds must be at least {WATCHED_ROUNDS}; received {arguments.rounds}")
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        FAMILY.build_tiny_checkpoint("cogvideox-2b", Path(folder) / "model", 0)
        checkpoint = FAMILY.open(ModelConfig(family="cogvideox", path=f"{folder}/model"))
        times = measure(checkpoint, Path(folder), arguments.rounds, arguments.batch)
    bare, guarded = statistics.median(times.bare), statistics.median(times.guarded)
    watched = (statistics.median(times.watched) - guarded) / WATCHED
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}")
    print(f"bare loop {1e3 * bare:.1f} ms a step, ours {1e3 * guarded:.1f} ms (medians of {arguments.rounds})")
    print(f"ours over bare:              {ratio(times.guarded, times.bare)}")
    print(f"ours over ours without gate: {ratio(times.guarded, times.unguarded)}")
    print(f"ours without gate over bare: {ratio(times.unguarded, times.bare)}")
    print(
        f"a snapshot and statistics every {WATCHED} steps: {1e3 * watched:.2f} ms a step, "
        f"a further {watched / guarded:.4f}"
    )


if __name__ == "__main__":
    main()
