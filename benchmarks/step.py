"""Our training step against a bare loop, as a ratio, on the same model and batch in one process.

    python -m benchmarks.step [--pairs 50] [--batch 3]

Bare: the family's losses, backward, torch's `clip_grad_norm_`, AdamW. Ours: `dit_lora.training.loop.train` with
gate, generators, gather of metrics, metrics.jsonl, progress bar, and the guard's snapshots and statistics as often
as by default. Both alternate step by step, so that whatever else the machine does hits both; the medians are
compared.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import CogVideoXTransformer3DModel
from tqdm import tqdm

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import recipe_groups
from dit_lora.config import (
    GroupConfig,
    GroupsConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
)
from dit_lora.data.loader import Batch
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.numerics.gate import Trip
from dit_lora.numerics.monitor import Monitor
from dit_lora.numerics.replay import MicroBatch
from dit_lora.numerics.snapshot import Snapshots
from dit_lora.numerics.streams import Streams
from dit_lora.training.checkpoint import optimizer_state, trainable_state
from dit_lora.training.journal import Journal, metrics_line
from dit_lora.training.loop import Loop, StepResult, train
from dit_lora.training.optimizer import build_optimizer, build_schedule
from dit_lora.training.runtime import quiet_libraries
from dit_lora.training.watch import StepWatcher

FAMILY = get_family("cogvideox")
OPTIM = OptimConfig(groups=GroupsConfig(adapter=GroupConfig(lr=1e-4)))
GUARD = GuardConfig()


class NoRecovery:
    """A benchmark whose step trips is no benchmark."""

    def recover(
        self, trip: Trip, micro_batches: Sequence[MicroBatch], control: MicroBatch | None
    ) -> int:
        raise RuntimeError(f"{trip}")


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
    groups = recipe_groups(transformer, OPTIM.groups, FAMILY.group_patterns)
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


def watching(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> StepWatcher:
    snapshots = Snapshots(
        lambda: {**trainable_state(model), **optimizer_state(optimizer)},
        every=GUARD.snapshot_every,
    )
    return StepWatcher(snapshots, Monitor(model, every=GUARD.monitor_every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=3)
    arguments = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        FAMILY.build_tiny("cogvideox-2b", Path(folder) / "model", 0)
        checkpoint = FAMILY.open(ModelConfig(family="cogvideox", path=f"{folder}/model"))
        bare, ours = measure(checkpoint, Path(folder), arguments.pairs, arguments.batch)
    mean_bare, mean_ours = statistics.median(bare), statistics.median(ours)
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}")
    print(f"bare loop: {1e3 * mean_bare:.1f} ms a step (median of {arguments.pairs})")
    print(f"dit-lora:  {1e3 * mean_ours:.1f} ms a step")
    print(f"ratio of medians: {mean_ours / mean_bare:.4f}")
    print(
        f"ratio pair by pair: median {quartiles[1]:.4f}, quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}"
    )


def bare_step(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    batches: Iterator[Batch],
    device: torch.device,
) -> float:
    """Seconds of a step without us."""
    began = time.perf_counter()
    batch = next(batches).to(device)
    output = checkpoint.losses(model, batch.tensors, Streams(42, batch.draws))
    output.losses.mean().backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def measure(
    checkpoint: Checkpoint, folder: Path, pairs: int, batch_size: int
) -> tuple[list[float], list[float]]:
    """Seconds of each bare and each of our steps, alternating; the first three of each are dropped."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    bare_model, bare_optimizer = build_model()
    bare_model.to(accelerator.device)
    ours_model, ours_optimizer = build_model()
    model, optimizer = accelerator.prepare(ours_model, ours_optimizer)
    bare_batches = fixed_batches(batch_size)
    warm_up, bare, ours = 3, [], []
    steps = pairs + warm_up

    watcher = watching(ours_model, ours_optimizer)
    journal = Journal(folder, start_step=0)
    bar = tqdm(total=steps, desc="pairs of steps")
    ended = [0.0]

    def on_step(result: StepResult) -> None:
        modules = watcher.statistics(result.step)
        journal.step(metrics_line(result, checkpoint.train_timesteps), modules)
        bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
        bar.update()
        if watcher.snapshots.due(result.step):
            watcher.snapshots.take(result.step)
        ours.append(time.perf_counter() - ended[0])
        bare.append(
            bare_step(checkpoint, bare_model, bare_optimizer, bare_batches, accelerator.device)
        )
        ended[0] = time.perf_counter()

    loop = Loop(
        accelerator=accelerator,
        model=model,
        losses=lambda m, batch, streams: checkpoint.losses(m, batch.tensors, streams),
        optimizer=optimizer,
        schedule=build_schedule(OPTIM, steps),
        optim=OPTIM,
        accumulate=1,
        seed=42,
        recovery=NoRecovery(),
        watcher=watcher,
    )
    ended[0] = time.perf_counter()
    train(
        loop,
        lambda step: fixed_batches(batch_size),
        start_step=0,
        steps=steps,
        stop_asked=lambda: 0,
        on_step=on_step,
    )
    bar.close()
    return bare[warm_up:], ours[warm_up:]


if __name__ == "__main__":
    main()
