"""Runs work that training does not depend on (validation, samples): if it fails, training goes on after a message."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.guard.finite_gate import BadStateError, NonFiniteError
from dit_lora.numerics.memory import is_out_of_memory

T = TypeVar("T")

# These must end training: the guard's stop, a signal, or a device that can compute nothing more.
RERAISED_ERRORS = (NonFiniteError, BadStateError, InterruptedRunError, torch.AcceleratorError)


@dataclass
class _FailedOptionalWork:
    """A kind of optional work (such as samples) that failed during a run."""

    reason: str
    steps: list[int] = field(default_factory=list)
    is_disabled: bool = False
    """True after it ran out of memory: it is not tried again in this process."""


class OptionalWorkRunner:
    """Runs the work of a run whose failure does not end it, and keeps what was left out.

    Args:
        gather: Returns the values of all ranks, in rank order; collective.
        say: Writes a line for the user, on the main process.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], say: Callable[[str], None]) -> None:
        self._gather, self._say = gather, say
        self._failed_work: dict[str, _FailedOptionalWork] = {}

    def run_optional_work(
        self, name: str, step: int, work: Callable[[], T], *, is_collective: bool = False
    ) -> T | None:
        """Run optional work; returns its result, or None on every rank if it fails on one of them. Collective.

        Args:
            name: A plural noun for messages, such as `samples`.
            step: The step at which it runs.
            work: Must leave the model unchanged, even if it raises.
            is_collective: True if its forward pass needs all ranks. An error on only one of several ranks is then
                raised: the other ranks cannot be reached.

        Raises:
            NonFiniteError, BadStateError, InterruptedRunError, torch.AcceleratorError: These end training too.
        """
        earlier = self._failed_work.get(name)
        # Failures are shared, so all ranks skip the work together.
        if earlier is not None and earlier.is_disabled:
            earlier.steps.append(step)
            return None
        result, failure = None, None
        try:
            result = work()
        except RERAISED_ERRORS:
            raise
        # Pipelines, codecs and drivers raise errors of any class, and none should end a run.
        except Exception as error:
            # The other ranks are inside the forward pass, and would never reach the gather below.
            if is_collective and not getattr(error, "collective", False) and self._is_distributed():
                raise
            failure = _format_error(error), is_out_of_memory(error)
        # Only after the handler: the error's frames held the tensors that did not fit.
        if failure is not None:
            free_memory()
        failures = [reported for reported in self._gather(failure) if reported is not None]
        if not failures:
            return result
        reason, is_over = failures[0][0], any(reported[1] for reported in failures)
        left_out = self._failed_work.setdefault(name, _FailedOptionalWork(reason))
        left_out.steps.append(step)
        left_out.is_disabled |= is_over
        scope_text = "from here on" if is_over else "this time"
        self._say(f"warning: step {step}: {name} are skipped {scope_text}: {reason}; training continues")
        return None

    def run_optional_local_work(self, name: str, step: int, work: Callable[[], object]) -> bool:
        """Run optional work of this rank only, also in a background thread; False after an error, which is reported.

        Raises `OSError`: what the disk refuses ends a save, and the caller reports it.
        """
        try:
            work()
        except (OSError, *RERAISED_ERRORS):
            raise
        # Diffusers' and PEFT's writers raise errors of any class.
        except Exception as error:
            self._say(f"warning: step {step} has no {name}: {_format_error(error)}; training continues")
            return False
        return True

    def format_lines(self) -> list[str]:
        """One line per kind of optional work that failed and was left out, for the closing summary."""
        return [
            f"skipped: {name} of step{'s' * (len(part.steps) > 1)} {', '.join(map(str, part.steps))}: {part.reason}"
            for name, part in self._failed_work.items()
        ]

    def _is_distributed(self) -> bool:
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def free_memory() -> None:
    """Release unreferenced memory; pipelines and models hold reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def to_dit_lora_error(error: Exception) -> DitLoraError:
    """Convert any error to a `DitLoraError` with a one-line message, for other ranks."""
    failure = DitLoraError(_format_error(error))
    failure.__cause__ = error
    return failure


def _format_error(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    # One line, whatever the error contains.
    text = " ".join(str(error).split())
    if isinstance(error, DitLoraError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
