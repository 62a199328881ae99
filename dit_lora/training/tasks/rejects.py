"""Refuses samples that cannot be used, in one list, or leaves them out, as `data.rejects` says."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from accelerate.utils import gather_object

from dit_lora.errors import DitLoraError, listed
from dit_lora.terminal import one_line
from dit_lora.training.session.session import Session

Named = TypeVar("Named")


class Rejects:
    """Samples that cannot be used, as all ranks know them; refused, or left out by `data.rejects: skip`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reasons: dict[str, str] = {}

    def add(
        self, reasons: Mapping[str, str], summary: str = "these samples cannot be used"
    ) -> None:
        """Take up the samples that this rank found unusable, each with its reason. Collective.

        Raises `DitLoraError` with all of them if `data.rejects` refuses them.
        """
        # Ranks may have found different samples, and must leave out the same.
        new = {name: why for some in gather_object([dict(reasons)]) for name, why in some.items()}
        if not new:
            return
        new = {
            name: one_line(why if name in why else f"{name}: {why}") for name, why in new.items()
        }
        if self.session.recipe.data.rejects == "refuse":
            error = DitLoraError(
                listed(f"{summary}; data.rejects=skip leaves them out", [*new.values()])
            )
            # Every rank has gathered the same list, and raises it.
            error.collective = True
            raise error
        self.reasons |= new
        self.session.say(listed(f"left out, by data.rejects: {len(new)} samples", [*new.values()]))

    def without(self, samples: Sequence[Named], name: Callable[[Named], str]) -> list[Named]:
        """Return the samples that stay; raises if none does."""
        stay = [one for one in samples if name(one) not in self.reasons]
        if not stay:
            raise DitLoraError("no sample is left: every one was rejected")
        return stay
