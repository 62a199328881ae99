"""Faults in loops that are not ours, guarded by the two lines of the plugin: accelerate loops and a Trainer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from torch import nn

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.triggers import Change, Element, write
from dit_lora.faults.world import Observation, World
from dit_lora.guard.plugin.guard import Guard

STEPS, _WIDTH = 6, 16


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


class ToyLoop:
    """A stock accelerate loop; `spoil` is called where a fault can be put in."""

    def __init__(
        self,
        world: World,
        spoil: "Spoil",
        change: Callable[[Toy], object] = lambda model: None,
        config: LadderConfig | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.bare = Toy()
        change(self.bare)
        self.spoil = spoil
        self.accelerator = world.accelerator
        self.accelerator.gradient_accumulation_steps = 1
        trained = [p for p in self.bare.parameters() if p.requires_grad]
        self.model: nn.Module = self.bare
        self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        self.schedule: Any = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.schedule_steps = 1
        """Number of steps of the schedule in one of the optimizer."""
        self.ema = EMAModel(self.bare.parameters())
        self.guard = self.guarded(config, world.root / "guarded")
        self.handles: list[Any] = []
        """Hooks that a fault has put in."""

    def guarded(self, config: LadderConfig | None, folder: Path) -> Guard:
        """Prepare the loop as its kind does, and guard it."""
        accelerator = self.accelerator
        prepared = accelerator.prepare(self.bare, self.optimizer, self.schedule)
        self.model, self.optimizer, self.schedule = prepared
        # Accelerate steps a prepared schedule once a process.
        self.schedule_steps = accelerator.num_processes
        return Guard.attach(
            accelerator, self.model, self.optimizer, ema=self.ema, config=config, folder=folder
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients, and clip them."""
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.bare.parameters(), 1.0)

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            batch = batch_of(step, self.accelerator.process_index)
            self.spoil(self, step, batch)
            ids = [f"step {step} row {row}" for row in range(len(batch["x"]))]
            with self.accelerator.accumulate(self.model), self.guard.microbatch(ids):
                output = self.model(batch["x"], labels=batch["labels"])
                self.backward((output.float() - batch["y"]).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.ema.step(self.bare.parameters())
                self.optimizer.zero_grad()
        self.guard.require_finite()


class PlainToyLoop(ToyLoop):
    """The same loop in plain PyTorch, and in DDP over several ranks."""

    def guarded(self, config: LadderConfig | None, folder: Path) -> Guard:
        if self.accelerator.num_processes > 1:
            self.model = nn.parallel.DistributedDataParallel(self.bare)
        return Guard.watch(
            self.model,
            self.optimizer,
            lr_scheduler=self.schedule,
            ema=self.ema,
            config=config,
            folder=folder,
        )

    def backward(self, loss: torch.Tensor) -> None:
        # Without clipping: of that a guard knows nothing here, and it spreads one NaN to all gradients.
        loss.backward()


Batch = dict[str, torch.Tensor]
Spoil = Callable[[ToyLoop, int, Batch], None]
Check = Callable[[ToyLoop], str | None]


def batch_of(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "x": torch.randn(3, _WIDTH, generator=generator),
        "y": torch.randn(3, _WIDTH, generator=generator),
        "labels": torch.randint(0, 10, (3,), generator=generator),
    }


def observed(guard: Guard, run: Callable[[], str | None]) -> Observation:
    """Return what the guard said of a loop, which returns what is not as it must be."""
    error: DitLoraError | None = None
    try:
        wrong = run()
        error = CheckFailedError(wrong) if wrong else None
    except DitLoraError as problem:
        error = problem
    finally:
        guard.detach()
    return Observation(guard.events, error)


def not_finite(model: nn.Module) -> str | None:
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    return f"not finite at the end: {bad}" if bad else None


def forget(accelerator: Accelerator) -> None:
    """Empty the accelerator, which serves every fault and must not keep this one's model."""
    for prepared in (accelerator._models, accelerator._optimizers, accelerator._schedulers):
        prepared.clear()


def _two_skipped(loop: ToyLoop) -> str | None:
    """Return a complaint unless one step of six was not taken, by anybody."""
    taken = STEPS - 1
    counts = {int(state["step"]) for state in loop.optimizer.state.values()}
    rate = loop.schedule.get_last_lr()[0]
    expected = 1e-2 * 0.9 ** (taken * loop.schedule_steps)
    if counts != {taken}:
        return f"the optimizer took {counts} steps, not {taken}"
    if abs(rate - expected) > 1e-9:
        return f"the learning rate is {rate}, not {expected}"
    if loop.ema.optimization_step != taken:
        return f"the EMA took {loop.ema.optimization_step} steps, not {taken}"
    return None


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


def in_batch(
    step: int, name: str, index: int, value: float, *, on_last_rank: bool = False
) -> Spoil:
    """Set one element of a batch."""
    change = Element(value, index)
    return at(step, lambda loop, batch: batch[name], change, on_last_rank=on_last_rank)


def spoil_gradient_once(parameter: torch.Tensor, change: Change) -> None:
    """Change a gradient after the next backward alone: a replay finds it healthy."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return change(gradient)

    handle = parameter.register_hook(hook)


def _nan_gradient(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Set one element, after the backward and before clipping."""
    if step == 3:
        spoil_gradient_once(next(loop.bare.parameters()), Element(math.nan, 3))


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
    spoil: Spoil = lambda loop, step, batch: None,
    check: Check = lambda loop: None,
    *,
    scaled: bool = False,
    kind: type[ToyLoop] = ToyLoop,
    **how: Any,
) -> Callable[[Fault, World], Observation]:
    """Play a fault in a loop; `check` says what is not as it must be at its end."""

    def play(fault: Fault, world: World) -> Observation:
        def run() -> str | None:
            loop.run()
            return check(loop) or not_finite(loop.model)

        with _scaled(world.accelerator) if scaled else nullcontext():
            try:
                loop = kind(world, spoil, **how)
                return observed(loop.guard, run)
            except DitLoraError as refused:  # by the guard, which does not attach
                return Observation([], refused)
            finally:
                forget(world.accelerator)

    return play


def _trainer(fault: Fault, world: World) -> Observation:
    """Run a Trainer of Transformers on a tiny language model, one sample without a label to learn from."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dit_lora.guard.plugin.callbacks.trainer_callback import GuardCallback

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
    bad = not_finite(callback.guard.suspects.model)
    forget(world.accelerator)
    return Observation(callback.guard.events, CheckFailedError(bad) if bad else None, folder=out)


def _moment(loop: ToyLoop, batch: Batch) -> torch.Tensor:
    moment: torch.Tensor = next(iter(loop.optimizer.state.values()))["exp_avg"]
    return moment


def in_loops(
    name: str, when: str, expected: Expected, *how: Any, **options: Any
) -> tuple[Fault, ...]:
    """Return the fault in an accelerate loop as published scripts have it, and in a plain one."""
    kinds = {"stock": ToyLoop, "plain": PlainToyLoop}
    return tuple(
        Fault(
            f"{name} in a {loop} loop",
            "plugin",
            when,
            expected,
            play=played(*how, kind=kind, **options),
        )
        for loop, kind in kinds.items()
    )


def _precision(name: str, expected: Expected, change: Callable[[Toy], None], **how: Any) -> Fault:
    play = played(change=change, **how)
    return Fault(name, "precision", "from step 1", expected, play=play)


_DATA = Expected("data", "skip", ("1 NaN",))
_OUTPUT = Expected("data", "skip", ("gradient of the output",))
_TRANSIENT, _ROLLED = Expected("transient", "skip"), Expected("optimizer", "rollback")
_LABEL = Expected("refused", "refused", ("step 2 row 2", "12", "classes has 0..9"), exit_code=2)
_FP16 = Expected("refused", "refused", ("fp16", "AdamW"), exit_code=2)
_OVERFLOW = Expected("precision", "stop", ("first inf", "last"), exit_code=3)
_BACKWARD = Expected("precision", "stop", ("in the backward",), module="norm", exit_code=3)
_COLLAPSE = Expected("refused", "stop", ("every loss scale",), exit_code=3)
_IGNORED = Expected("labels", "skip", ("-100",))
_STOP = LadderConfig(max_skips=1)
_PIXEL = in_batch(3, "x", 18, math.nan)
_TARGET = in_batch(3, "y", 33, math.nan, on_last_rank=True)
FAULTS: tuple[Fault, ...] = (
    *in_loops("a NaN pixel", "step 3", _DATA, _PIXEL, _two_skipped),
    Fault(
        "a NaN pixel in a stock loop in fp16, with a scaler and clipping",
        "plugin",
        "step 3",
        _DATA,
        play=played(_PIXEL, _two_skipped, scaled=True),
    ),
    *in_loops("a NaN target on one rank", "step 3, last rank", _OUTPUT, _TARGET, _two_skipped),
    *in_loops("a NaN gradient element", "step 3", _TRANSIENT, _nan_gradient, _two_skipped),
    *in_loops("a NaN moment", "step 4", _ROLLED, at(4, _moment, Element(math.nan, 0))),
    Fault(
        "a label that the table does not have",
        "labels",
        "step 2",
        _LABEL,
        play=played(in_batch(2, "labels", 2, 12)),
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
        "before the run",
        _FP16,
        play=played(change=lambda model: model.half()),
    ),
    _precision("overflow of fp16", _OVERFLOW, _overflowing, config=_STOP),
    _precision(
        "LayerNorm eps 1e-12 over zero queries in fp16", _BACKWARD, _zero_queries, config=_STOP
    ),
    _precision("a loss scale that collapses", _COLLAPSE, _overflowing_gradient, scaled=True),
)
