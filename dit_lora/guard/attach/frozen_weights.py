"""Detect damaged frozen weights and buffers in loops that may write to some of them on purpose."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from dit_lora.guard.frozen_weights import Digests, FrozenWeightDigests, find_changed_digests

_MAX_TRACED_CHANGES = 8
"""If code wrote to more tensors than this, it was intended, for example by fusing an adapter."""
_MAX_DAMAGED = 2
"""If more tensors than this changed without a recorded write, it was intended too: bad memory is local."""


class LoopFrozenWeightDigests(FrozenWeightDigests):
    """Digests of the frozen weights and buffers that the training loop itself does not change.

    Excluded are buffers that a model call writes to, tensors that differ after a healthy step, such as counters and
    scales, and tensors that code changed later in many places at once. Faulty memory changes a tensor without raising
    its version counter.
    """

    def __init__(self, model: nn.Module, trained_ids: Collection[int]) -> None:
        self._trained_ids = trained_ids
        """Ids of parameters that are trained and frozen in turns, as in a GAN."""
        super().__init__(model)
        self._versions = self._versions_at_call = self._read_tensor_versions()
        self._addresses = self._addresses_at_call = self._read_tensor_addresses()
        self._changed_by_loop: set[str] = set()
        self._digests_after_first: Digests | None = None
        self.is_calibrated = False
        """True once the tensors that healthy steps change are known."""

    def _iter_frozen_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # A GAN freezes one network while it trains the other: such weights do change.
        alternating_names = {
            f"weight {name}" for name, p in self._model.named_parameters() if id(p) in self._trained_ids
        }
        return ((name, values) for name, values in super()._iter_frozen_tensors() if name not in alternating_names)

    def before_call(self) -> None:
        self._versions_at_call, self._addresses_at_call = (self._read_tensor_versions(), self._read_tensor_addresses())

    def after_call(self) -> None:
        """After a model call, stop watching the buffers that the model has written to since the call started."""
        # Writes raise the version counter; a new tensor in its place has another address.
        written = _find_differing_values(self._versions_at_call, self._read_tensor_versions())
        written |= _find_differing_values(self._addresses_at_call, self._read_tensor_addresses())
        # Only buffers: sharding and offloading replace the weights' storage while the model runs.
        self._changed_by_loop |= {name for name in written if name.startswith("buffer ")}

    def exclude_changed_tensors(self) -> None:
        """Stop watching the frozen tensors that a healthy step has changed.

        A weight that changed without a recorded write is excluded only if the next healthy step changes it too.
        """
        altered = set(super()._find_changed_tensors())
        if self._digests_after_first is not None:
            self._changed_by_loop.update(find_changed_digests(self._digests_after_first, self._compute_digests()))
        # Changed without a recorded write. Whether the loop did that shows at the next healthy step.
        elif unexplained := {n for n in self._find_corrupted_tensors(altered) if n.startswith("weight ")}:
            self._changed_by_loop |= altered - unexplained
            self._digests_after_first = self._compute_digests()
            return
        else:
            self._changed_by_loop |= altered
        self._digests_after_first, self.is_calibrated = None, True

    def has_corrupted_frozen_tensor(self) -> bool:
        """True if a frozen tensor changed although no code wrote to it.

        Tensors that code changed are no longer watched.
        """
        # Bits that differ from the start, apart from tensors that the loop is known to change.
        altered = set(super()._find_changed_tensors()) - self._changed_by_loop
        damaged = self._find_corrupted_tensors(altered)
        self._changed_by_loop |= altered - damaged
        return bool(damaged)

    def is_changed_by_loop(self, description: str) -> bool:
        """True if a description, "<kind> <name> ...", is of a frozen tensor that the loop itself changes."""
        # Names are "weight <name>" or "buffer <name>".
        kind, name, *_ = description.split(" ")
        return f"{kind} {name}" in self._changed_by_loop

    def _find_corrupted_tensors(self, altered: set[str]) -> set[str]:
        """Names of the frozen tensors whose changed bits only faulty memory can explain."""
        return _discard_if_too_many(altered - self._find_tensors_written_by_code(altered), _MAX_DAMAGED)

    def _find_tensors_written_by_code(self, altered: set[str]) -> set[str]:
        """Of frozen tensors with changed bits, those that code has written to.

        Code that bypasses the version counter with `.data`, such as averages and fused adapters, writes to many
        tensors at once or replaces their storage.
        """
        # `.data =` replaces the storage without raising the version counter.
        moved = _find_differing_values(self._addresses, self._read_tensor_addresses())
        # Tensors that move but keep their bits were offloaded, for example: then a new address proves no write.
        replaced = moved if moved - self._changed_by_loop <= altered else set()
        return altered & (replaced | _find_differing_values(self._versions, self._read_tensor_versions()))

    def _find_changed_tensors(self) -> list[str]:
        """Names of tensors with changed bits that the loop does not change itself, for a failed step."""
        names = [name for name in super()._find_changed_tensors() if name not in self._changed_by_loop]
        altered = set(names)
        # Writes to a few tensors may be the damage; writes to many are intended.
        reported = self._find_corrupted_tensors(altered) | _discard_if_too_many(
            self._find_tensors_written_by_code(altered), _MAX_TRACED_CHANGES
        )
        return [name for name in names if name in reported]

    def _read_tensor_versions(self) -> dict[str, int]:
        return {name: values._version for name, values in self._iter_frozen_tensors()}

    def _read_tensor_addresses(self) -> dict[str, int]:
        return {name: values.data_ptr() for name, values in self._iter_frozen_tensors()}


def _find_differing_values(before: Mapping[str, int], after: Mapping[str, int]) -> set[str]:
    return {name for name, value in before.items() if after.get(name) != value}


def _discard_if_too_many(names: set[str], max_count: int) -> set[str]:
    return names if len(names) <= max_count else set()
