"""The calls that a loop has made of its models since gradients began anew, shared by all recorders of a guard."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.tensors import iter_tensors

_MAX_OUTPUTS = 64


class CallLog:
    """Calls in the order in which they were made, until no gradient of now comes from them."""

    def __init__(self, batches: LoadedBatches) -> None:
        self.calls: list[CapturedCall] = []
        self.generation = 0
        """Number of times that gradients began anew."""
        self.is_closed = False
        """True once a step was taken or skipped: its calls are dropped when the next call begins."""
        self.given_names: tuple[str, ...] = ()
        """Names that the loop has given to the samples of the calls now under way."""
        self.generator: torch.Generator | None = None
        """A generator of the loop's own, whose state is noted with each call."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a call begins."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a call has ended."""
        self.batch_of_call: Callable[[], int | None] = batches.batch_of_call
        """Returns the number of the batch that a call which begins now was made for; None where it is not certain."""
        self._outputs: deque[tuple[StorageWeakRef, int]] = deque(maxlen=_MAX_OUTPUTS)
        """Memory of recent model outputs, each with its step. Weak references: a freed address can be reused."""
        self._num_steps = 0

    def begin(self, call: CapturedCall) -> None:
        self.calls.append(call)
        self.on_begin()

    def end(self, output: Any) -> None:
        found = [output] if type(output) is torch.Tensor else [t for _, t in iter_tensors(output)]
        for tensor in found:
            if tensor.layout is torch.strided:
                self._outputs.append((StorageWeakRef(tensor.untyped_storage()), self._num_steps))
        self.on_end()

    def renew_gradients(self) -> None:
        """Gradients begin anew. Calls whose gradient the loop differentiates itself are part of the new ones' loss."""
        for call in self.calls:
            if call.is_differentiated_twice and call.generation == self.generation:
                call.generation += 1
        self.generation += 1

    def drop(self, call: CapturedCall) -> None:
        self.calls[:] = [other for other in self.calls if other is not call]

    def drop_old(self) -> None:
        """Drop calls that no gradient of now comes from or will come from, before another one takes memory."""
        live_generation: int | None = self.generation
        if self.is_closed:
            self.is_closed = False
            self._num_steps += 1
            live_generation = None  # the step of all these calls is over
            for call in self.calls:
                if call.generation >= 0:
                    call.outputs, call.output_gradients = (), []
        if self.calls:
            self.calls[:] = [
                call
                for call in self.calls
                if call.generation == live_generation
                or (call.generation < 0 and call.may_get_gradient)
            ]

    def current(self) -> list[CapturedCall]:
        """Calls that the gradients of now come from; where there are none, those that no gradient came back to."""
        current = [call for call in self.calls if call.generation == self.generation]
        calls = current or [call for call in self.calls if call.generation < 0]
        # Numbered from the first whose gradients the loop has kept.
        if calls and (first := calls[0].micro_step):
            for call in calls:
                call.micro_step -= first
        return calls

    def is_earlier_output(self, tensor: torch.Tensor) -> bool:
        """True if a tensor shares memory with an output of an earlier step, so that the loop carries state over."""
        if tensor.layout is not torch.strided:
            return False
        memory = StorageWeakRef(tensor.untyped_storage())
        return any(memory == ref and step < self._num_steps for ref, step in self._outputs)
