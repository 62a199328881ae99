"""Gradient flow of an adapter that is not zero at the start, as one that training continues from."""

import peft
import torch
from torch import nn

from dit_lora.guard.checks import check_gradient_flow

A, B = (f"0.lora_{part}.default.weight" for part in "AB")


def test_an_a_whose_b_is_not_zero_needs_a_gradient_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).requires_grad_(False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0", "1"]), model)
    x = torch.randn(4, 6)

    def wrong() -> list[str]:
        findings = check_gradient_flow(model, lambda: model(x).square().sum().backward())
        return [finding.message for finding in findings if not finding.ok]

    assert not wrong()  # a new adapter: every B is zero, and so is A's gradient
    with torch.no_grad():
        model.get_parameter(B)[3, 1] = 0.1
    assert not wrong()
    model.get_parameter(A).register_hook(torch.zeros_like)
    (message,) = wrong()
    assert message.endswith(f"  - {A}: a gradient that is all zero")
