"""Our training step against a bare loop, as a ratio, on the same model and batch in one process.

    python -m benchmarks.step [--pairs 50] [--batch 3]

Bare: the family's losses, backward, torch's `clip_grad_norm_`, AdamW. Ours: `dit_lora.training.loop.train` with
gate, generators, gather of metrics, metrics.jsonl and progress bar. Both alternate step by step, so that
whatever else the machine does hits both; the medians are compared.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import CogVideoXTransformer3DModel
from tqdm import tqdm

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import recipe_groups
from dit_lora.config import GroupConfig, GroupsConfig, LoraConfig, ModelConfig, OptimConfig
from dit_lora.data.loader import Batch
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.numerics.streams import Streams
from dit_lora.training.journal import Journal
from dit_lora.training.loop import Loop, StepResult, train
from dit_lora.training.optimizer import build_optimizer, build_schedule
from dit_lora.training.runtime import quiet_libraries

FAMILY = get_family("cogvideox")
OPTIM = OptimConfig(groups=GroupsConfig(adapter=GroupConfig(lr=1e-4)))


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

    def bare_step() -> float:
        began = time.perf_counter()
        batch = next(bare_batches).to(accelerator.device)
        output = checkpoint.losses(bare_model, batch.tensors, Streams(42, batch.draws))
        output.losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(bare_optimizer.param_groups[0]["params"], 1.0)
        bare_optimizer.step()
        bare_optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    journal = Journal(folder, timesteps=checkpoint.train_timesteps, start_step=0)
    bar = tqdm(total=steps, desc="pairs of steps")
    ended = [0.0]

    def on_step(result: StepResult) -> None:
        journal.step(result)
        bar.set_postfix(loss=f"{result.loss:.4f}", grad=f"{result.grad_norm:.3g}", refresh=False)
        bar.update()
        ours.append(time.perf_counter() - ended[0])
        bare.append(bare_step())
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
    )
    ended[0] = time.perf_counter()
    batches = fixed_batches(batch_size)
    train(loop, batches, start_step=0, steps=steps, stop_asked=lambda: 0, on_step=on_step)
    bar.close()
    return bare[warm_up:], ours[warm_up:]


if __name__ == "__main__":
    main()
