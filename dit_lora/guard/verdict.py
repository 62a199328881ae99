"""The verdict on a tripped step, in words and as a record."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
class Verdict:
    """The cause of one tripped step on one rank, with the evidence."""

    cause: Cause
    words: str
    step: int
    rank: int
    micro_step: int | None = None
    sample_ids: tuple[str, ...] = ()
    """The samples at fault; empty where none is."""
    module: str | None = None
    op: str | None = None
    direction: str | None = None
    dtype: str | None = None
    timesteps: tuple[int, ...] = ()
    """Timesteps of the samples at fault, or of the micro-batch."""
    switch: str | None = None
    """The switch that makes it finite when it is off."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return plain values for events.jsonl."""
        fields = asdict(self)
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None
        }
