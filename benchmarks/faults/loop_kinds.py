"""Faults in loops unlike Accelerate's usual one: two models, a resume, epochs, closures, plain PyTorch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.loop import forget, observed
from benchmarks.faults.loops import spoil_gradient_once
from benchmarks.faults.triggers import Element
from benchmarks.faults.world import Observation, World
from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.attach.guard import Guard

_WIDTH = 6


class LoopEncoder(nn.Linear):
    """The model that comes before the denoiser and is trained with it."""


class LoopDenoiser(nn.Linear):
    """The model that the guard is given."""


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _everything(models: Sequence[nn.Module], optimizer: Any) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [t.detach().clone() for t in [*(p for m in models for p in m.parameters()), *moments]]


def _are_equal(tensors: list[Tensor], reference: list[Tensor]) -> bool:
    return len(tensors) == len(reference) and all(map(torch.equal, tensors, reference))


@contextmanager
def _accelerated(world: World) -> Iterator[Any]:
    world.accelerator.gradient_accumulation_steps = 1
    torch.manual_seed(3)
    try:
        yield world.accelerator
    finally:
        forget(world.accelerator)


def _two_models(fault: Fault, world: World) -> Observation:
    """Make one gradient element infinite in the text encoder, which the guard was never told of."""
    with _accelerated(world) as accelerator:
        models = [LoopEncoder(_WIDTH, _WIDTH), LoopDenoiser(_WIDTH, 2)]
        parameters = [p for model in models for p in model.parameters()]
        prepared_parts = accelerator.prepare(*models, torch.optim.AdamW(parameters, lr=1e-2))
        encoder, denoiser, optimizer = prepared_parts
        guard = Guard.attach(accelerator, denoiser, optimizer, folder=world.root / "guarded")

        def loop() -> str | None:
            for step in range(1, 5):
                if step == 3:
                    spoil_gradient_once(models[0].weight, Element(math.inf, 1))
                before = _everything(models, optimizer)
                accelerator.backward(denoiser(encoder(_batch(step, accelerator.process_index))).square().mean())
                accelerator.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                # Only the spoiled step may leave everything as it was.
                if _are_equal(_everything(models, optimizer), before) is not (step == 3):
                    return f"step {step} moved what it must not, or not what it must"
            return None

        return observed(lambda: guard, loop)


def _after_a_resume(fault: Fault, world: World) -> Observation:
    """Make a moment NaN after weights and moments were loaded: back to what was loaded, not to the attach."""
    with _accelerated(world) as accelerator:
        model = LoopDenoiser(_WIDTH, 2)
        prepared_model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        guard = Guard.attach(accelerator, prepared_model, optimizer, folder=world.root / "guarded")
        weights = {name: tensor + 5 for name, tensor in model.state_dict().items()}

        def loop() -> str | None:
            model.load_state_dict(weights)
            # Step 3 writes the NaN into the weights. One process undoes that at once, several at their next step.
            last_step = 3 if accelerator.num_processes == 1 else 4
            for step in range(1, last_step + 1):
                if step == 3:
                    optimizer.state[model.weight]["exp_avg"].view(-1)[0] = torch.nan
                output = prepared_model(_batch(step, accelerator.process_index))
                accelerator.backward(output.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights_after = model.state_dict()
            back = all(torch.equal(weights_after[name], tensor) for name, tensor in weights.items())
            return None if back else "the weights are not those that were loaded"

        return observed(lambda: guard, loop)


def _every_epoch(fault: Fault, world: World) -> Observation:
    """Give one bad sample of seven, for more epochs than `max_skips`."""
    config = RecoveryConfig(max_skips=3)
    with _accelerated(world) as accelerator:
        model = LoopDenoiser(_WIDTH, 2)
        prepared_model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        folder = world.root / "guarded"
        guard = Guard.attach(accelerator, prepared_model, optimizer, config=config, folder=folder)

        def loop() -> str | None:
            for number in range(7 * 8):
                sample = number % 7
                x = _batch(sample, 0)[:1]
                x[0, 2] = torch.nan if sample == 4 else x[0, 2]
                with guard.microbatch([f"clip {sample}"]):
                    accelerator.backward(prepared_model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps = {int(state["step"]) for state in optimizer.state.values()}
            return None if steps == {7 * 8 - 8} else f"{steps} steps were taken"

        return observed(lambda: guard, loop)


def _closure(fault: Fault, world: World) -> Observation:
    """Run a loop in plain PyTorch whose optimizer runs the backward itself, as Lightning has it."""
    torch.manual_seed(3)
    model = LoopDenoiser(_WIDTH, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.attach(None, model, optimizer, folder=world.root / "guarded")

    def loop() -> str | None:
        for step in range(1, 5):
            x = _batch(step, 0)
            x[1, 2] = torch.nan if step == 3 else x[1, 2]
            before = _everything([model], optimizer)

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            if _are_equal(_everything([model], optimizer), before) is not (step == 3):
                return f"step {step} moved what it must not, or not what it must"
        return None

    return observed(lambda: guard, loop)


_PIXEL = Expected("data", "skip", ("1 NaN",))
_ROW = Expected("inputs", "skip", ("1 NaN",))
_ENCODER = Expected("transient", "skip", ("gradient of LoopEncoder.weight",))
_MOMENT = Expected("optimizer", "rollback", ("weight/exp_avg",))
FAULTS: tuple[Fault, ...] = tuple(
    Fault(name, "plugin", moment, expected, play=play)
    for name, moment, expected, play in (
        (
            "an infinite gradient in a second trained model of a stock loop",
            "step 3",
            _ENCODER,
            _two_models,
        ),
        ("a NaN moment after a stock loop was resumed", "step 3", _MOMENT, _after_a_resume),
        ("one bad sample in every epoch of a stock loop", "8 epochs", _PIXEL, _every_epoch),
        ("a NaN pixel under a closure in plain PyTorch", "step 3", _ROW, _closure),
    )
)
