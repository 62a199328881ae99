"""An exponential moving average of what is trained; it moves after healthy steps only."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from dit_lora.training.checkpoint import trainable_state


class TrainedEMA:
    """Diffusers' `EMAModel` over the trained weights, with its warm-up of (1 + step) / (10 + step).

    The average is what is validated and saved. Its decay is a function of the step, so that its tensors are
    all its state.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._average = EMAModel(self._parameters.values(), decay=decay, foreach=True)

    def step(self, number: int) -> None:
        """Move towards the weights after optimizer step `number`, counted from 1."""
        self._average.optimization_step = number - 1
        self._average.step(self._parameters.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages as `ema/<parameter>`."""
        averages = zip(self._parameters, self._average.shadow_params, strict=True)
        return {f"ema/{name}": average for name, average in averages}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the averages; afterwards its own weights, bit for bit."""
        self._average.store(self._parameters.values())
        self._average.copy_to(self._parameters.values())
        try:
            yield
        finally:
            self._average.restore(self._parameters.values())


def whole_state(model: nn.Module, ema: TrainedEMA | None) -> dict[str, torch.Tensor]:
    """The trained weights, and their averages if there are any."""
    return {**trainable_state(model), **(ema.tensors() if ema else {})}
