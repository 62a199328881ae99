"""Ways to put a fault into a prepared run: in samples, losses, weights, moments, gradients, modules or kernels.

`benchmarks.faults.triggers` says at which moments, and what becomes of a tensor there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cuda
from torch.distributed.tensor import DTensor

from benchmarks.faults.triggers import Change, Find, Fires, When
from benchmarks.faults.world import Arm, Stage, Tensors
from dit_lora.guard.fallbacks import Fallback
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams

ADAPTED = "{attention}.{key}.{idle}"
OUTPUT = "{attention}.{out_proj}"
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
    """Select the row at an index, whichever sample it holds. Selects no row of a smaller batch."""
    return lambda stage, output, batch: [n == index for n in range(len(output.losses))]


def timesteps_between(low: int, high: int) -> Rows:
    return lambda stage, output, batch: [low <= int(t) < high for t in output.timesteps]


def upper_timesteps(stage: Stage, output: LossOutput, batch: Tensors) -> list[bool]:
    """True for each row above `targets.upper`."""
    return [int(t) >= stage.targets.upper for t in output.timesteps]


def losses(change: Change, rows: Rows, when: When) -> Arm:
    """Change the losses of some rows, in passes that train."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def after(output: LossOutput, batch: Tensors, streams: RandomStreams) -> LossOutput:
            if not torch.is_grad_enabled():
                return output
            is_at_fault = rows(stage, output, batch)
            if not any(is_at_fault) or not fires():
                return output
            pairs = zip(output.losses, is_at_fault, strict=True)
            changed = [change(loss) if bad else loss for loss, bad in pairs]
            return LossOutput(torch.stack(changed), output.timesteps)

        stage.checkpoint.after.append(after)

    return arm


def sample_tensor(name: str, change: Change, when: When) -> Arm:
    """Change a tensor of the target after it was read, as a broken transform does; the cache is right.

    Families name the caption's tensor, here `prompt_embeds`, differently.
    """

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)
        key = (stage.targets.text if name == "prompt_embeds" else None) or name

        def read(batch: Tensors, streams: RandomStreams) -> Tensors:
            for index, is_target in enumerate(stage.is_target(batch)):
                if is_target and fires():
                    batch[key] = batch[key].clone()
                    batch[key][index] = change(batch[key][index])
            return batch

        stage.checkpoint.before.append(read)

    return arm


# What the run holds.


def parameter(name: str) -> Find:
    """Find a weight by its name."""
    return lambda stage: [stage.transformer.get_parameter(stage.targets.named(name))]


def adapter(name: str | None = ADAPTED) -> Find:
    """Find one trained weight, or all of them, in every tensor where the rank holds it."""
    return lambda stage: stage.local_tensors(name and stage.targets.named(name))


def _has_values(tensor: torch.Tensor) -> bool:
    """True if the tensor is not all zero. A rank cannot tell that of a sharded one, which only needs elements."""
    return bool(tensor.numel() if isinstance(tensor, DTensor) else tensor.any())


def frozen(number: int, dimensions: int = 1) -> Find:
    """Find a frozen weight by its number.

    It has at least `dimensions` dimensions and is not all zero, since a factor does not change zeros.
    """

    def is_one(weight: torch.Tensor) -> bool:
        is_frozen = not weight.requires_grad and weight.is_floating_point()
        return is_frozen and weight.ndim >= dimensions and _has_values(weight)

    return lambda stage: _numbered(filter(is_one, stage.transformer.parameters()), number)


def buffer(number: int) -> Find:
    is_one = torch.is_floating_point
    return lambda stage: _numbered(filter(is_one, stage.transformer.buffers()), number)


def trained(number: int) -> Find:
    """Find a trained weight by its number."""
    return lambda stage: _numbered(stage.trained().values(), number)


def moment(number: int, key: str) -> Find:
    """Find an AdamW moment by its number. With sharded optimizer state it is one of this rank's."""
    return lambda stage: _numbered(_moments(stage, f"/{key}"), number)


def moment_of(name: str, key: str) -> Find:
    """Find the AdamW moment of a trained weight. Finds nothing if another rank holds it."""
    return lambda stage: _moments(stage, f"{stage.targets.named(name)}/{key}")


def _moments(stage: Stage, end: str) -> list[torch.Tensor]:
    moments = stage.run.engine.local_optimizer_state()
    return [tensor for name, tensor in moments.items() if name.endswith(end)]


def average(number: int) -> Find:
    """Find the moving average of a trained weight by its number."""
    return lambda stage: _numbered(averages(stage).values(), number)


def averages(stage: Stage) -> dict[str, torch.Tensor]:
    assert stage.run.ema is not None
    return stage.run.ema.named_averages()


def _numbered(tensors: Iterable[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The tensor at that index, modulo the number of tensors."""
    names = list(tensors)
    return [names[number % len(names)]]


def gradients(change: Change, number: int | None, when: When) -> Arm:
    """Change gradients as they arrive: of one parameter by its number, or of all."""

    def arm(stage: Stage) -> None:
        parameters = list(stage.trained().values())
        fires = when.fires(stage)
        if number is not None:
            parameters[number % len(parameters)].register_hook(lambda grad: change(grad) if fires() else grad)
            return
        acts = [False]

        def decide(output: LossOutput, batch: Tensors, streams: RandomStreams) -> LossOutput:
            acts[0] = torch.is_grad_enabled() and fires()  # once a pass, for all alike
            return output

        stage.checkpoint.after.append(decide)
        for parameter in parameters:
            parameter.register_hook(lambda grad: change(grad) if acts[0] else grad)

    return arm


# What computes.


def module_output(name: str, change: Change, when: When) -> Arm:
    """Change a module's output."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return change(output) if fires() else output

        stage.module(name).register_forward_hook(hook)

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

    switch = Fallback(name, "kernel", off, lambda: state.update(on=False), "its reference")
    stage.run.recovery.diagnosis_context.fallbacks.append(switch)
    return state


def kernel(change: Change, when: When, name: str = "kernel:wrong_op", module: str = OUTPUT) -> Arm:
    """Put in a fused kernel that goes wrong in one module, with a switch that calls its reference."""

    def arm(stage: Stage) -> None:
        state = add_switch(stage, name)
        fires = when.fires(stage)

        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return change(output) if state["on"] and fires() else output

        stage.module(module).register_forward_hook(hook)

    return arm


def right_kernel(stage: Stage) -> None:
    """Put in a kernel that is right, with a switch: nothing may turn it off."""
    add_switch(stage, "kernel:right_op")


def attention(change: Change, when: When) -> Arm:
    """Let the flash backend go wrong; the others are right."""

    def arm(stage: Stage) -> None:
        fires = when.fires(stage)

        def attend(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            output = original(*args, **kwargs)
            return change(output) if cuda.flash_sdp_enabled() and fires() else output

        stage.wrap(F, "scaled_dot_product_attention", attend)

    return arm


# The guard's own way.


def first_passes(count: int) -> Arm:
    """Make the first passes after every start of a step NaN, and the next not: a replay that comes late is healthy."""

    def arm(stage: Stage) -> None:
        passes = [0]

        def forward(inner: Callable[[int], Any], number: int) -> Any:
            passes[0] = 0
            return inner(number)

        def after(output: LossOutput, batch: Tensors, streams: RandomStreams) -> LossOutput:
            passes[0] += 1
            spoiled = output.losses * torch.nan if passes[0] <= count else output.losses
            return LossOutput(spoiled, output.timesteps) if torch.is_grad_enabled() else output

        stage.wrap(stage.run.watcher, "record_forward_outputs", forward)
        stage.checkpoint.after.append(after)

    return arm


def out_of_memory(when_recovering: Fires) -> Arm:
    """Raise out-of-memory in passes while the guard looks for a cause, as where a replay does not fit."""

    def arm(stage: Stage) -> None:
        # A recovery may meet another trip, and so recover within itself.
        depth = [0]

        def recover(inner: Callable[..., int], *args: Any) -> int:
            depth[0] += 1
            try:
                return inner(*args)
            finally:
                depth[0] -= 1

        def read(batch: Tensors, streams: RandomStreams) -> Tensors:
            if depth[0] and when_recovering():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return batch

        stage.wrap(stage.run.recovery, "recover", recover)
        stage.checkpoint.before.append(read)

    return arm


def passes_from(first_pass: int) -> Fires:
    """A trigger that fires in every pass from number `first` on, counted from 1."""
    passes = count(1)
    return lambda: next(passes) >= first_pass
