"""Faults in loops that are not ours: of Accelerate, in plain PyTorch, and of trainers."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.loop import (
    STEPS,
    WIDTH,
    BadData,
    Batch,
    Check,
    PlainToyLoop,
    Spoil,
    Toy,
    ToyLoop,
    forget,
    not_finite,
    observed,
)
from benchmarks.faults.loop_trainers import TRAINERS
from benchmarks.faults.triggers import Change, Element, write
from benchmarks.faults.world import Observation, World
from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import CheckFailedError, DitLoraError


def _two_skipped(loop: ToyLoop) -> str | None:
    """A complaint unless optimizer, schedule and EMA skipped exactly one of the six steps; else None."""
    num_steps = STEPS - 1
    counts = {int(state["step"]) for state in loop.optimizer.state.values()}
    rate = loop.schedule.get_last_lr()[0]
    expected = 1e-2 * 0.9 ** (num_steps * loop.schedule_steps)
    if counts != {num_steps}:
        return f"the optimizer took {counts} steps, not {num_steps}"
    if abs(rate - expected) > 1e-9:
        return f"the learning rate is {rate}, not {expected}"
    if loop.ema is not None and loop.ema.optimization_step != num_steps:
        return f"the EMA took {loop.ema.optimization_step} steps, not {num_steps}"
    return None


def _named(step: int, row: int) -> Check:
    """A check that exactly one step of six was skipped, and that only this sample is named."""

    def check(loop: ToyLoop) -> str | None:
        blamed = [e["sample_ids"] for e in loop.guard.events if e["verdict"]["cause"] == "data"]
        right = [loop.sample(step, row)]
        problem = f"named are {blamed}, not {right}" if any(name != right for name in blamed) else None
        return problem or _two_skipped(loop)

    return check


def at(
    step: int,
    find: Callable[[ToyLoop, Batch], torch.Tensor],
    change: Change,
    *,
    on_last_rank: bool = False,
) -> Spoil:
    """Change a tensor before a step."""

    def spoil(loop: ToyLoop, number: int, batch: Batch) -> None:
        if number == step and (not on_last_rank or loop.accelerator.is_last_process):
            write(find(loop, batch), change)

    return spoil


def in_batch(step: int, name: str, index: int, value: float, *, on_last_rank: bool = False) -> Spoil:
    """Set one element of a batch."""
    change = Element(value, index)
    return BadData(at(step, lambda loop, batch: batch[name], change, on_last_rank=on_last_rank))


def spoil_gradient_once(parameter: torch.Tensor, change: Change) -> None:
    """Change a gradient after the next backward only, so that a replay finds it healthy."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return change(gradient)

    handle = parameter.register_hook(hook)


def _nan_gradient(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Set one element, after the backward and before clipping."""
    if step == 3:
        spoil_gradient_once(next(loop.bare.parameters()), Element(math.nan, 3))


def _half(model: Toy) -> None:
    """Train all of the model in fp16."""
    model.half()
    model.register_forward_pre_hook(lambda module, args: tuple(x.half() for x in args))


def _fp16(model: Toy) -> None:
    """Hold layers in fp16 as a frozen base is: only the table of classes trains, in fp32."""
    for layer in (model.first, model.norm, model.last):
        layer.half().requires_grad_(False)

    def apply_first(input: torch.Tensor) -> torch.Tensor:
        layer = model.first
        return nn.functional.linear(input.to(layer.weight.dtype), layer.weight, layer.bias)

    def norm(input: torch.Tensor) -> torch.Tensor:
        layer = model.norm
        cast_input = input.to(layer.weight.dtype)
        return nn.functional.layer_norm(cast_input, (WIDTH,), layer.weight, layer.bias, layer.eps)

    model.first.forward, model.norm.forward = apply_first, norm  # type: ignore[method-assign]


def _overflowing(model: Toy) -> None:
    _fp16(model)
    with torch.no_grad():
        model.last.weight.normal_(std=1e4)


def _zero_queries(model: Toy) -> None:
    """Put BERT's eps of 1e-12 over rows that are all zero: 1e6 times the gradient, beyond fp16 (N14)."""
    _fp16(model)
    model.norm.eps = 1e-12
    with torch.no_grad():
        model.classes.weight.zero_()
        model.first.weight.zero_()
        model.first.bias.zero_()
        model.last.weight.normal_(std=30.0)


def _overflowing_gradient(model: Toy) -> None:
    model.first.weight.register_hook(lambda grad: grad * torch.inf)


@contextmanager
def _scaled(accelerator: Accelerator) -> Iterator[None]:
    """Scale as mixed_precision=fp16 does, which Accelerate offers on a GPU only: clipping unscales first."""
    before = accelerator.native_amp, accelerator.state._mixed_precision
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    try:
        yield
    finally:
        accelerator.scaler = None
        accelerator.native_amp, accelerator.state._mixed_precision = before


def played(
    spoil: Spoil = lambda loop, step, batch: None,
    check: Check = lambda loop: None,
    *,
    scaled: bool = False,
    kind: type[ToyLoop] = ToyLoop,
    **loop_options: Any,
) -> Callable[[Fault, World], Observation]:
    """Play a fault in a loop. `check` returns a description of the problem at its end, or None."""

    def play(fault: Fault, world: World) -> Observation:
        def run() -> str | None:
            loop.run()
            return check(loop) or not_finite(loop.model)

        with _scaled(world.accelerator) if scaled else nullcontext():
            try:
                loop = kind(world, spoil, **loop_options)
                return observed(lambda: loop.guard, run)
            except DitLoraError as refused:  # by the guard, which does not attach
                return Observation([], refused)
            finally:
                forget(world.accelerator)

    return play


def _label_outside_of_the_table(fault: Fault, world: World) -> Observation:
    """Give a label that the table does not have: torch's error ends the loop, and the guard has named the sample."""
    messages: list[str] = []
    loop = ToyLoop(world, in_batch(2, "labels", 2, 12))
    recovery: Any = loop.guard._recovery
    recovery.log = messages.append
    try:
        loop.run()
    except IndexError:
        return Observation(loop.guard.events, DitLoraError("\n".join(messages)))
    finally:
        loop.guard.detach()
        forget(world.accelerator)
    return Observation(loop.guard.events, None)


def _trainer(fault: Fault, world: World) -> Observation:
    """Run a Trainer of Transformers on a tiny language model, one sample without a label to learn from."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dit_lora.guard.attach.callbacks.trainer_callback import GuardCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    data[2]["labels"] = torch.full((8,), -100)
    folder = world.root / f"trainer_{world.accelerator.process_index}"
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, max_steps=6, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    callback = GuardCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.guard is not None
    bad = not_finite(callback.guard.diagnosis_context.model)
    forget(world.accelerator)
    return Observation(callback.guard.events, CheckFailedError(bad) if bad else None, folder=folder)


def _moment(loop: ToyLoop, batch: Batch) -> torch.Tensor:
    moment: torch.Tensor = next(iter(loop.optimizer.state.values()))["exp_avg"]
    return moment


def in_loops(
    name: str,
    when: str,
    expected: Expected,
    *arguments: Any,
    in_trainers: Expected | None = None,
    **options: Any,
) -> tuple[Fault, ...]:
    """The fault in every kind of loop: Accelerate's as published scripts have it, a plain one, trainers'.

    Args:
        name: Begins the fault's name.
        when: When it strikes.
        expected: What the guard must say and do.
        arguments: Arguments of `played`.
        in_trainers: What it must say and do in trainers, if that differs: their batches come from a loader.
        options: Options of `played`.
    """
    kinds: dict[str, type[ToyLoop]] = {
        "a stock loop": ToyLoop,
        "a plain loop": PlainToyLoop,
        **TRAINERS,
    }
    return tuple(
        Fault(
            f"{name} in {loop}",
            "plugin",
            when,
            in_trainers if in_trainers is not None and loop in TRAINERS else expected,
            play=played(*arguments, kind=kind, **options),
            most_ranks=1 if loop in TRAINERS else 8,
        )
        for loop, kind in kinds.items()
    )


def _precision(name: str, expected: Expected, change: Callable[[Toy], None], **options: Any) -> Fault:
    play = played(change=change, **options)
    return Fault(name, "precision", "from step 1", expected, play=play)


_DATA = Expected("data", "skip", ("1 NaN",))
# What comes back from outside of the model is no fact about a sample, unless the item is bad as it was loaded.
_TARGET_OF_NOBODY = Expected("unknown", "skip", ("the gradient of the output is not",))
_TARGET_OF_AN_ITEM = Expected("data", "skip", ("y has 1 NaN",))
_TRANSIENT, _ROLLED = Expected("transient", "skip"), Expected("optimizer", "rollback")
_LABEL = Expected("refused", "refused", ("step 2 row 2", "12", "classes has 0..9"), exit_code=2)
_FP16 = Expected("precision", "skip", ("it is fp16, where AdamW's eps of 1e-8 is 0",))
_OVERFLOW = Expected("precision", "stop", ("first inf", "last"), exit_code=3)
_BACKWARD = Expected("precision", "stop", ("in the backward",), module="norm", exit_code=3)
_COLLAPSE = Expected("refused", "stop", ("every loss scale",), exit_code=3)
_IGNORED = Expected("labels", "report", ("-100",))
_STOP = RecoveryConfig(max_skips=1)
_PIXEL = in_batch(3, "x", 18, math.nan)
_TARGET = in_batch(3, "y", 33, math.nan, on_last_rank=True)
FAULTS: tuple[Fault, ...] = (
    *in_loops("a NaN pixel", "step 3", _DATA, _PIXEL, _named(3, 1)),
    Fault(
        "a NaN pixel in a stock loop in fp16, with a scaler and clipping",
        "plugin",
        "step 3",
        _DATA,
        play=played(_PIXEL, _named(3, 1), scaled=True),
    ),
    *in_loops(
        "a NaN target on one rank",
        "step 3, last rank",
        _TARGET_OF_NOBODY,
        _TARGET,
        _named(3, 2),
        in_trainers=_TARGET_OF_AN_ITEM,
    ),
    *in_loops("a NaN gradient element", "step 3", _TRANSIENT, _nan_gradient, _two_skipped),
    *in_loops("a NaN moment", "step 4", _ROLLED, at(4, _moment, Element(math.nan, 0))),
    Fault(
        "a label that the table does not have",
        "labels",
        "step 2",
        _LABEL,
        play=_label_outside_of_the_table,
    ),
    Fault(
        "a Trainer's sample with all labels ignored",
        "labels",
        "once an epoch",
        _IGNORED,
        play=_trainer,
    ),
    # As PEFT 0.5 to 0.11 made adapters on an fp16 base: AdamW makes NaN of a gradient of zero (N13).
    Fault(
        "AdamW on fp16 parameters",
        "optimizer",
        "from step 1",
        _FP16,
        play=played(change=_half),
    ),
    _precision("overflow of fp16", _OVERFLOW, _overflowing, config=_STOP),
    _precision("LayerNorm eps 1e-12 over zero queries in fp16", _BACKWARD, _zero_queries, config=_STOP),
    _precision(
        "a loss scale that collapses",
        _COLLAPSE,
        _overflowing_gradient,
        scaled=True,
        config=RecoveryConfig(),
    ),
)
