"""Faults in loops that are not ours, guarded by the two lines of the plugin: accelerate loops and a Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from torch import nn

from dit_lora.config.recipe import LadderConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.world import Observation, World
from dit_lora.guard.plugin.guard import Guard

_STEPS, _WIDTH = 6, 16


class Toy(nn.Module):
    """Two layers with a norm between them, a table of classes, and a scale."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.classes = nn.Embedding(10, _WIDTH)
        self.register_buffer("scale", torch.ones(_WIDTH))
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH, eps=eps)
        self.last = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) * self.scale + self.classes(labels)))


@dataclass
class ToyLoop:
    """A stock accelerate loop; `spoil` is called where a fault can be put in."""

    accelerator: Accelerator
    model: nn.Module
    guard: Guard
    optimizer: Any
    schedule: Any
    ema: EMAModel
    spoil: Callable[["ToyLoop", int, dict[str, torch.Tensor]], None]
    loss: Callable[["ToyLoop", torch.Tensor, torch.Tensor], torch.Tensor]

    handles: list[Any] = field(default_factory=list)
    """Hooks that a fault has put in."""

    @property
    def bare(self) -> Toy:
        model: Toy = self.accelerator.unwrap_model(self.model)
        return model

    def run(self) -> None:
        bare = self.bare
        for step in range(1, _STEPS + 1):
            batch = _batch(step, self.accelerator.process_index)
            self.spoil(self, step, batch)
            ids = [f"step {step} row {row}" for row in range(len(batch["x"]))]
            with self.accelerator.accumulate(self.model), self.guard.microbatch(ids):
                output = self.model(batch["x"], labels=batch["labels"])
                self.accelerator.backward(self.loss(self, output, batch["y"]))
                self.accelerator.clip_grad_norm_(bare.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.ema.step(bare.parameters())
                self.optimizer.zero_grad()
        self.guard.require_finite()


def _batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "x": torch.randn(3, _WIDTH, generator=generator),
        "y": torch.randn(3, _WIDTH, generator=generator),
        "labels": torch.randint(0, 10, (3,), generator=generator),
    }


def _nothing(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    pass


def _mean_squared(loop: ToyLoop, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def _toy(
    world: World,
    spoil: Callable[[ToyLoop, int, dict[str, torch.Tensor]], None] = _nothing,
    *,
    loss: Callable[[ToyLoop, torch.Tensor, torch.Tensor], torch.Tensor] = _mean_squared,
    change: Callable[[Toy], None] = lambda model: None,
    accumulate: int = 1,
    config: LadderConfig | None = None,
) -> ToyLoop:
    torch.manual_seed(3)
    model = Toy()
    change(model)
    accelerator = world.accelerator
    accelerator.gradient_accumulation_steps = accumulate
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    prepared = accelerator.prepare(model, optimizer, schedule)
    ema = EMAModel(model.parameters())
    guard = Guard.attach(
        accelerator, prepared[0], prepared[1], ema=ema, config=config, folder=world.root / "guarded"
    )
    return ToyLoop(accelerator, prepared[0], guard, prepared[1], prepared[2], ema, spoil, loss)


def _observed(loop: ToyLoop, world: World, check: Callable[[ToyLoop], str | None]) -> Observation:
    """Return what the loop's guard said, and any state of the loop itself that is not as it must be."""
    error: DitLoraError | None = None
    try:
        loop.run()
        wrong = check(loop) or _not_finite(loop)
        error = CheckFailedError(wrong) if wrong else None
    except DitLoraError as problem:
        error = problem
    finally:
        loop.guard.detach()
        forget(loop.accelerator)
    empty = world.root / "nothing"
    return Observation(loop.guard.events, error, None, empty, empty, "")


def _not_finite(loop: ToyLoop) -> str | None:
    bad = [n for n, p in loop.model.named_parameters() if not torch.isfinite(p).all()]
    return f"not finite at the end: {bad}" if bad else None


def forget(accelerator: Accelerator) -> None:
    """Empty the accelerator, which serves every fault and must not keep this one's model."""
    for prepared in (accelerator._models, accelerator._optimizers, accelerator._schedulers):
        prepared.clear()


def _two_skipped(loop: ToyLoop) -> str | None:
    """Return a complaint unless one step of six was not taken, by anybody."""
    taken = _STEPS - 1
    counts = {int(state["step"]) for state in loop.optimizer.state.values()}
    rate = loop.schedule.get_last_lr()[0]
    # Accelerate steps a prepared schedule once a process.
    expected = 1e-2 * 0.9 ** (taken * loop.accelerator.num_processes)
    if counts != {taken}:
        return f"the optimizer took {counts} steps, not {taken}"
    if abs(rate - expected) > 1e-9:
        return f"the learning rate is {rate}, not {expected}"
    if loop.ema.optimization_step != taken:
        return f"the EMA took {loop.ema.optimization_step} steps, not {taken}"
    return None


def _nan_pixel(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    if step == 3:
        batch["x"][1, 2] = torch.nan


def _nan_target_on_one_rank(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    last = loop.accelerator.num_processes - 1
    if step == 3 and loop.accelerator.process_index == last:
        batch["y"][2, 1] = torch.nan


def _nan_moment(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    if step == 4:
        next(iter(loop.optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.nan


def _wrong_label(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    if step == 2:
        batch["labels"][2] = 12


def _nan_gradient(loop: ToyLoop, step: int, batch: dict[str, torch.Tensor]) -> None:
    """Set one element, after the backward and before clipping, once."""
    if step == 3:
        weight = next(iter(loop.bare.parameters()))
        handle: list[Any] = []

        def hook(grad: torch.Tensor) -> torch.Tensor:
            handle[0].remove()
            grad = grad.clone()
            grad.view(-1)[3] = torch.nan
            return grad

        handle.append(weight.register_hook(hook))


def _fp16(model: Toy) -> None:
    """Hold layers in fp16 as a frozen base is: only the table of classes trains, in fp32."""
    for layer in (model.first, model.norm, model.last):
        layer.half().requires_grad_(False)

    def first(input: torch.Tensor) -> torch.Tensor:
        layer = model.first
        return nn.functional.linear(input.to(layer.weight.dtype), layer.weight, layer.bias)

    def norm(input: torch.Tensor) -> torch.Tensor:
        layer = model.norm
        wide = input.to(layer.weight.dtype)
        return nn.functional.layer_norm(wide, (_WIDTH,), layer.weight, layer.bias, layer.eps)

    model.first.forward, model.norm.forward = first, norm  # type: ignore[method-assign]


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
    spoil: Callable[[ToyLoop, int, dict[str, torch.Tensor]], None] = _nothing,
    check: Callable[[ToyLoop], str | None] = lambda loop: None,
    **how: Any,
) -> Callable[[Fault, World], Observation]:
    """Play a fault in a loop; `check` says what is not as it must be at its end."""
    return lambda fault, world: _observed(_toy(world, spoil, **how), world, check)


def _scaler_collapses(fault: Fault, world: World) -> Observation:
    with _scaled(world.accelerator):
        return _observed(_toy(world, change=_overflowing_gradient), world, lambda loop: None)


def _scaled_nan(fault: Fault, world: World) -> Observation:
    with _scaled(world.accelerator):
        return _observed(_toy(world, _nan_pixel), world, _two_skipped)


def _fp16_weights(fault: Fault, world: World) -> Observation:
    """Attach to fp16 adapters, as PEFT 0.5 to 0.11 made on an fp16 base: AdamW makes NaN of a gradient of zero
    (N13).
    """
    error: DitLoraError | None = None
    try:
        _toy(world, change=lambda model: model.half())  # type: ignore[arg-type, return-value]
    except DitLoraError as problem:
        error = problem
    forget(world.accelerator)
    empty = world.root / "nothing"
    return Observation([], error, None, empty, empty, "")


def _trainer(fault: Fault, world: World) -> Observation:
    """Run a Trainer of Transformers on a tiny language model, one sample without a label to learn from."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dit_lora.guard.plugin.trainer_callback import GuardCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    data[2]["labels"] = torch.full((8,), -100)
    out = world.root / f"trainer_{world.accelerator.process_index}"
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=1, max_steps=6, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    callback = GuardCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.guard is not None
    model = callback.guard.suspects.model
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    error = CheckFailedError(f"not finite at the end: {bad}") if bad else None
    forget(world.accelerator)
    return Observation(callback.guard.events, error, None, out, Path("/nothing"), "")


_DATA = Expected("data", "skip", ("1 NaN",))
_STOP = LadderConfig(max_skips=1)
FAULTS: tuple[Fault, ...] = (
    Fault(
        "a NaN pixel in a stock loop",
        "plugin",
        "step 3",
        _DATA,
        play=played(_nan_pixel, _two_skipped),
    ),
    Fault(
        "a NaN pixel in a stock loop in fp16, with a scaler and clipping",
        "plugin",
        "step 3",
        _DATA,
        play=_scaled_nan,
    ),
    Fault(
        "a NaN target on one rank of a stock loop",
        "plugin",
        "step 3, last rank",
        Expected("data", "skip", ("gradient of the output",)),
        play=played(_nan_target_on_one_rank, _two_skipped),
    ),
    Fault(
        "a NaN gradient element in a stock loop",
        "plugin",
        "step 3",
        Expected("transient", "skip"),
        play=played(_nan_gradient, _two_skipped),
    ),
    Fault(
        "a NaN moment in a stock loop",
        "plugin",
        "step 4",
        Expected("optimizer", "rollback"),
        play=played(_nan_moment),
    ),
    Fault(
        "a label that the table does not have",
        "labels",
        "step 2",
        Expected("refused", "refused", ("step 2 row 2", "12", "classes has 0..9"), exit_code=2),
        play=played(_wrong_label),
    ),
    Fault(
        "a Trainer's sample with all labels ignored",
        "labels",
        "once an epoch",
        Expected("labels", "skip", ("-100",)),
        play=_trainer,
    ),
    Fault(
        "AdamW on fp16 parameters",
        "optimizer",
        "before the run",
        Expected("refused", "refused", ("fp16", "AdamW"), exit_code=2),
        play=_fp16_weights,
    ),
    Fault(
        "overflow of fp16",
        "precision",
        "from step 1",
        Expected("precision", "stop", ("first inf", "last"), exit_code=3),
        play=played(change=_overflowing, config=_STOP),
    ),
    Fault(
        "LayerNorm eps 1e-12 over zero queries in fp16",
        "precision",
        "from step 1",
        Expected("precision", "stop", ("in the backward",), module="norm", exit_code=3),
        play=played(change=_zero_queries, config=_STOP),
    ),
    Fault(
        "a loss scale that collapses",
        "precision",
        "from step 1",
        Expected("refused", "stop", ("every loss scale",), exit_code=3),
        play=_scaler_collapses,
    ),
)
