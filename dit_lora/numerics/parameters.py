"""The parameters of a model that train."""

import torch
from torch import nn


def get_trainable_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """A module's trainable parameters by name, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
