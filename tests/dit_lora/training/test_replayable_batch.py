"""A micro-batch that is run again gives the bits of the step that ran it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from small_loop import Callbacks
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.optim import OptimConfig
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.families import get_family
from dit_lora.guard import replay as numerics_replay
from dit_lora.guard.replay import MicroBatch, ReplayOutcome
from dit_lora.guard.snapshots import Snapshots
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.loop import TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule, build_optimizer
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure

Gradients = dict[str, torch.Tensor]
OPTIM = OptimConfig()


def batch(number: int, faults: Mapping[str, str]) -> Batch:
    """Two samples of 9 frames of 32x48, encoded."""
    generator = torch.Generator().manual_seed(number)
    return Batch(
        ids=(f"{number}a", f"{number}b"),
        sample_seeds=(2 * number, 2 * number + 1),
        tensors={
            "latent_mean": torch.randn(2, 4, 3, 4, 6, generator=generator),
            "latent_logvar": torch.full((2, 4, 3, 4, 6), -6.0),
            "prompt_embeds": torch.randn(2, 226, 32, generator=generator),
        },
        faults=faults,
    )


class StepEndedError(Exception):
    """A recovery that goes no further: the weights are those that the step ran with."""


@dataclass
class Kept:
    """What the loop ran in the step that tripped: recovery and watcher at once."""

    model: nn.Module
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)
    micro_batches: Sequence[MicroBatch] = ()
    lr_scale: float = 1.0

    def recover(self, failure: RunFailure) -> int:
        assert failure.kind == "bad_data"
        self.micro_batches = failure.micro_batches
        raise StepEndedError


class Watching(StepMonitor):
    """Keeps the step's gradients before they are clipped."""

    kept: Kept

    def collect_gradient_statistics(self, step: int) -> None:
        named = self.kept.model.named_parameters()
        self.kept.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}


def tripped(path: Path, *, dtype: str, dropout: float, checkpointing: bool, accumulate: int) -> Kept:
    """The third step on a tiny CogVideoX, all of whose data claims to be bad: it runs, and nothing moves."""
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = {"fp32": "no", "bf16": "bf16"}[dtype]
    accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulate)
    family = get_family("cogvideox")
    checkpoint = family.open(ModelConfig(family="cogvideox", path=str(path)))
    transformer = checkpoint.denoiser.load_transformer({"no": torch.float32, "bf16": torch.bfloat16}[mixed])
    attach_lora(transformer, LoraConfig(rank=4, dropout=dropout), family.lora_targets, seed=0)
    groups = build_recipe_groups(transformer, OPTIM.groups, family.group_patterns)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    model, optimizer = accelerator.prepare(transformer, build_optimizer(groups, OPTIM))
    kept_step = Kept(accelerator.unwrap_model(model))
    watcher = Watching(Snapshots(lambda: {}, interval_steps=10))
    watcher.kept = kept_step

    def losses(module: nn.Module, given: Batch, streams: Any) -> Any:
        output = checkpoint.losses(module, given.tensors, streams)
        if given.faults:
            kept_step.losses.append(output.losses.detach().clone())
        return output

    loop = TrainingLoopComponents(
        engine=Engine(accelerator, model, optimizer),
        loss_function=losses,
        schedule=LearningRateSchedule(OPTIM, 3),
        optim=OPTIM,
        accumulate=accumulate,
        seed=7,
        recovery=kept_step,
        watcher=watcher,
        callbacks=Callbacks(lambda step: batches),
    )
    batches = [batch(k, {f"{k}a": "claimed"} if k >= 2 * accumulate else {}) for k in range(6)]
    with pytest.raises(StepEndedError):
        train(loop, start_step=0, steps=3)
    return kept_step


@contextmanager
def noted_gradients(model: nn.Module) -> Iterator[Gradients]:
    """What arrives in `grad`, as long as it is open."""
    noted: Gradients = {}

    def note(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            noted[name] = parameter.grad.clone()

        return hook

    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(note(n)) for n, p in named]
    yield noted
    for handle in handles:
        handle.remove()


def replayed(kept: Kept, index: int) -> tuple[ReplayOutcome, Gradients]:
    with noted_gradients(kept.model) as gradients:
        outcome = numerics_replay.replay_micro_batch(kept.micro_batches[index], kept.model)
    return outcome, gradients


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_replay_gives_the_steps_losses_and_gradients_bit_for_bit(
    tiny_checkpoints: dict[str, Path], dtype: str, checkpointing: bool, dropout: float
) -> None:
    path = tiny_checkpoints["cogvideox-5b"]
    failed_step = tripped(path, dtype=dtype, dropout=dropout, checkpointing=checkpointing, accumulate=1)
    for _ in range(2):  # and every time
        torch.manual_seed(99)
        outcome, gradients = replayed(failed_step, 0)
        assert outcome.losses == tuple(failed_step.losses[0].tolist())
        assert outcome.is_finite
        assert gradients.keys() == failed_step.gradients.keys()
        assert len(gradients) == 16
        assert all(torch.equal(gradients[name], failed_step.gradients[name]) for name in gradients)
        assert any(gradient.any() for gradient in gradients.values())


def test_each_micro_batch_replays_alone_with_dropout_of_its_own(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """The step's gradient is the mean of the two replays', in any order: halves are exact."""
    path = tiny_checkpoints["cogvideox-2b"]
    failed_step = tripped(path, dtype="fp32", dropout=0.4, checkpointing=True, accumulate=2)
    (second, right), (first_replay, left_grads) = replayed(failed_step, 1), replayed(failed_step, 0)
    assert [first_replay.losses, second.losses] == [tuple(losses.tolist()) for losses in failed_step.losses[:2]]
    for name, gradient in failed_step.gradients.items():
        assert torch.equal(left_grads[name] / 2 + right[name] / 2, gradient), name
    assert [micro_batch.ids for micro_batch in failed_step.micro_batches] == [
        ("4a", "4b"),
        ("5a", "5b"),
    ]


def test_a_replay_leaves_gradients_and_random_state_as_they_were(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["cogvideox-2b"]
    failed_step = tripped(path, dtype="fp32", dropout=0.4, checkpointing=False, accumulate=1)
    parameter = next(p for p in failed_step.model.parameters() if p.requires_grad)
    parameter.grad = torch.full_like(parameter, 7.0)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    before = [p.detach().clone() for p in failed_step.model.parameters()]
    replayed(failed_step, 0)
    assert torch.equal(torch.rand(4), expected)
    assert (parameter.grad == 7.0).all()
    assert all(map(torch.equal, before, failed_step.model.parameters()))


def test_other_draws_and_other_samples_give_other_losses(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path = tiny_checkpoints["cogvideox-2b"]
    failed_step = tripped(path, dtype="fp32", dropout=0.0, checkpointing=False, accumulate=1)
    (micro_batch,) = failed_step.micro_batches
    redraws = [
        numerics_replay.replay_micro_batch(micro_batch.redraw_noise(number), failed_step.model) for number in (0, 1)
    ]
    replay, _ = replayed(failed_step, 0)
    assert len({replay.timesteps, *(redraw.timesteps for redraw in redraws)}) == 3
    separate = micro_batch.select_sample(1)
    assert (separate.ids, separate.sample_seeds) == (
        micro_batch.ids[1:],
        micro_batch.sample_seeds[1:],
    )
    single = numerics_replay.replay_micro_batch(separate, failed_step.model)
    assert single.timesteps == replay.timesteps[1:]
    assert single.losses == pytest.approx(replay.losses[1:], rel=1e-5)
