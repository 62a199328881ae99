"""Detect damaged frozen weights and buffers in loops that may write to some of them on purpose."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from dit_lora.guard.frozen import Digests, FrozenRecord, changed_between

_FEW = 8
"""If code wrote to more tensors than this, it was intended, for example by fusing an adapter."""
_AT_ONCE = 2
"""If more tensors than this changed without a recorded write, it was intended too: bad memory is local."""


class LoopRecord(FrozenRecord):
    """Digests of the frozen weights and buffers that the loop itself does not change.

    Excluded are buffers that a model call writes to, tensors that differ after a healthy step, such as counters and
    scales, and tensors that code changed later in many places at once. Faulty memory changes a tensor without raising
    its version counter.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        self._trained = trained
        """Ids of parameters that are trained and frozen in turns, as in a GAN."""
        super().__init__(model)
        self._versions = self._at_call = self._versions_now()
        self._addresses = self._addresses_at_call = self._addresses_now()
        self._loops_own: set[str] = set()
        self._after_first: Digests | None = None
        self.is_settled = False
        """True once the tensors that healthy steps change are known."""

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        # A GAN freezes one network while it trains the other: such weights do change.
        alternating_names = {
            f"weight {name}" for name, p in self._model.named_parameters() if id(p) in self._trained
        }
        return (
            (name, values) for name, values in super()._untrained() if name not in alternating_names
        )

    def call_begins(self) -> None:
        self._at_call, self._addresses_at_call = self._versions_now(), self._addresses_now()

    def call_ends(self) -> None:
        """Exclude the buffers that the model has written to since its call started, healthy or not."""
        # Writes raise the version counter; a new tensor in its place has another address.
        written = _differing(self._at_call, self._versions_now())
        written |= _differing(self._addresses_at_call, self._addresses_now())
        # Only buffers: sharding and offloading replace the weights' storage while the model runs.
        self._loops_own |= {name for name in written if name.startswith("buffer ")}

    def settle(self) -> None:
        """Exclude the tensors that a healthy step has changed.

        A weight that changed without a recorded write is excluded only if the next healthy step changes it too.
        """
        altered = set(super()._altered())
        if self._after_first is not None:
            self._loops_own.update(changed_between(self._after_first, self._taken()))
        # Changed without a recorded write. Whether the loop did that shows at the next healthy step.
        elif unexplained := {n for n in self._damaged(altered) if n.startswith("weight ")}:
            self._loops_own |= altered - unexplained
            self._after_first = self._taken()
            return
        else:
            self._loops_own |= altered
        self._after_first, self.is_settled = None, True

    def is_damaged(self) -> bool:
        """True if a tensor changed although no code wrote to it and no step failed. Other changes are excluded from
        now on.
        """
        # Bits that differ from the start, apart from tensors that the loop is known to change.
        altered = set(super()._altered()) - self._loops_own
        damaged = self._damaged(altered)
        self._loops_own |= altered - damaged
        return bool(damaged)

    def is_own(self, described: str) -> bool:
        """True if the described tensor, "<kind> <name> ...", is changed by the loop itself."""
        # Names are "weight <name>" or "buffer <name>".
        kind, name, *_ = described.split(" ")
        return f"{kind} {name}" in self._loops_own

    def _damaged(self, altered: set[str]) -> set[str]:
        """The altered tensors that only faulty memory can explain."""
        return _few(altered - self._traced(altered), _AT_ONCE)

    def _traced(self, altered: set[str]) -> set[str]:
        """The altered tensors that code has written to.

        Code that bypasses the version counter with `.data`, such as averages and fused adapters, writes to many
        tensors at once or replaces their storage.
        """
        # `.data =` replaces the storage without raising the version counter.
        moved = _differing(self._addresses, self._addresses_now())
        # Tensors that move but keep their bits were offloaded, for example: then a new address proves no write.
        replaced = moved if moved - self._loops_own <= altered else set()
        return altered & (replaced | _differing(self._versions, self._versions_now()))

    def _altered(self) -> list[str]:
        """Names of tensors with changed bits that the loop does not change itself, for a failed step."""
        names = [name for name in super()._altered() if name not in self._loops_own]
        altered = set(names)
        # Writes to a few tensors may be the damage; writes to many are intended.
        reported = self._damaged(altered) | _few(self._traced(altered), _FEW)
        return [name for name in names if name in reported]

    def _versions_now(self) -> dict[str, int]:
        return {name: values._version for name, values in self._untrained()}

    def _addresses_now(self) -> dict[str, int]:
        return {name: values.data_ptr() for name, values in self._untrained()}


def _differing(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    return {name for name, value in before.items() if now.get(name) != value}


def _few(names: set[str], most: int) -> set[str]:
    return names if len(names) <= most else set()
