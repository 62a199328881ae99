"""Frozen weights and buffers of a loop that is not ours, which may have reasons of its own to write to them."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from dit_lora.guard.frozen import Digests, FrozenRecord, changed_between

_FEW = 8
"""More tensors than these, written to by code, are no damage: an adapter was fused into them, say."""
_AT_ONCE = 2
"""More tensors than these, changed without a trace, are no damage either: bad memory is in one place."""


class LoopRecord(FrozenRecord):
    """The digests of frozen weights and buffers, without those that the loop itself changes.

    The loop's own are buffers that a call of the model writes to, what differs after a healthy step, such as counters
    and scales, and what code has written to since in many places at once. Memory that goes bad leaves no trace in a
    tensor's version.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        self._trained = trained
        """Ids of what is trained in turns, as in a GAN, and so is frozen now and then."""
        super().__init__(model)
        self._versions = self._at_call = self._versions_now()
        self._addresses = self._addresses_at_call = self._addresses_now()
        self._loops_own: set[str] = set()
        self._after_first: Digests | None = None
        self.is_settled = False
        """True once it is known what healthy steps change."""

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        in_turns = {
            f"weight {name}" for name, p in self._model.named_parameters() if id(p) in self._trained
        }
        return ((name, values) for name, values in super()._untrained() if name not in in_turns)

    def call_begins(self) -> None:
        self._at_call, self._addresses_at_call = self._versions_now(), self._addresses_now()

    def call_ends(self) -> None:
        """Leave out the buffers that the model has written to since its call began: its own work, healthy or not."""
        written = _differing(self._at_call, self._versions_now())
        written |= _differing(self._addresses_at_call, self._addresses_now())
        # Not weights: gathering shards and offloading put others in their place while the model runs.
        self._loops_own |= {name for name in written if name.startswith("buffer ")}

    def settle(self) -> None:
        """Leave out, from now on, what a healthy step has changed; a weight that it changed without a trace, only if
        the next healthy step does so too.
        """
        altered = set(super()._altered())
        if self._after_first is not None:
            self._loops_own.update(changed_between(self._after_first, self._taken()))
        elif once := {n for n in self._damaged(altered) if n.startswith("weight ")}:
            self._loops_own |= altered - once
            self._after_first = self._taken()
            return
        else:
            self._loops_own |= altered
        self._after_first, self.is_settled = None, True

    def is_damaged(self) -> bool:
        """Return True if a tensor changed although no code wrote it and no step failed. Others are the loop's."""
        altered = set(super()._altered()) - self._loops_own
        damaged = self._damaged(altered)
        self._loops_own |= altered - damaged
        return bool(damaged)

    def is_own(self, described: str) -> bool:
        """Return True if what is described, by its kind and name first, is the loop's own."""
        kind, name, *_ = described.split(" ")
        return f"{kind} {name}" in self._loops_own

    def _damaged(self, altered: set[str]) -> set[str]:
        """Return what memory alone can have altered."""
        return _few(altered - self._traced(altered), _AT_ONCE)

    def _traced(self, altered: set[str]) -> set[str]:
        """Return where code has left a trace.

        Code that writes past the version, by `.data`, as averages and fused adapters do, writes to many tensors at
        once or puts new ones in their place.
        """
        moved = _differing(self._addresses, self._addresses_now())
        # Tensors that move and keep their bits were offloaded, say: then an address is no trace.
        replaced = moved if moved - self._loops_own <= altered else set()
        return altered & (replaced | _differing(self._versions, self._versions_now()))

    def _altered(self) -> list[str]:
        """Name what has other bits than at the start and is not the loop's own, when a step has tripped."""
        names = [name for name in super()._altered() if name not in self._loops_own]
        altered = set(names)
        suspect = self._damaged(altered) | _few(self._traced(altered), _FEW)
        return [name for name in names if name in suspect]

    def _versions_now(self) -> dict[str, int]:
        return {name: values._version for name, values in self._untrained()}

    def _addresses_now(self) -> dict[str, int]:
        return {name: values.data_ptr() for name, values in self._untrained()}


def _differing(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    return {name for name, value in before.items() if now.get(name) != value}


def _few(names: set[str], most: int) -> set[str]:
    return names if len(names) <= most else set()
