"""Switches a model to evaluation temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Compute without gradients and dropout inside the context; afterwards the previous mode is restored."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
