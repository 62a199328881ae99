"""The loop over DeepSpeed ZeRO-2 shards on gloo ranks: DDP's trajectory, the gate, and saved files."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from launching import on_ranks
from small_loop import Callbacks

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.families import get_family
from dit_lora.guard.replay import replay_micro_batch as replay
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.distributed.zero import Zero2
from dit_lora.training.loop import TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule, build_optimizer
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure
from dit_lora.training.step import StepResult

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"),
]

STEPS, HALF, SAMPLES = 4, 2, 8
SPOILED = 3
"""The step in which rank 1 meets a NaN, once."""
OPTIM = OptimConfig(
    groups=GroupsConfig(adapter=GroupConfig(lr=1e-2, warmup_steps=3), adapter_b=GroupConfig(lr=3e-2, clip=0.002)),
    clip=0.0005,
)

Tensors = dict[str, torch.Tensor]
Whole = tuple[Tensors, Tensors]
"""Weights and moments, as a checkpoint has them."""


def sample(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tensors = {
        "latent_mean": torch.randn(1, 4, 3, 4, 6, generator=generator),
        "latent_logvar": torch.full((1, 4, 3, 4, 6), -6.0),
        "prompt_embeds": torch.randn(1, 226, 32, generator=generator),
    }
    return Batch((str(number),), (number,), tensors)


class Recorder:
    """Recovery that replays the failed batches of this rank only, and repeats the step."""

    lr_scale = 1.0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trips: list[tuple[Any, ...]] = []
        self.found: list[Tensors] = []
        self.replayed: list[str] = []

    def recover(self, failure: RunFailure) -> int:
        self.trips.append((failure.step, failure.kind, failure.failed_positions))
        self.found.append(copied(self.engine.local_state_dict()))
        for micro_batch in failure.micro_batches:
            if (micro_batch.rank, micro_batch.micro_step) in failure.failed_positions:
                replay(micro_batch, self.engine.unwrapped_model)
                self.replayed += micro_batch.ids
        return failure.step - 1


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Training:
    """One model under one engine, as `prepare` makes it."""

    def __init__(self, path: Path, accelerator: Accelerator, *, zero: bool) -> None:
        self.accelerator = accelerator
        family = get_family("cogvideox")
        self.checkpoint = family.open(ModelConfig(family="cogvideox", path=str(path)))
        model = self.checkpoint.denoiser.load_transformer(torch.float32)
        attach_lora(model, LoraConfig(rank=3), family.lora_targets, seed=0)
        groups = build_recipe_groups(model, OPTIM.groups, family.group_patterns)
        optimizer: Any = build_optimizer(groups, OPTIM)
        self.engine: Engine = (
            Zero2(accelerator, model, optimizer)
            if zero
            else Engine(accelerator, *accelerator.prepare(model, optimizer))
        )
        self.recorder = Recorder(self.engine)
        self.results: list[StepResult] = []
        self.states: dict[int, Tensors] = {}

    def losses(self, module: Any, batch: Batch, streams: RandomStreams) -> LossOutput:
        return self.checkpoint.losses(module, batch.tensors, streams)

    def spoiled(self, module: Any, batch: Batch, streams: RandomStreams) -> LossOutput:
        output = self.losses(module, batch, streams)
        is_first = not self.recorder.trips
        if is_first and batch.sample_seeds == ((SPOILED - 1) * SAMPLES + 1,):  # of rank 1
            return output._replace(losses=output.losses * torch.nan)
        return output

    def given(self, step: int) -> list[Batch]:
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        return [
            sample(first_sample + number)
            for first_sample in range(step * SAMPLES, STEPS * SAMPLES, SAMPLES)
            for number in range(rank, SAMPLES, ranks)
        ]

    def take(self, start: int, steps: int, *, spoiled: bool = False) -> "Training":
        def note(result: StepResult) -> None:
            self.results.append(result)
            self.states[result.step] = copied(self.engine.local_state_dict())

        loop = TrainingLoopComponents(
            engine=self.engine,
            loss_function=self.spoiled if spoiled else self.losses,
            schedule=LearningRateSchedule(OPTIM, STEPS),
            optim=OPTIM,
            accumulate=self.accelerator.gradient_accumulation_steps,
            seed=7,
            recovery=self.recorder,
            watcher=StepMonitor(Snapshots(self.engine.local_state_dict, interval_steps=10)),
            callbacks=Callbacks(self.given, note),
        )
        train(loop, start_step=start, steps=steps)
        return self

    def whole(self) -> Whole:
        return copied(self.engine.trainable_state_dict()), copied(self.engine.optimizer_state_dict())

    def rows(self) -> list[list[float]]:
        return [[r.loss, r.grad_norm, *r.grad_norm_groups.values(), *sorted(r.losses)] for r in self.results]


def accelerated(ranks: int) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=SAMPLES // ranks)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def on_two(path: Path) -> dict[str, Any]:
    accelerator = accelerated(2)
    ddp = Training(path, accelerator, zero=False).take(0, HALF)
    ddp_half = ddp.whole()
    ddp.take(HALF, STEPS)
    zero = Training(path, accelerator, zero=True).take(0, HALF)
    half = zero.whole()
    zero.take(HALF, STEPS)
    spoiled = Training(path, accelerator, zero=True).take(0, STEPS, spoiled=True)
    before = spoiled.states[SPOILED - 1]
    resumed, from_ddp = (Training(path, accelerator, zero=True) for _ in range(2))
    resumed.engine.load_state(*half)
    from_ddp.engine.load_state(*ddp_half)
    moved = Training(path, accelerator, zero=False)
    moved.engine.load_state(*half)
    last_state = zero.states[STEPS]
    rewound = Training(path, accelerator, zero=True)
    engine = rewound.engine
    snapshots = Snapshots(engine.local_state_dict, interval_steps=1, write_back=engine.load_scalar_state)
    snapshots.take_snapshot(0)
    rewound.take(0, HALF)
    snapshots.take_snapshot(HALF)
    rewound.take(HALF, STEPS)
    engine.drop_optimizer_state(snapshots.restore_snapshot(HALF))
    rolled_back = equal(copied(engine.local_state_dict()), rewound.states[HALF])
    rolled_back &= equal(rewound.take(HALF, STEPS).states[STEPS], last_state)
    engine.drop_optimizer_state(snapshots.restore_snapshot(0))  # its moments were born since
    rolled_back &= equal(rewound.take(0, STEPS).states[STEPS], last_state)
    return {
        "held": {name: tensor.numel() for name, tensor in last_state.items() if name.endswith("/exp_avg")},
        "results": [asdict(r) | {"seconds": 0, "data_seconds": 0} for r in zero.results],
        "trips": (spoiled.recorder.trips, spoiled.recorder.replayed),
        "untouched": equal(spoiled.recorder.found[0], before),
        "moved since": not equal(before, spoiled.states[SPOILED]),
        "recovered": equal(spoiled.states[STEPS], last_state) and spoiled.rows() == zero.rows(),
        "rolled back": rolled_back,
        "resumed": equal(resumed.take(HALF, STEPS).states[STEPS], last_state),
        "same ranks": zero.rows()[HALF:] == resumed.rows(),
        "rows": {
            "ddp": ddp.rows(),
            "zero": zero.rows(),
            "ddp to zero": [*ddp.rows()[:HALF], *from_ddp.take(HALF, STEPS).rows()],
            "zero to ddp": [*zero.rows()[:HALF], *moved.take(HALF, STEPS).rows()],
        },
        "half": half,
        "whole": {"ddp": ddp.whole(), "zero": zero.whole()},
    }


def on_four(path: Path) -> tuple[list[list[float]], Whole]:
    training = Training(path, accelerated(4), zero=True).take(0, HALF)
    return training.rows(), training.whole()


def continued_on_two(path: Path, whole: Whole) -> list[list[float]]:
    training = Training(path, accelerated(2), zero=True)
    training.engine.load_state(*whole)
    return training.take(HALF, STEPS).rows()


@pytest.fixture(scope="module")
def two(tiny_checkpoints: dict[str, Path]) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tiny_checkpoints["cogvideox-5b"])


def close(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> None:
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-5, atol=0)


def test_it_takes_ddps_steps_with_half_of_the_moments_on_each_rank(
    two: list[dict[str, Any]],
) -> None:
    """Losses, each group's gradient norm, weights and moments; each group is clipped by its own rule."""
    for rank_result in two:
        close(rank_result["rows"]["zero"], rank_result["rows"]["ddp"])
        for zero, ddp in zip(rank_result["whole"]["zero"], rank_result["whole"]["ddp"], strict=True):
            assert zero.keys() == ddp.keys()
            for name, tensor in zero.items():
                assert (tensor - ddp[name]).norm() <= 1e-4 * ddp[name].norm(), name
        assert any(row[2] > 0.0005 for row in rank_result["rows"]["zero"])
        for _, joint, adapter, adapter_b, *_ in rank_result["rows"]["zero"]:
            assert joint == pytest.approx((adapter**2 + adapter_b**2) ** 0.5, rel=1e-6)
            assert adapter_b > 0.002
    moments = {n: t for n, t in two[0]["whole"]["zero"][1].items() if n.endswith("/exp_avg")}
    held_sizes = [recorded["held"] for recorded in two]
    for name, tensor in moments.items():
        assert sum(sizes.get(name, 0) for sizes in held_sizes) == tensor.numel()
    assert sum(held_sizes[0].values()) == pytest.approx(sum(held_sizes[1].values()), rel=0.01)


def test_a_nan_on_one_rank_moves_no_rank_and_the_run_ends_as_without_it(
    two: list[dict[str, Any]],
) -> None:
    """Weights, parts and moments, bit for bit; and a replay by one rank waits for no other."""
    spoiled = str((SPOILED - 1) * SAMPLES + 1)
    for rank, rank_result in enumerate(two):
        assert rank_result["trips"] == (
            [(SPOILED, "non_finite_loss", ((1, 0),))],
            [spoiled] if rank == 1 else [],
        )
        assert rank_result["untouched"]
        assert rank_result["moved since"]
        assert rank_result["recovered"]
    assert two[0]["results"] == two[1]["results"]


def test_a_rollback_puts_parts_and_moments_back_bit_for_bit(two: list[dict[str, Any]]) -> None:
    """To a step in the middle, and to before the first, where there were no moments."""
    assert all(rank_result["rolled back"] for rank_result in two)


def test_it_resumes_bit_for_bit_and_from_ddp_and_to_ddp(two: list[dict[str, Any]]) -> None:
    for rank_result in two:
        assert rank_result["resumed"]
        assert rank_result["same ranks"]
        for direction in ("ddp to zero", "zero to ddp"):
            close(rank_result["rows"][direction], rank_result["rows"]["ddp"])


def test_four_ranks_train_alike_and_two_go_on_from_their_checkpoint(
    two: list[dict[str, Any]], tiny_checkpoints: dict[str, Path]
) -> None:
    path = tiny_checkpoints["cogvideox-5b"]
    rows, unsharded = on_ranks(4, on_four, path)[3]
    close(rows, two[0]["rows"]["zero"][:HALF])
    for rank_result in on_ranks(2, continued_on_two, path, unsharded):
        close(rank_result, two[0]["rows"]["zero"][HALF:])
