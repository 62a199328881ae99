"""Collects unusable samples: refuses them in one list, or leaves them out, according to `data.rejects`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.ranks import gather_object
from dit_lora.terminal import make_one_line
from dit_lora.training.session.session import Session

SampleT = TypeVar("SampleT")


class Rejects:
    """The unusable samples of a run, known to all ranks. They are refused, or left out with `data.rejects: skip`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reasons: dict[str, str] = {}

    def add_rejected_samples(self, reasons: Mapping[str, str], summary: str = "these samples cannot be used") -> None:
        """Add samples that this rank found unusable, each with its reason. Collective.

        Raises `DitLoraError` with all of them if `data.rejects` is `refuse`.
        """
        # Ranks may have found different samples, but must leave out the same.
        new = {name: reason for some in gather_object([dict(reasons)]) for name, reason in some.items()}
        if not new:
            return
        new = {name: make_one_line(reason if name in reason else f"{name}: {reason}") for name, reason in new.items()}
        if self.session.recipe.data.rejects == "refuse":
            error = DitLoraError(format_list(f"{summary}; data.rejects=skip leaves them out", [*new.values()]))
            # Every rank has the same list, and raises it.
            error.collective = True
            raise error
        self.reasons |= new
        self.session.say(format_list(f"left out {len(new)} samples, because data.rejects is skip", [*new.values()]))

    def filter_samples(self, samples: Sequence[SampleT], get_id: Callable[[SampleT], str]) -> list[SampleT]:
        """The samples that are not rejected; raises `DitLoraError` if none is left."""
        stay = [sample for sample in samples if get_id(sample) not in self.reasons]
        if not stay:
            raise DitLoraError("no sample is left: every one was rejected")
        return stay
