"""Listeners of model calls inside a compiled function."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener


class Recorder:
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


def test_dynamo_compiles_the_module_and_not_its_listeners() -> None:
    model, recorder, inputs = Doubled(), Recorder(), torch.ones(3, 2)

    @torch.compile(backend="eager")
    def compute_loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    add_listener(recorder.record)
    try:
        loss = compute_loss(inputs)
    finally:
        remove_listener(recorder.record)
        torch._dynamo.reset()
    assert model.was_compiled == [True]
    assert recorder.was_compiled == [False, False]
    (output,) = recorder.outputs
    assert torch.equal(output, model(inputs))
    assert torch.equal(loss, output.square().mean())
