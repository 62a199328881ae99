"""The diagnosis of a failed step: its cause and the evidence, as a message and as a record."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
class Diagnosis:
    """The cause of one failed step on one rank, with the evidence."""

    cause: Cause
    words: str
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
        return len(self.sample_ids) > 1 and all(f"{sample}: " in self.words for sample in self.sample_ids)

    def with_sample_ids(self, sample_ids: Sequence[str]) -> "Diagnosis":
        """Copy a diagnosis with other sample names, also in its message."""
        message = self.words
        if len(sample_ids) == len(self.sample_ids):
            # A message about several samples starts each part with the sample's name and a colon.
            for old, new in zip(self.sample_ids, sample_ids, strict=True):
                message = message.replace(f"{old}: ", f"{new}: ")
        return replace(self, words=message, sample_ids=tuple(sample_ids))

    def to_record(self) -> dict[str, Any]:
        """Convert a diagnosis to a dict of plain values, for events.jsonl."""
        fields = asdict(self)
        # JSON has no tuples; None means not known and is left out.
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None}
