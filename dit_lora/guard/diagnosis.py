"""A diagnosis: the `DiagnosisContext` that it may inspect, its progress, its result, and its line in events.jsonl.

`PendingDiagnosis` collects the evidence about one micro-batch, and its `build_final_diagnosis` creates the
`Diagnosis`: a cause, a message and the evidence. `Event` adds the step, the kind of failure and the action taken.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from dit_lora.errors import join_first_items
from dit_lora.guard.fallbacks import Fallback
from dit_lora.guard.frozen_weights import FrozenWeightDigests
from dit_lora.guard.replay import MicroBatch, ReplayOutcome, replay_micro_batch
from dit_lora.numerics.dtensors import DescribeTensor, describe_tensors
from dit_lora.numerics.quantized_linear import iterate_weight_values

T = TypeVar("T")
Cause = Literal[
    "data",  # a sample's own tensors, or one sample that fails whatever is switched off
    "labels",  # nothing to learn from, or out of range
    "inputs",  # noise, timestep or schedule: finite samples, but not what the model was given
    "step",  # the place in the run, whatever sample is there, or samples only in company
    "rank",  # one rank fails at what another computes from the same weights and samples
    "precision",  # finite in fp32
    "kernel",
    "attention_backend",
    "weights",
    "optimizer",
    "learning_rate",
    "transient",  # finite when it was run again, or now and then
    "unknown",
]


@dataclass(frozen=True)
class Diagnosis:
    """The cause of one failed step on one rank, with the evidence."""

    cause: Cause
    message: str
    step: int
    rank: int
    micro_step: int | None = None
    sample_ids: tuple[str, ...] = ()
    """The samples at fault; empty if there are none."""
    module: str | None = None
    op: str | None = None
    direction: str | None = None
    dtype: str | None = None
    timesteps: tuple[int, ...] = ()
    """Timesteps of the samples at fault, or of the micro-batch."""
    switch: str | None = None
    """Name of the component without which the step is finite; None if there is none."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_sample_names(self) -> bool:
        """True if the diagnosis's message describes several samples, each as "name: problem"."""
        return len(self.sample_ids) > 1 and all(f"{sample}: " in self.message for sample in self.sample_ids)

    def replace_sample_ids(self, sample_ids: Sequence[str]) -> "Diagnosis":
        """Copy a diagnosis with other sample names, also in its message."""
        message = self.message
        if len(sample_ids) == len(self.sample_ids):
            # A message about several samples starts each part with the sample's name and a colon.
            for old, new in zip(self.sample_ids, sample_ids, strict=True):
                message = message.replace(f"{old}: ", f"{new}: ")
        return replace(self, message=message, sample_ids=tuple(sample_ids))

    def to_record(self) -> dict[str, Any]:
        """Convert a diagnosis to a dict of plain values, for events.jsonl."""
        fields = asdict(self)
        # JSON has no tuples; None means not known and is left out. In files the message is called `words`.
        return {
            "words" if name == "message" else name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value is not None
        }


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl: what was observed at a step, and the action taken."""

    step: int
    kind: str
    """The kind of failure, or the check that reported it."""
    diagnosis: Mapping[str, Any]
    """A `Diagnosis` as a dict, with at least `cause` and `words`. Its key in events.jsonl is `verdict`."""
    action: str = "report"
    micro_step: int | None = None
    rank: int = 0
    sample_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of the line, such as `bundle`: a folder for `dit-lora replay`, relative to the run's folder."""

    @property
    def message(self) -> str:
        return str(self.diagnosis["words"])

    def to_record(self) -> dict[str, Any]:
        """Convert an event to a dict of plain values, for a line of events.jsonl."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "kind": self.kind,
            "sample_ids": list(self.sample_ids),
            "verdict": dict(self.diagnosis),
            "action": self.action,
            "seconds": round(self.seconds, 3),
            **self.facts,
        }


def make_event(step: int, kind: str, diagnosis: Diagnosis, action: str, seconds: float) -> Event:
    """Create the event for the diagnosis of a failed step."""
    return Event(
        step,
        kind,
        diagnosis.to_record(),
        action,
        diagnosis.micro_step,
        diagnosis.rank,
        diagnosis.sample_ids,
        seconds,
    )


def make_kernel_event(
    step: int,
    kind: str,
    message: str,
    fallback: str,
    *,
    module: str = "",
    cause: Cause = "kernel",
    action: str = "fallback",
    rank: int = 0,
    seconds: float = 0.0,
) -> Event:
    """Create the event for a kernel or backend that a comparison found wrong, or did not reach."""
    diagnosis = {"cause": cause, "words": message, "switch": fallback, "module": module}
    return Event(step, kind, diagnosis, action, rank=rank, seconds=seconds)


def make_observation_event(
    step: int, kind: str, message: str, *, cause: Cause = "unknown", module: str | None = None
) -> Event:
    """Create the event for something unusual in a healthy step, on which no action is taken."""
    return Event(step, kind, {"cause": cause, "words": message, **({"module": module} if module is not None else {})})


def make_hidden_infinity_event(step: int, modules: Sequence[str]) -> Event:
    """Create the event for modules whose output overflowed although the loss is finite: a clamp or a mask hides it."""
    message = (
        f"the loss is finite, but the output of {join_first_items(modules, 5)} is not: a clamp or a mask hides it"
    )
    return make_observation_event(step, "hidden_infinity", message, cause="precision", module=modules[0])


@dataclass(frozen=True)
class DiagnosisContext:
    """The model, its state and its optional components: everything that a diagnosis may inspect and disable.

    This class knows only a model, as when a bundle is replayed. `RunDiagnosisContext` in training/recovery also knows
    a run's optimizer, snapshots and data; `LoopDiagnosisContext` (guard/attach/watched_models.py) those of another
    loop.
    """

    model: nn.Module
    """The unwrapped model, which replays run."""
    fallbacks: list[Fallback] = field(default_factory=list)
    start_peak: float = 0.0
    """The largest trained weight when training started."""
    max_magnitude: float | None = None
    """Sample values with a larger magnitude are bad even if they are finite; None for no limit."""
    collective_forward: bool = False
    """True if every rank runs the same diagnosis at the same time, as a sharded model (FSDP2) needs. All then get
    the same diagnosis, on weights and moments as a whole.
    """
    frozen_record: FrozenWeightDigests | None = None
    """The frozen weights and buffers as they were at the start."""
    infinite_names: Collection[str] = ()
    """Names of frozen weights and buffers that held infinity at the start, as masks of -inf do."""
    disabled_names: Collection[str] = ()
    """Names of components that an earlier diagnosis disabled, which are not tested again."""

    def collect_optimizer_state(self) -> Mapping[str, torch.Tensor]:
        """Optimizer tensors and moving averages by name, as this rank holds them: its shards, if they are sharded."""
        return {}

    def compute_snapshot_peaks(self) -> Mapping[str, float]:
        """Largest magnitude of each tensor in the newest snapshot, by names of trained weights and optimizer state."""
        return {}

    def compute_decay_share(self) -> float:
        """The largest fraction of a weight that one step's weight decay removes: learning rate times decay."""
        return 0.0

    def find_other_sample(self, micro_batch: MicroBatch, excluded_ids: Collection[str]) -> MicroBatch | None:
        """Find a micro-batch of one sample that is not excluded, for comparison with `micro_batch`.

        None if there is none. It must be equal on all ranks.
        """
        return None

    def share_micro_batch(self, local_batch: MicroBatch | None, owner: int) -> MicroBatch | None:
        """Send the micro-batch of rank `owner` to every rank; other ranks pass None. Collective."""
        return local_batch

    def run_experiment(self, experiment: Callable[[], T]) -> T | None:
        """Run one experiment of a diagnosis. In another loop it may raise, and then has no result: None."""
        return experiment()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the model's parameters by name; if each rank diagnoses separately, as this rank's local shards."""
        return self.model.named_parameters() if self.collective_forward else iterate_weight_values(self.model)

    def list_enabled_fallbacks(self) -> list[Fallback]:
        """Optional components that are enabled now, each with its fallback.

        A part of a disabled component, and a set of disabled components, are excluded.
        """
        disabled_names = set(self.disabled_names)
        enabled = []
        for fallback in self.fallbacks:
            # A set such as `attention:flash+efficient` is off once each of its members is.
            kind, _, names = fallback.name.partition(":")
            members = {f"{kind}:{backend}" for backend in names.split("+")} if names else {fallback.name}
            if disabled_names.isdisjoint((fallback.name, fallback.parent)) and not members <= disabled_names:
                enabled.append(fallback)
        return enabled


@dataclass
class PendingDiagnosis:
    """One micro-batch and the evidence found so far; `build_final_diagnosis` creates the `Diagnosis`."""

    micro_batch: MicroBatch
    context: DiagnosisContext
    kind: str
    control: MicroBatch | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    rank: int = -1
    """The rank at fault, if it is not the micro-batch's; else -1."""
    num_failed: int = 0
    """Number of unhealthy runs of the unchanged micro-batch, out of `num_runs`."""
    num_runs: int = 0

    def describe_bad_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], describe: DescribeTensor) -> list[str]:
        """Describe bad tensors with `describe`, and record the first rank that has any as the one at fault."""
        # Maps each description to the rank whose values it is about, or to -1 without other ranks.
        descriptions = describe_tensors(tensors, describe, is_collective=self.context.collective_forward)
        self.rank = next(iter(descriptions.values()), -1) if self.rank < 0 else self.rank
        return list(descriptions)

    def build_final_diagnosis(self, cause: Cause, message: str, **facts: Any) -> Diagnosis:
        """Create the `Diagnosis` of this micro-batch from a cause, a message and the evidence found so far."""
        batch = self.micro_batch
        return Diagnosis(
            cause,
            message,
            step=batch.step,
            rank=batch.rank if self.rank < 0 else self.rank,
            micro_step=batch.micro_step,
            evidence=self.evidence,
            **facts,
        )

    def is_healthy(self, outcome: ReplayOutcome) -> bool:
        return outcome.is_healthy(needs_gradient=self.kind == "zero_gradient")

    def run_and_check_health(self, batch: MicroBatch | None = None) -> bool:
        """Run a micro-batch once, by default the one under diagnosis. True if it is healthy."""
        return self.is_healthy(replay_micro_batch(batch or self.micro_batch, self.context.model))

    def rerun_and_check_health(self) -> bool:
        """Run the unchanged micro-batch once more and count the run. True if it is healthy."""
        return self.is_healthy(self.rerun_micro_batch())

    def rerun_micro_batch(self) -> ReplayOutcome:
        """Replay the unchanged micro-batch, and count whether it is healthy."""
        outcome = replay_micro_batch(self.micro_batch, self.context.model)
        self.num_runs += 1
        self.num_failed += not self.is_healthy(outcome)
        return outcome
