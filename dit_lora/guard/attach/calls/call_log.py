"""The model calls since the loop last cleared its gradients, shared by all recorders of a guard."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.tensors import iter_tensors

_MAX_OUTPUTS = 64
_MAX_CALLS = 4096  # more than a step has: a loop that neither steps nor clears its gradients drops its oldest calls


class CallLog:
    """Log of recorded model calls in order. A call is kept until no current gradient comes from it.

    At most `_MAX_CALLS` are kept.
    """

    def __init__(self, batches: LoadedBatches) -> None:
        self.calls: list[CapturedCall] = []
        self.generation = 0
        """Number of times that the loop has cleared its gradients and started new ones."""
        self.is_step_over = False
        """True once a step was taken or skipped: its calls are dropped when the next call starts."""
        self.sample_names: tuple[str, ...] = ()
        """Sample names that the loop has set for the calls that it makes now."""
        self.generator: torch.Generator | None = None
        """The loop's random generator, whose state is recorded with each call; None if it uses torch's."""
        self.on_begin: Callable[[], None] = lambda: None
        """Function that is called when the recording of a model call begins."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a call has ended."""
        self.get_batch_number: Callable[[], int | None] = batches.get_current_batch_number
        """Returns the number of the batch that a call starting now belongs to; None if that is not certain."""
        self._outputs: deque[tuple[StorageWeakRef, int]] = deque(maxlen=_MAX_OUTPUTS)
        """Storages of recent model outputs, each with its step. Weak: a freed address can be reused."""
        self._num_steps = 0

    def begin_call(self, call: CapturedCall) -> None:
        self.calls.append(call)
        if len(self.calls) > _MAX_CALLS:
            del self.calls[0]
        self.on_begin()

    def end_call(self, output: Any) -> None:
        # The common case of a plain tensor needs no search.
        tensors = [output] if type(output) is torch.Tensor else [t for _, t in iter_tensors(output)]
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._outputs.append((StorageWeakRef(tensor.untyped_storage()), self._num_steps))
        self.on_end()

    def record_gradient_reset(self) -> None:
        """Record that the training loop has cleared its gradients and started new ones.

        Recorded model calls that the loop differentiates twice (create_graph=True) stay: they are part of the loss of
        the new gradients.
        """
        for call in self.calls:
            if call.is_differentiated_twice and call.generation == self.generation:
                call.generation += 1
        self.generation += 1

    def drop_call(self, call: CapturedCall) -> None:
        self.calls[:] = [logged for logged in self.calls if logged is not call]

    def drop_stale_calls(self) -> None:
        """Drop recorded model calls that no current or future gradient comes from, before a new call takes memory."""
        live_generation: int | None = self.generation
        if self.is_step_over:
            self.is_step_over = False
            self._num_steps += 1
            live_generation = None  # the step of all these calls is over
            for call in self.calls:
                if call.generation >= 0:
                    call.outputs, call.output_gradients = (), []
        if self.calls:
            self.calls[:] = [
                call
                for call in self.calls
                if call.generation == live_generation or (call.generation < 0 and call.can_get_gradient)
            ]

    def get_current_calls(self) -> list[CapturedCall]:
        """Recorded model calls that the current gradients come from.

        If there are none, those that no gradient has reached yet.
        """
        current = [call for call in self.calls if call.generation == self.generation]
        calls = current or [call for call in self.calls if call.generation < 0]
        # Renumber micro-steps from the first call whose gradients the loop has kept.
        if calls and (start := calls[0].micro_step):
            for call in calls:
                call.micro_step -= start
        return calls

    def is_earlier_output(self, tensor: torch.Tensor) -> bool:
        """True if a tensor shares memory with an output of an earlier step, so that the loop carries state over."""
        if tensor.layout is not torch.strided:
            return False
        # Views share their base's storage, so compare storages and not tensors.
        memory = StorageWeakRef(tensor.untyped_storage())
        return any(memory == ref and step < self._num_steps for ref, step in self._outputs)
