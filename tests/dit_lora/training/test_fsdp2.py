"""The loop over parameters that FSDP2 shards, on two gloo ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from launching import on_ranks
from small_loop import Callbacks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as checkpointed

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.loading.batch import Batch, collate
from dit_lora.families import get_family
from dit_lora.guard.fallbacks import convert_to_fp32
from dit_lora.guard.finite_gate import get_local_tensor
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.dtensors import gather_full_tensor
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.loop import TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule, build_optimizer
from dit_lora.training.optim.state import optimizer_state
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure
from dit_lora.training.step import StepResult

STEPS, RANKS, ACCUMULATE = 4, 2, 2
UNREAD, SPOILED = 2, 3  # the steps in which rank 1 reads bad data, and meets a NaN loss; each once
OPTIM = OptimConfig(groups=GroupsConfig(adapter=GroupConfig(lr=1e-2)), clip=0.005)

Tensors = dict[str, torch.Tensor]


def sample(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tensors = {
        "latent_mean": torch.randn(1, 4, 3, 4, 6, generator=generator),
        "latent_logvar": torch.full((1, 4, 3, 4, 6), -6.0),
        "prompt_embeds": torch.randn(1, 226, 32, generator=generator),
    }
    return Batch((str(number),), (number,), tensors)


def micro_batches(rank: int, ranks: int, spoiled: bool) -> list[Batch]:
    """The micro-batches of a rank: of two samples on one process, of one each on two."""
    samples = [sample(number) for number in range(STEPS * ACCUMULATE * RANKS)]
    if ranks == 1:
        return [collate(samples[k : k + RANKS]) for k in range(0, len(samples), RANKS)]
    local_samples = samples[rank::ranks]
    if spoiled and rank == 1:
        bad = (UNREAD - 1) * ACCUMULATE
        local_samples[bad] = replace(
            local_samples[bad], faults={local_samples[bad].ids[0]: "torn"}
        )  # its loss is finite
    return local_samples


class Recorder:
    """Recovery that takes the step again, and notes how it found weights and optimizer."""

    lr_scale = 1.0

    def __init__(self, state: Any) -> None:
        self.state = state
        self.trips: list[RunFailure] = []
        self.found: list[Tensors] = []

    def recover(self, failure: RunFailure) -> int:
        self.trips.append(failure)
        self.found.append(self.state())
        return failure.step - 1


def sharded(path: Path, accelerator: Accelerator) -> tuple[Any, nn.Module, torch.optim.AdamW]:
    """A tiny CogVideoX with LoRA, its blocks and the rest sharded over the ranks, if there are several."""
    family = get_family("cogvideox")
    checkpoint = family.open(ModelConfig(family="cogvideox", path=str(path)))
    model = checkpoint.denoiser.load_transformer(torch.float32)
    attach_lora(model, LoraConfig(rank=4), family.lora_targets, seed=0)
    if accelerator.num_processes > 1:
        for block in model.transformer_blocks:
            fully_shard(block)
        fully_shard(model)
    groups = build_recipe_groups(model, OPTIM.groups, family.group_patterns)
    return checkpoint, model, build_optimizer(groups, OPTIM)


def run(path: Path, spoiled: bool) -> dict[str, Any]:
    """Train; what this rank saw. Nothing is prepared by Accelerate."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    checkpoint, model, optimizer = sharded(path, accelerator)
    pending = [spoiled and rank == 1]

    def state() -> Tensors:
        live = {**get_trainable_parameters(model), **optimizer_state(optimizer)}
        return {name: get_local_tensor(tensor).clone() for name, tensor in live.items()}

    def losses(module: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
        output = checkpoint.losses(module, batch.tensors, streams)
        first_sample = (SPOILED - 1) * ACCUMULATE * RANKS
        # Not yet in the pass that follows the unread step, which is dropped.
        if pending[0] and recovery.trips and batch.sample_seeds == (first_sample + rank,):
            pending[0] = False
            return output._replace(losses=output.losses * torch.nan)
        return output

    results: list[StepResult] = []
    states: dict[int, Tensors] = {}

    def note(result: StepResult) -> None:
        results.append(result)
        states[result.step] = state()

    def given(step: int) -> list[Batch]:
        is_torn = spoiled and not recovery.trips
        return micro_batches(rank, ranks, is_torn)[step * ACCUMULATE :]

    recovery = Recorder(state)
    loop = TrainingLoopComponents(
        engine=Engine(accelerator, model, optimizer),
        loss_function=losses,
        schedule=LearningRateSchedule(OPTIM, STEPS),
        optim=OPTIM,
        accumulate=ACCUMULATE,
        seed=7,
        recovery=recovery,
        watcher=StepMonitor(Snapshots(state, interval_steps=10)),
        callbacks=Callbacks(given, note),
    )
    train(loop, start_step=0, steps=STEPS)
    return {
        "ranks": ranks,
        "sharded": sum(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad),
        "trained": len(get_trainable_parameters(model)),
        "results": [(r.step, r.loss, r.grad_norm, sorted(r.losses)) for r in results],
        "states": states,
        "trips": [(trip.step, trip.kind, trip.failed_positions) for trip in recovery.trips],
        "found": recovery.found,
    }


class Block(nn.Module):
    """A frozen layer in half precision and a trained one in fp32, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.trained = nn.Linear(7, 5)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return checkpointed(self._inside, states, use_reentrant=False)

    def _inside(self, states: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(states.to(self.frozen.weight.dtype)).float()
        return states + self.trained(hidden)


def in_both_precisions() -> dict[str, list[Tensors]]:
    """Outputs and gradients of blocks, sharded and not: as they are, in fp32, and as they are again."""
    Accelerator(cpu=True)
    recorded: dict[str, list[Tensors]] = {}
    for name in ("sharded", "replicated"):
        torch.manual_seed(3)
        model = nn.Sequential(Block(), Block())
        states = torch.randn(3, 5, requires_grad=True)
        if name == "sharded":
            # The second block is in the model's unit, whose weights stay whole after a pass without gradients.
            for unit in (model[0], model):
                fully_shard(unit)
        recorded[name] = [passed(model, states)]
        with torch.no_grad():
            model(states)
        with convert_to_fp32(model):
            recorded[name].append(passed(model, states))
        recorded[name].append(passed(model, states))
        assert model[0].frozen.weight.dtype is torch.bfloat16
    return recorded


def passed(model: nn.Module, states: torch.Tensor) -> Tensors:
    model.zero_grad()
    output = model(states)
    output.square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {
        "output": output.detach(),
        **{n: gather_full_tensor(g).clone() for n, g in gradients.items()},
    }


@pytest.mark.slow
def test_sharded_weights_compute_in_fp32_for_a_while_forward_and_backward() -> None:
    for rank_result in on_ranks(RANKS, in_both_precisions):
        before, wide, after = rank_result["sharded"]
        assert len(before) == 1 + 4  # the weights and biases that train
        assert equal(before, after)
        for sharded_pass, plain in zip(rank_result["sharded"], rank_result["replicated"], strict=True):
            assert sharded_pass.keys() == plain.keys()
            for name, value in plain.items():
                torch.testing.assert_close(sharded_pass[name], value, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(wide["output"], before["output"], rtol=1e-4)


@pytest.fixture(scope="module")
def clean(tiny_checkpoints: dict[str, Path]) -> list[dict[str, Any]]:
    return on_ranks(RANKS, run, tiny_checkpoints["cogvideox-5b"], False)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_train_as_one_process_without(
    clean: list[dict[str, Any]], tiny_checkpoints: dict[str, Path]
) -> None:
    """Same samples: same losses and gradient norms, and the optimizer's steps are seen in them."""
    single_rank = run(tiny_checkpoints["cogvideox-5b"], spoiled=False)
    assert (single_rank["ranks"], single_rank["sharded"]) == (1, 0)
    for rank_result in clean:
        assert rank_result["ranks"] == RANKS
        assert rank_result["sharded"] == rank_result["trained"] == 16
        assert not rank_result["trips"]
        assert [row[0] for row in rank_result["results"]] == list(range(1, STEPS + 1))
        for (_, loss, norm, losses), (_, loss_1, norm_1, losses_1) in zip(
            rank_result["results"], single_rank["results"], strict=True
        ):
            assert losses == pytest.approx(losses_1, rel=1e-5)
            assert (loss, norm) == pytest.approx((loss_1, norm_1), rel=1e-5)
    assert all(row[2] > OPTIM.clip for row in single_rank["results"])  # type: ignore[operator]


@pytest.mark.slow
def test_bad_data_or_a_nan_loss_on_one_rank_moves_no_ranks_shard_and_all_recover(
    clean: list[dict[str, Any]], tiny_checkpoints: dict[str, Path]
) -> None:
    """And the steps that are taken again are those of the run without it, to the last bit."""
    path = tiny_checkpoints["cogvideox-5b"]
    for rank_result, healthy in zip(on_ranks(RANKS, run, path, True), clean, strict=True):
        assert rank_result["ranks"] == RANKS
        assert rank_result["trips"] == [
            (UNREAD, "bad_data", ((1, 0),)),
            (SPOILED, "non_finite_loss", ((1, 0),)),
        ]
        for failure, step in zip(rank_result["found"], (UNREAD, SPOILED), strict=True):
            assert equal(failure, rank_result["states"][step - 1])
            assert len(failure) == 4 * rank_result["trained"]  # weights, and AdamW's three of each
        assert rank_result["results"] == healthy["results"]
        assert equal(rank_result["states"][STEPS], healthy["states"][STEPS])
    assert not equal(clean[0]["states"][1], clean[1]["states"][1])  # they hold different shards
