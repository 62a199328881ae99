"""The parts of a run that a diagnosis may inspect and switch off, and the micro-batch under diagnosis."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dit_lora.guard.frozen import FrozenRecord
from dit_lora.guard.replay import MicroBatch, Outcome, run
from dit_lora.guard.switches import Switch
from dit_lora.guard.verdict import Cause, Verdict
from dit_lora.numerics.dtensors import Describe, described
from dit_lora.numerics.quantized_linear import weight_values

T = TypeVar("T")
NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Attempt(Protocol):
    """Runs one experiment; returns None if the experiment has no result."""

    def __call__(self, experiment: Callable[[], T]) -> T | None: ...


def _uncontained(experiment: Callable[[], T]) -> T | None:
    return experiment()


def _no_other(_wanted: MicroBatch, _without: Collection[str]) -> MicroBatch | None:
    return None


@dataclass(frozen=True)
class Suspects:
    """The model, its state and its switches: everything that a diagnosis may inspect and switch off."""

    model: nn.Module
    """The unwrapped model, which replays run."""
    optimizer_state: NamedTensors
    switches: list[Switch] = field(default_factory=list)
    start_peak: float = 0.0
    """The largest trained weight when training started."""
    limit: float | None = None
    """Sample values with a larger magnitude are bad even if they are finite; None for no limit."""
    lockstep: bool = False
    """True if every rank runs the same diagnosis at the same time, as a sharded model (FSDP2) needs. All then get
    the same verdict, on weights and moments as a whole.
    """
    frozen: FrozenRecord | None = None
    """The frozen weights and buffers as they were at the start."""
    infinite: Collection[str] = ()
    """Names of frozen weights and buffers that held infinity at the start, as masks of -inf do."""
    peaks: Callable[[], Mapping[str, float]] = dict
    """Largest magnitudes of the tensors in the newest snapshot, by names of trained weights and `optimizer_state`."""
    switched_off: Collection[str] = ()
    """Names of switches that an earlier diagnosis turned off, which are not tested again."""
    decay: Callable[[], float] = float
    """Returns the largest fraction of a weight that one step's weight decay removes: learning rate times decay."""
    another: Callable[[MicroBatch, Collection[str]], MicroBatch | None] = _no_other
    """Returns a micro-batch of one sample other than those named, for comparison; None if there is none."""

    attempt: Attempt = _uncontained
    """Runs one experiment. In another loop it may raise, for example if the model cannot run a single sample."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the parameters by name; without lockstep, this rank's shards."""
        return self.model.named_parameters() if self.lockstep else weight_values(self.model)

    def in_use(self) -> list[Switch]:
        """The switches that are on. A part of a switch that is off, or a set of switches that are off, is excluded."""
        # A set of backends is off once each of its members is.
        disabled_names = set(self.switched_off)
        return [
            fallback
            for fallback in self.switches
            if fallback.name not in disabled_names
            and fallback.part_of not in disabled_names
            and not _all_off(fallback.name, disabled_names)
        ]


def _all_off(name: str, off: Collection[str]) -> bool:
    """True if every backend of a set such as `attention:flash+efficient` has been switched off individually."""
    kind, _, names = name.partition(":")
    return bool(names) and all(f"{kind}:{backend}" in off for backend in names.split("+"))


@dataclass
class Case:
    """One micro-batch under diagnosis; `found` makes its verdict."""

    micro_batch: MicroBatch
    suspects: Suspects
    kind: str
    control: MicroBatch | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    rank: int = -1
    """The rank at fault, if it is not the micro-batch's; else -1."""
    failed: int = 0
    """Number of unhealthy runs of the unchanged micro-batch, out of `runs`."""
    runs: int = 0

    def wrong(self, tensors: Iterable[tuple[str, torch.Tensor]], how: Describe) -> list[str]:
        """Describe bad tensors with `how`, and record the first rank that has any."""
        # Maps each description to the rank whose values it is about, or to -1 without other ranks.
        descriptions = described(tensors, how, together=self.suspects.lockstep)
        self.rank = next(iter(descriptions.values()), -1) if self.rank < 0 else self.rank
        return list(descriptions)

    def found(self, cause: Cause, words: str, **facts: Any) -> Verdict:
        """Make the verdict on this micro-batch."""
        batch = self.micro_batch
        return Verdict(
            cause,
            words,
            step=batch.step,
            rank=batch.rank if self.rank < 0 else self.rank,
            micro_step=batch.micro_step,
            evidence=self.evidence,
            **facts,
        )

    def is_healthy(self, outcome: Outcome) -> bool:
        return outcome.is_healthy(needs_gradient=self.kind == "zero_gradient")

    def healthy(self, batch: MicroBatch | None = None) -> bool:
        """Run a micro-batch once, by default the one under diagnosis; True if it is healthy."""
        return self.is_healthy(run(batch or self.micro_batch, self.suspects.model))

    def again(self) -> Outcome:
        """Run the unchanged micro-batch, and count whether it is healthy."""
        outcome = run(self.micro_batch, self.suspects.model)
        self.runs += 1
        self.failed += not self.is_healthy(outcome)
        return outcome
