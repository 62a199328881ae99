"""The fake step that a plan counts leaves a model as it was."""

from types import MethodType

import torch
from torch import nn

from dit_lora.training.budget_step import autocasting


def test_a_forward_of_the_instances_own_is_there_again_after_autocast() -> None:
    """Chat models have one, which gives answers' losses."""
    model = nn.Linear(2, 3)
    stock = model.forward
    with autocasting(model, torch.bfloat16, gpu=False):
        assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model.forward == stock
    own = MethodType(lambda self, x: x.sum(), model)
    model.__dict__["forward"] = own
    with autocasting(model, torch.bfloat16, gpu=False):
        assert model.forward is not own
    assert model.forward is own
    assert model(torch.ones(1, 2)) == 2
