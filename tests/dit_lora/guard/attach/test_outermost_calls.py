"""Listeners and recorders of model calls inside a compiled function."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dit_lora.guard.attach.calls import call_recorder, outermost_calls
from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.call_recorder import ModelCallRecorder
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches


class Listener:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.was_compiled: list[bool] = []

    @contextmanager
    def record(self, call: OutermostCall) -> Iterator[None]:
        self.note()
        yield
        self.note()
        self.outputs.append(call.output)

    def note(self) -> None:
        # dynamo evaluates this to True in what it compiles.
        self.was_compiled.append(torch.compiler.is_compiling())


class Doubled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.was_compiled: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.was_compiled.append(torch.compiler.is_compiling())
        return super().forward(x) * 2


def note_checks(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[bool]:
    """True for each check whether a call is to be recorded that dynamo compiled."""
    was_compiled = []

    def check() -> bool:
        was_compiled.append(torch.compiler.is_compiling())
        return True

    monkeypatch.setattr(module, "is_training_call", check)
    return was_compiled


def test_dynamo_compiles_the_module_and_not_its_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    model, listener, inputs = Doubled(), Listener(), torch.ones(3, 2)
    checks = note_checks(monkeypatch, outermost_calls)

    @torch.compile(backend="eager")
    def compute_loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    add_listener(listener.record)
    try:
        loss = compute_loss(inputs)
    finally:
        remove_listener(listener.record)
        torch._dynamo.reset()
    assert model.was_compiled == [True]
    assert listener.was_compiled == [False, False]
    assert checks == [False]
    (output,) = listener.outputs
    assert torch.equal(output, model(inputs))
    assert torch.equal(loss, output.square().mean())


class NotedRecorder(ModelCallRecorder):
    was_compiled = False

    def record_call_start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedCall:
        self.was_compiled = torch.compiler.is_compiling()
        return super().record_call_start(args, kwargs)


def test_dynamo_does_not_compile_the_recording_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Doubled(), torch.ones(3, 2)
    checks = note_checks(monkeypatch, call_recorder)
    recorder = NotedRecorder(model, CallLog(LoadedBatches()))

    @torch.compile(backend="eager")
    def call_model(x: torch.Tensor) -> torch.Tensor:
        return recorder.run_and_record_call(model, x)

    output = call_model(inputs)
    torch._dynamo.reset()
    assert model.was_compiled == [True]
    assert not recorder.was_compiled
    assert checks == [False]
    (call,) = recorder.log.calls
    assert torch.equal(call.outputs[0], output)
