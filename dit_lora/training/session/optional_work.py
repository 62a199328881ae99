"""Run what only looks at a run (validation, samples): if it fails, a message says so and training goes on."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.guard.gate import NonFiniteError, PoisonedStateError
from dit_lora.numerics.memory import is_out_of_memory

T = TypeVar("T")

# These end training too: the guard's stop, a signal, and a device that can compute nothing more.
PASSES = (NonFiniteError, PoisonedStateError, InterruptedRunError, torch.AcceleratorError)


@dataclass
class _LeftOut:
    """A part of the work that failed."""

    why: str
    steps: list[int] = field(default_factory=list)
    is_over: bool = False
    """True after it ran out of memory: it is not tried again in this process."""


class OptionalWork:
    """The parts of a run's validation, and which of them were left out.

    Args:
        share: Returns the values of all ranks, in their order; collective.
        say: Writes a line for the user, on the main process.
    """

    def __init__(self, share: Callable[[Any], list[Any]], say: Callable[[str], None]) -> None:
        self._share, self._say = share, say
        self._left_out: dict[str, _LeftOut] = {}

    def attempt(
        self, name: str, step: int, work: Callable[[], T], *, is_collective: bool = False
    ) -> T | None:
        """Return `work()`, or None on every rank if it fails on one of them. Collective.

        Args:
            name: A plural noun for messages, such as `samples`.
            step: The step that it is done at.
            work: Must leave the model as it was, also where it raises.
            is_collective: True if a forward pass within needs all ranks. An error that one of several ranks has for
                itself is raised then: the others cannot be reached.

        Raises:
            NonFiniteError, PoisonedStateError, InterruptedRunError, torch.AcceleratorError: They end training too.
        """
        earlier = self._left_out.get(name)
        if earlier is not None and earlier.is_over:
            earlier.steps.append(step)
            return None
        result, failure = None, None
        try:
            result = work()
        except PASSES:
            raise
        # Pipelines, codecs and drivers raise errors of every class, and none of them is worth a run.
        except Exception as error:
            if is_collective and not getattr(error, "collective", False) and self._is_shared():
                raise
            failure = _words(error), is_out_of_memory(error)
        # After the handler: the error's frames held the tensors that did not fit.
        if failure is not None:
            free_memory()
        failures = [one for one in self._share(failure) if one is not None]
        if not failures:
            return result
        why, is_over = failures[0][0], any(one[1] for one in failures)
        left_out = self._left_out.setdefault(name, _LeftOut(why))
        left_out.steps.append(step)
        left_out.is_over |= is_over
        when = "from here on" if is_over else "this time"
        self._say(f"warning: step {step}: {name} are left out {when}: {why}; training goes on")
        return None

    def lines(self) -> list[str]:
        """Return a line for each part that was left out, for the run's last words."""
        return [
            f"left out: {name} of step{'s' * (len(one.steps) > 1)} {', '.join(map(str, one.steps))}: {one.why}"
            for name, one in self._left_out.items()
        ]

    def _is_shared(self) -> bool:
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def free_memory() -> None:
    """Give back what nothing refers to any more: pipelines and models hold circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def as_failure(error: Exception) -> DitLoraError:
    """Return an error of any class in one line, for other ranks to be told."""
    failure = DitLoraError(_words(error))
    failure.__cause__ = error
    return failure


def _words(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())
    if isinstance(error, DitLoraError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
