"""Ways to put a fault into a prepared run, by its place: samples, losses, weights, moments, gradients, modules, kernels.

`dit_lora.faults.triggers` says at which moments, and what becomes of a tensor there.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cuda
from torch.distributed.tensor import DTensor

from dit_lora.faults.samples import overwrite
from dit_lora.faults.triggers import ALL_RANKS, Change, Fires, When, here, write
from dit_lora.faults.world import Arm, Stage, Tensors
from dit_lora.guard.switches import Switch
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Streams

ADAPTED = "{attention}.{key}.lora_B.default.weight"
OUTPUT = "{attention}.{out}"
Rows = Callable[[Stage, LossOutput, Tensors], list[bool]]


def at_once(*arms: Arm) -> Arm:
    """Put several faults into one run."""

    def arm(stage: Stage) -> None:
        for fault in arms:
            fault(stage)

    return arm


# Samples and their losses.


def target_rows(stage: Stage, output: LossOutput, batch: Tensors) -> list[bool]:
    return stage.is_target(batch)


def every_row(stage: Stage, output: LossOutput, batch: Tensors) -> list[bool]:
    return [True] * len(output.losses)


def place_in_batch(index: int) -> Rows:
    """Return the row at an index, whatever sample is there; no row, in a smaller batch."""
    return lambda stage, output, batch: [n == index for n in range(len(output.losses))]


def timesteps_between(first: int, last: int) -> Rows:
    return lambda stage, output, batch: [first <= int(t) < last for t in output.timesteps]


def losses(change: Change, rows: Rows, when: When) -> Arm:
    """Change the losses of some rows, in passes that train."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def after(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
            if not torch.is_grad_enabled():
                return output
            at_fault = rows(stage, output, batch)
            if not any(at_fault) or not fires():
                return output
            pairs = zip(output.losses, at_fault, strict=True)
            changed = [change(loss) if bad else loss for loss, bad in pairs]
            return LossOutput(torch.stack(changed), output.timesteps)

        stage.checkpoint.after.append(after)

    return arm


def sample_tensor(name: str, change: Change, when: When) -> Arm:
    """Change a tensor of the target after it was read, as a broken transform does; the cache is right."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def read(batch: Tensors, streams: Streams) -> Tensors:
            for index, is_target in enumerate(stage.is_target(batch)):
                if is_target and fires():
                    batch[name] = batch[name].clone()
                    batch[name][index] = change(batch[name][index])
            return batch

        stage.checkpoint.before.append(read)

    return arm


def cached_latent(value: float, sample: str) -> Callable[[Any], None]:
    """Write a value into a sample's latent in the cache, keeping its entry's header."""
    from dit_lora.data.cache.cache import TensorCache

    def change(cache: Any) -> None:
        for entry in TensorCache(cache / "videos").entries():
            if entry.sample == sample:
                overwrite(entry, "latent_mean", 7, torch.full((1,), value))

    return change


# What the run holds.


def parameter(stage: Stage, name: str) -> torch.Tensor:
    return dict(stage.transformer.named_parameters())[stage.site.named(name)]


def _has_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is not all zero; of a sharded one, which no rank knows alone, if it has elements."""
    return bool(tensor.numel() if isinstance(tensor, DTensor) else tensor.any())


def frozen(number: int, dimensions: int = 1) -> Callable[[Stage], torch.Tensor]:
    """Return a finder of a frozen weight by its number, of at least so many dimensions and not all zero, which no
    factor changes.
    """

    def find(stage: Stage) -> torch.Tensor:
        weights = [
            p
            for p in stage.transformer.parameters()
            if not p.requires_grad
            and p.is_floating_point()
            and p.ndim >= dimensions
            and _has_values(p)
        ]
        return weights[number % len(weights)]

    return find


def buffer(number: int) -> Callable[[Stage], torch.Tensor]:
    def find(stage: Stage) -> torch.Tensor:
        buffers = [b for b in stage.transformer.buffers() if b.is_floating_point()]
        return buffers[number % len(buffers)]

    return find


def trained(number: int) -> Callable[[Stage], torch.Tensor]:
    """Return a finder of a trained weight by its number."""

    def find(stage: Stage) -> torch.Tensor:
        weights = list(stage.trained().values())
        return weights[number % len(weights)].data

    return find


def moment(number: int, key: str) -> Callable[[Stage], torch.Tensor]:
    """Return a finder of a moment of AdamW; where ranks share them out, of one of this rank's."""

    def find(stage: Stage) -> torch.Tensor:
        moments = stage.run.setup.engine.own_moments()
        tensors = [tensor for name, tensor in moments.items() if name.endswith(f"/{key}")]
        return tensors[number % len(tensors)]

    return find


def average(number: int) -> Callable[[Stage], torch.Tensor]:
    """Return a finder of a moving average of a trained weight."""

    def find(stage: Stage) -> torch.Tensor:
        assert stage.run.ema is not None
        averages = list(stage.run.ema.tensors().values())
        return averages[number % len(averages)]

    return find


def all_trained(step: int, change: Change, rank: int = ALL_RANKS, name: str | None = None) -> Arm:
    """Change every trained weight, or the one of that name, between two steps, once, wherever the rank holds it."""

    def arm(stage: Stage) -> None:
        def act() -> None:
            for tensor in stage.held(name and stage.site.named(name)):
                write(tensor, change)

        if here(stage, rank):
            stage.before_step(step, act)

    return arm


def gradients(change: Change, number: int | None, when: When) -> Arm:
    """Change gradients as they arrive: of one parameter by its number, or of all."""

    def arm(stage: Stage) -> None:
        parameters = list(stage.trained().values())
        fires = when.fires(stage)
        if number is not None:
            parameters[number % len(parameters)].register_hook(
                lambda grad: change(grad) if fires() else grad
            )
            return
        acts = [False]

        def decide(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
            acts[0] = torch.is_grad_enabled() and fires()  # once a pass, for all alike
            return output

        stage.checkpoint.after.append(decide)
        for each in parameters:
            each.register_hook(lambda grad: change(grad) if acts[0] else grad)

    return arm


# What computes.


def module_output(name: str, change: Change, when: When) -> Arm:
    """Change a module's output."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return change(output) if fires() else output

        stage.transformer.get_submodule(stage.site.named(name)).register_forward_hook(hook)

    return arm


def add_switch(stage: Stage, name: str) -> dict[str, bool]:
    """Give the run a switch that turns something of ours off; the state that is returned says whether it is on."""
    state = {"on": True}

    @contextmanager
    def off() -> Iterator[None]:
        before = state["on"]
        state["on"] = False
        try:
            yield
        finally:
            state["on"] = before

    switch = Switch(name, "kernel", off, lambda: state.update(on=False), "its reference")
    stage.run.recovery.suspects.switches.append(switch)
    return state


def kernel(change: Change, when: When, name: str = "kernel:wrong_op", place: str = OUTPUT) -> Arm:
    """Put in a fused kernel that goes wrong in one module, with a switch that calls its reference."""

    def arm(stage: Stage) -> None:
        state = add_switch(stage, name)
        fires = when.fires(stage)

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return change(output) if state["on"] and fires() else output

        stage.transformer.get_submodule(stage.site.named(place)).register_forward_hook(hook)

    return arm


def right_kernel(name: str = "kernel:right_op") -> Arm:
    """Put in a kernel that is right, with a switch: nothing may turn it off."""

    def arm(stage: Stage) -> None:
        add_switch(stage, name)

    return arm


def attention(change: Change, when: When) -> Arm:
    """Let the flash backend go wrong; the others are right."""

    def arm(stage: Stage) -> None:
        right, fires = F.scaled_dot_product_attention, when.fires(stage)

        def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = right(*args, **kwargs)
            return change(output) if cuda.flash_sdp_enabled() and fires() else output

        stage.patch(F, "scaled_dot_product_attention", wrong)

    return arm


# The guard's own way.


def first_passes(count: int) -> Arm:
    """Make the first passes after every start of a step NaN, and the next not: a replay that comes late is healthy."""

    def arm(stage: Stage) -> None:
        passes = [0]
        inner = stage.run.watcher.forward

        def forward(number: int) -> Any:
            passes[0] = 0
            return inner(number)

        def after(output: LossOutput, batch: Tensors, streams: Streams) -> LossOutput:
            passes[0] += 1
            spoiled = output.losses * torch.nan if passes[0] <= count else output.losses
            return LossOutput(spoiled, output.timesteps) if torch.is_grad_enabled() else output

        stage.patch(stage.run.watcher, "forward", forward)
        stage.checkpoint.after.append(after)

    return arm


def out_of_memory(when_recovering: Fires) -> Arm:
    """Raise out-of-memory in passes while the guard looks for a cause, as where a replay does not fit."""

    def arm(stage: Stage) -> None:
        # A recovery may meet another trip, and so recover within itself.
        depth = [0]
        inner = stage.run.recovery.recover

        def recover(*args: Any) -> int:
            depth[0] += 1
            try:
                return inner(*args)
            finally:
                depth[0] -= 1

        def read(batch: Tensors, streams: Streams) -> Tensors:
            if depth[0] and when_recovering():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return batch

        stage.patch(stage.run.recovery, "recover", recover)
        stage.checkpoint.before.append(read)

    return arm


def passes_from(first: int) -> Fires:
    """Return a trigger that fires from the pass of that number on, counted from 1."""
    seen = [0]

    def fires() -> bool:
        seen[0] += 1
        return seen[0] >= first

    return fires


def at_random(p: float, seed: int) -> Fires:
    chance = random.Random(seed)
    return lambda: chance.random() < p
