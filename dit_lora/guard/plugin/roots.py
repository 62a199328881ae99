"""Finds the models that a loss comes through, in a loop that does not name them: the outermost modules that are called.

Every call of a module passes by here while models are looked for, and none after.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dit_lora.guard.plugin.host import bare_model
from dit_lora.guard.plugin.recorded_calls import CapturedCall, Recorder, is_recorded


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
        if not self.is_looking:
            self.is_looking = True
            self._call = nn.Module.__call__
            self._stand_in()

    def stop(self) -> None:
        """Give modules their own call back."""
        if self.is_looking:
            self.is_looking = False
            self._step_aside()
        for recorder in self._found.values():
            recorder.stop()

    def found(self) -> list[nn.Module]:
        """End the search, and return the models with weights whose output has a gradient."""
        self.stop()
        # Without a gradient, as a frozen encoder, it has no part in what is trained.
        for recorder in [one for one in self._found.values() if not one.has_gradient]:
            recorder.drop()
        models = [one.model for one in self._found.values() if one.has_gradient]
        self._found.clear()
        return models

    def _stand_in(self) -> None:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Wrappers such as DDP are entered: a replay calls what is in them.
            if bare_model(module) is not module:
                return self._call(module, *args, **kwargs)
            # What is called within is not looked at, and a compiler that reads it meets nothing of ours.
            self._step_aside()
            try:
                return self._outermost(module, args, kwargs)
            finally:
                if self.is_looking:
                    self._stand_in()

        setattr(nn.Module, "__call__", called)  # noqa: B010  mypy takes no assignment to a method

    def _step_aside(self) -> None:
        setattr(nn.Module, "__call__", self._call)  # noqa: B010

    def _outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_known = id(module) in self._found or id(module) in self._known()
        if is_known or not is_recorded() or next(module.parameters(), None) is None:
            return self._call(module, *args, **kwargs)
        recorder = self._found[id(module)] = self._recorder(module)
        recorder.start()
        before = self._known_calls()
        result = self._call(module, *args, **kwargs)
        if self._known_calls() > before:
            # A model that is known was called within it, and is the one to look at.
            self._found.pop(id(module)).drop()
        return result

    def _known_calls(self) -> int:
        known = self._known()
        return sum(id(call.owner) in known for call in self._calls)
