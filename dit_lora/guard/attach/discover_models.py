"""Finds the models that a loss comes through, in a loop that does not name them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dit_lora.guard.attach.call_recorder import CapturedCall, Recorder
from dit_lora.guard.attach.outermost_calls import leave, listen


class Roots:
    """Records the calls of models as they turn up, so that the step in which they do can be judged too."""

    def __init__(
        self,
        recorder: Callable[[nn.Module], Recorder],
        calls: Sequence[CapturedCall],
        known: Callable[[], set[int]],
    ) -> None:
        self._recorder = recorder
        self._calls = calls
        self._known = known
        """Ids of the models that are recorded without it."""
        self._found: dict[int, Recorder] = {}
        self.is_looking = False

    def look(self) -> None:
        """Begin to look for models."""
        self.is_looking = True
        listen(self._around)

    def stop(self) -> None:
        """Look no more."""
        self.is_looking = False
        leave(self._around)
        for recorder in self._found.values():
            recorder.stop()

    def found(self) -> list[nn.Module]:
        """End the search, and return the models with weights to whose output a gradient came back."""
        self.stop()
        # Without a gradient, as a frozen encoder or a table that a collator asks, it has no part in what is trained.
        for recorder in [one for one in self._found.values() if not one.has_gradient]:
            recorder.drop()
        models = [one.model for one in self._found.values() if one.has_gradient]
        self._found.clear()
        return models

    @contextmanager
    def _around(self, module: nn.Module) -> Iterator[None]:
        is_known = id(module) in self._found or id(module) in self._known()
        if is_known or next(module.parameters(), None) is None:
            yield
            return
        recorder = self._found[id(module)] = self._recorder(module)
        recorder.start()
        before = self._known_calls()
        yield
        if self._known_calls() > before:
            # A model that is known was called within it, and is the one to look at.
            self._found.pop(id(module)).drop()

    def _known_calls(self) -> int:
        known = self._known()
        return sum(id(call.owner) in known for call in self._calls)
