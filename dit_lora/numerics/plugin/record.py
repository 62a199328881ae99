"""Frozen weights and buffers of a loop that is not ours, which may have reasons of its own to write to them."""

from collections.abc import Collection

from torch import nn

from dit_lora.numerics.frozen import FrozenRecord, untrained

_FEW = 8
"""More tensors than these, written to by code, are no damage: an adapter was fused into them, say."""


class LoopRecord(FrozenRecord):
    """The digests of frozen weights and buffers, without those that the loop itself changes.

    The loop's own are what differs after a healthy step, such as counters and scales, and what code has written to
    since in many places at once. Memory that goes bad leaves no trace in a tensor's version.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._versions = self._versions_now()
        self._loops_own: set[str] = set()
        self.is_settled = False
        """True once a healthy step was compared with the start."""

    def settle(self) -> None:
        """Leave out, from now on, what a healthy step has changed."""
        self._loops_own.update(map(_name, super().changed()))
        self.is_settled = True

    def changed(self) -> list[str]:
        now = self._versions_now()
        written = {name for name, version in self._versions.items() if now.get(name) != version}
        loops_own: Collection[str] = self._loops_own | (written if len(written) > _FEW else set())
        return [words for words in super().changed() if _name(words) not in loops_own]

    def _versions_now(self) -> dict[str, int]:
        return {name: values._version for name, values in untrained(self._model)}


def _name(words: str) -> str:
    return words.removesuffix(" has other bits than at the start")
