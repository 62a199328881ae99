"""Find the models behind a loss in a loop that does not name its models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.call_recorder import ModelCallRecorder
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener
from dit_lora.guard.attach.containment import try_or_warn


class ModelDiscovery:
    """Records calls of models before it is known which are trained, so that the first step can be diagnosed too.

    It may start before the guard exists.
    """

    def __init__(self, log: CallLog, get_recorders: Callable[[], dict[int, ModelCallRecorder]]) -> None:
        self.log = log
        self.get_recorders = get_recorders
        """Returns the recorders of the models that are watched already, by the model's id."""
        self._discovered: dict[int, ModelCallRecorder] = {}
        self.is_searching = False

    def start_recording_calls(self) -> None:
        self.is_searching = True
        add_listener(self._record_call)

    def stop_recording_calls(self) -> None:
        self.is_searching = False
        remove_listener(self._record_call)

    def end_search_for_trained_models(self) -> list[nn.Module]:
        """End the search for trained models; returns those with weights whose output received a gradient.

        A model whose output may still receive one, as a generator's does after the discriminator's step, stays for the
        next search. Other models, such as a frozen encoder or a collator's table, are not trained.
        """
        self.stop_recording_calls()
        models = []
        for key, recorder in list(self._discovered.items()):
            if recorder.has_gradient:
                models.append(self._discovered.pop(key).model)
            # No graph of its outputs is left, so no gradient will come.
            elif not recorder.can_get_gradient:
                self._discovered.pop(key).drop_calls()
        return models

    @contextmanager
    def _record_call(self, call: OutermostCall) -> Iterator[None]:
        module, recorders = call.module, self.get_recorders()
        recorder = recorders.get(id(module)) or self._discovered.get(id(module))
        if recorder is not None and recorder.is_open:
            yield  # the recorder already wraps this model's call
            return
        # A module without weights, such as a loss, is not trained.
        if recorder is None and next(module.parameters(), None) is None:
            yield
            return
        if recorder is None:
            recorder = self._discovered[id(module)] = ModelCallRecorder(module, self.log)
        begun_call = try_or_warn(lambda: recorder.record_call_start(call.args, call.kwargs), "recording a call")
        num_calls_before = self._count_calls_of_known_models()
        # Calls of the same module inside this one are not recorded again.
        recorder.is_open = True
        try:
            yield
        finally:
            recorder.is_open = False
        if begun_call is not None:
            try_or_warn(lambda: recorder.record_call_output(begun_call, call.output), "recording an output")
        # The guard may have started with this call.
        if id(module) not in self.get_recorders() and self._count_calls_of_known_models() > num_calls_before:
            # A known model was called inside this module, and that model is the one to record.
            self._discovered.pop(id(module)).drop_calls()

    def _count_calls_of_known_models(self) -> int:
        recorders = self.get_recorders()
        return sum(id(call.owner) in recorders for call in self.log.calls)
