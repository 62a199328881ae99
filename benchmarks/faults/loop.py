"""A small training loop that is not ours, guarded as a plugin guards: with Accelerate, or in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from torch import nn

from benchmarks.faults.world import Observation, World
from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.guard.attach.guard import Guard

STEPS, ROWS, WIDTH = 6, 3, 16


class Toy(nn.Module):
    """Two layers with a norm between them, a table of classes, and a scale."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.classes = nn.Embedding(10, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) * self.scale + self.classes(labels)))


class ToyLoop:
    """A stock accelerate loop; `spoil` is called where a fault can be put in."""

    def __init__(
        self,
        world: World,
        spoil: "Spoil",
        change: Callable[[Toy], object] = lambda model: None,
        config: RecoveryConfig | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.bare = self.toy()
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
        self.ema: EMAModel | None = EMAModel(self.bare.parameters())
        self.handles: list[Any] = []
        """Hooks that a fault has put in."""
        self.config = config
        self.folder = world.root / "guarded"
        self.guard: Guard
        self.begin()

    def toy(self) -> Toy:
        """Make the model."""
        return Toy()

    def begin(self) -> None:
        """Guard the loop; a trainer does so itself, when it begins."""
        self.guard = self.guarded(self.config, self.folder)

    def sample(self, step: int, row: int) -> str:
        """Name of a sample."""
        return f"step {step} row {row}"

    def guarded(self, config: RecoveryConfig | None, folder: Path) -> Guard:
        """Prepare the loop as its kind does, and guard it."""
        accelerator = self.accelerator
        prepared_parts = accelerator.prepare(self.bare, self.optimizer, self.schedule)
        self.model, self.optimizer, self.schedule = prepared_parts
        # Accelerate steps a prepared schedule once a process.
        self.schedule_steps = accelerator.num_processes
        return Guard.attach(accelerator, self.model, self.optimizer, ema=self.ema, config=config, folder=folder)

    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients, and clip them."""
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.bare.parameters(), 1.0)

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            batch = batch_of(step, self.accelerator.process_index)
            self.spoil(self, step, batch)
            ids = [self.sample(step, row) for row in range(ROWS)]
            with self.accelerator.accumulate(self.model), self.guard.microbatch(ids):
                output = self.model(batch["x"], labels=batch["labels"])
                self.backward((output.float() - batch["y"]).square().mean())
                self.optimizer.step()
                self.schedule.step()
                assert self.ema is not None
                self.ema.step(self.bare.parameters())
                self.optimizer.zero_grad()
        self.guard.require_finite()


class PlainToyLoop(ToyLoop):
    """The same loop in plain PyTorch, and in DDP over several ranks."""

    def guarded(self, config: RecoveryConfig | None, folder: Path) -> Guard:
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


@dataclass(frozen=True)
class BadData:
    """A fault in the data of a batch. Loops whose batches come from a dataset have it in the dataset's items."""

    spoil: Spoil

    def __call__(self, loop: ToyLoop, step: int, batch: Batch) -> None:
        self.spoil(loop, step, batch)


Check = Callable[[ToyLoop], str | None]


def batch_of(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "y": torch.randn(ROWS, WIDTH, generator=generator),
        "labels": torch.randint(0, 10, (ROWS,), generator=generator),
    }


def observed(guard: Callable[[], Guard], run: Callable[[], str | None]) -> Observation:
    """Run a loop under its guard and collect what the guard reported.

    `run` returns a description of the problem after the loop, or None. `guard` is called after the loop, because
    some loops create their guard late.
    """
    error: DitLoraError | None = None
    try:
        failed_check = run()
        error = CheckFailedError(failed_check) if failed_check else None
    except DitLoraError as problem:
        error = problem
    finally:
        guard().detach()
    return Observation(guard().events, error)


def not_finite(model: nn.Module) -> str | None:
    """Say which trained weights and buffers are not finite; of frozen weights no guard holds a copy."""
    trained_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    bad = [name for name, t in [*trained_parameters, *model.named_buffers()] if not torch.isfinite(t).all()]
    return f"not finite at the end: {bad}" if bad else None


def forget(accelerator: Accelerator) -> None:
    """Empty the accelerator, which serves every fault and must not keep this one's model."""
    for prepared_list in (accelerator._models, accelerator._optimizers, accelerator._schedulers):
        prepared_list.clear()
