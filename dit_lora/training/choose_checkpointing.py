"""Chooses the gradient checkpointing that a run takes, by the memory its activations find free."""

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object

from dit_lora.config.optimizers import DEFAULT, OPTIMIZERS
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.memory import available_bytes
from dit_lora.numerics.streams import Streams
from dit_lora.training.execution.activation_checkpointing import (
    MODES,
    least_memory,
    require_checkpointing,
    set_checkpointing,
)
from dit_lora.training.execution.activations import Advice, advise, measure
from dit_lora.training.preserve import trained_losses
from dit_lora.training.task import AnySetup


def choose_checkpointing(setup: AnySetup, free: Callable[[AnySetup], int] | None = None) -> None:
    """Checkpoint the run's model as `train.checkpointing` says, and say so. Collective; equal on all ranks.

    `auto` is decided by the model as it is now: call it again when kernels were put in or taken out. No value
    depends on the choice, so that a resumed run may take another. Raises `DitLoraError` for a model without
    checkpointing that is asked for it. `free` gives the bytes that activations find, by default `free_bytes`.
    """
    asked = setup.recipe.train.asked_checkpointing
    require_checkpointing(setup.transformer, asked)
    # `measure` counts all modes from one pass without checkpointing.
    set_checkpointing(setup.transformer, "none")
    # One mode for all: a rank with less memory free would be the one to fail.
    agreed = most_saving(gather_object([_own(setup, free or free_bytes)]))
    set_checkpointing(setup.transformer, agreed.mode)
    setup.session.say(f"checkpointing: {agreed.words}")
    if not agreed.fits:
        setup.session.say(
            "warning: these activations will hardly fit; a smaller train.batch_size or shape of data needs "
            "less"
            + ("" if asked == "auto" else ", and train.checkpointing=auto takes what fits best")
        )


def most_saving(advices: Sequence[Advice]) -> Advice:
    """Return the advice that all ranks follow: the most saving one, the first of several."""
    return max(advices, key=lambda advice: (MODES.index(advice.mode), not advice.fits))


def _own(setup: AnySetup, free: Callable[[AnySetup], int]) -> Advice:
    """Return this rank's advice, by activations counted on tensors without values."""
    asked, size = setup.recipe.train.asked_checkpointing, setup.recipe.train.batch_size
    _, spec = setup.data.clips.largest
    batch = {name: (torch.Size([size, *shape]), dtype) for name, (shape, dtype) in spec.items()}
    streams = Streams(setup.recipe.train.seed, range(size))
    try:
        needs = measure(
            setup.transformer.train(),
            lambda model, tensors: trained_losses(setup.checkpoint, model, tensors, streams),
            batch,
            setup.session.accelerator.device,
            known={
                name: tensor.expand(size, *tensor.shape)
                for name, tensor in setup.data.clips.known().items()
            },
            alone=setup.engine.alone(),
        )
    # An op that takes no fake tensors, and token ids that do not fit the media, raise many classes.
    except (RuntimeError, ValueError) as error:
        mode = least_memory(setup.transformer) if asked == "auto" else asked
        reason = str(error).strip().partition("\n")[0]
        return Advice(mode, f"{mode}: activations could not be counted: {reason}", fits=True)
    # Embeddings and the output are not shared, but they are small.
    shared = setup.recipe.train.context_parallel
    needs = {mode: peak // shared for mode, peak in needs.items()}
    if setup.recipe.train.compile:
        # A compiled block is one piece, of which no attention can be kept alone.
        needs = {mode: peak for mode, peak in needs.items() if mode != "selective"}
    return advise(needs, free(setup), asked)


def free_bytes(setup: AnySetup) -> int:
    """Return the bytes that activations find free on this rank's device once the optimizer has all its state."""
    accelerator = setup.session.accelerator
    return max(
        0,
        available_bytes(accelerator.device, accelerator.num_processes)
        - bytes_to_come(setup.optimizer, setup.recipe.optim.name)
        - setup.engine.bytes_in_flight,
    )


def bytes_to_come(optimizer: torch.optim.Optimizer, name: str = DEFAULT) -> int:
    """Return the bytes of gradients and optimizer state that do not exist yet; `name` is `optim.name`."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = sum(local(p).nbytes for p in trained if p.grad is None)
    without_state = [local(p) for p in trained if p not in optimizer.state]
    return gradients + OPTIMIZERS[name].state_bytes(without_state)
