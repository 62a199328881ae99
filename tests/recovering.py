"""A small model in training and the recovery of its run, whose diagnosis is faked."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from micro_batches import FakeContext, fake_batch
from torch import nn

from dit_lora.config.recipe import GuardConfig
from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.errors import DitLoraError
from dit_lora.guard.diagnosis import Diagnosis, Event
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.recovery import Policy
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.parameters import get_trainable_parameters
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.optim.state import optimizer_state
from dit_lora.training.recovery import run_recovery as recovery_module

SAMPLES = [f"{k}.mp4" for k in range(5)]


@dataclass
class FakeFiles:
    """Notes what recovery does to a run's folder."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    refuse: DitLoraError | None = None
    newest: int = 0

    def write_event(self, event: Event) -> None:
        self.events.append(event.to_record())

    def rewind_logs_and_checkpoints(self, step: int, *, is_new_trajectory: bool) -> None:
        self.calls.append(("rewind", step, is_new_trajectory))

    def save_quarantine(self, quarantine: Quarantine) -> None:
        self.calls.append(("quarantined", [record.sample_id for record in quarantine.records]))

    def mark_bad_entries(self, samples: Sequence[str]) -> list[str]:
        self.calls.append(("set_aside_bad", list(samples)))
        return [f"marked {sample}" for sample in samples]

    def save_run_checkpoint(self, step: int, guard_state: Mapping[str, Any]) -> None:
        self.calls.append(("save", step))
        if self.refuse is not None:
            raise self.refuse

    def find_newest_saved_step(self) -> int:
        return self.newest

    def save_if_due(self, step: int, guard_state: Mapping[str, Any]) -> None:
        self.calls.append(("left_out", step))

    def write_replay_bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        self.calls.append(("bundle", micro_batch.rank, micro_batch.micro_step))
        return f"bundles/{micro_batch.micro_step}"

    def say(self, line: str) -> None:
        self.said.append(line)


class Guarded:
    """A small model in training, and the recovery of its run."""

    def __init__(self, path: Path, **guard: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        group = {"name": "adapter", "params": parameters, "param_names": names}
        self.optimizer = torch.optim.AdamW([group], lr=0.1, fused=True)
        self.files = FakeFiles()
        self.turned_off: list[str] = []
        turn_off = partial(self.turned_off.append, "attention:flash")
        switch = Fallback("attention:flash", "attention_backend", nullcontext, turn_off, "math")
        quarantine = Quarantine(path / "quarantine.jsonl")
        self.recovery = recovery_module.RunRecovery(
            diagnosis_context=FakeContext(
                model=self.model, fallbacks=[switch], state=lambda: optimizer_state(self.optimizer).items()
            ),
            engine=Engine(None, self.model, self.optimizer),  # type: ignore[arg-type]
            policy=Policy(GuardConfig(**guard).recovery_config),
            state=recovery_module.GuardState(),
            quarantine=quarantine,
            order=SampleOrder(SAMPLES, seed=0, quarantine=quarantine),
            snapshots=Snapshots(self.state, interval_steps=2),
            samples_per_step=2,
            files=self.files,
        )

    def state(self) -> dict[str, torch.Tensor]:
        return {**get_trainable_parameters(self.model), **optimizer_state(self.optimizer)}

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.model(torch.full((1, 2), float(step))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def in_step(self, step: int) -> list[str]:
        """The samples of a step's two micro-batches."""
        return [SAMPLES[self.recovery.order.get_occurrence(p).sample_index] for p in range(2 * step - 2, 2 * step)]

    def fail_step(self, step: int, *diagnoses: Diagnosis, kind: str = "non_finite_loss") -> int:
        """Let the step fail with these diagnoses, one for each of its micro-batches."""
        micro_batches = [self.micro_batch(step, micro) for micro in range(2)]
        by_micro_step = {diagnosis.micro_step: replace(diagnosis, step=step) for diagnosis in diagnoses}
        failed_positions = tuple((0, micro) for micro in sorted(m for m in by_micro_step if m is not None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recovery_module, "diagnose", lambda batch, *_, **__: by_micro_step[batch.micro_step])
            return self.recovery.recover(recovery_module.RunFailure(step, kind, failed_positions, None, micro_batches))

    def micro_batch(self, step: int, micro_step: int, rank: int = 0) -> MicroBatch:
        def never(*arguments: Any) -> Any:
            raise AssertionError("the diagnosis is faked")

        ids = (self.in_step(step)[micro_step],)
        return fake_batch(ids, step, micro_step, rank, {}, never, never)


def make_diagnosis(cause: Any, *samples: str, micro_step: int | None = 0, **facts: Any) -> Diagnosis:
    fields = {"step": 0, "rank": 0, "micro_step": micro_step, "sample_ids": samples, **facts}
    return Diagnosis(cause, f"it is {cause}", **fields)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
