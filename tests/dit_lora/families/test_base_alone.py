"""The contract with a base that is shown after the first step: with B at zero, a model equals its base bitwise."""

import pytest
import torch
from family_cases.subject import Subject, adapted, encoded_batch
from fuse_checks import by, fuse_all
from torch import nn

from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.execution.base_alone import (
    has_only_untrained_adapters,
    temporarily_reset_adapters,
)


@torch.no_grad()
def losses(subject: Subject, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return subject.checkpoint.denoiser.losses(model.eval(), batch, RandomStreams(0, [0, 1, 2])).losses


@pytest.mark.parametrize("fused", [False, True])
def test_a_trained_model_is_its_base_within_and_as_it_was_afterwards(
    quick_model_subject: Subject, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A is another one than before training, and B is put back where what is within fails."""
    model, batch = adapted(quick_model_subject), encoded_batch(quick_model_subject)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    random = torch.Generator().manual_seed(7)
    with by("reference", monkeypatch), torch.no_grad():
        if fused:
            fuse_all(model)
        for name, parameter in trained.items():
            if ".lora_B." in name:
                parameter.zero_()
        assert has_only_untrained_adapters(model)
        base = losses(quick_model_subject, model, batch)
        for parameter in trained.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
        after = losses(quick_model_subject, model, batch)
        assert not torch.equal(after, base)
        initial = {name: p.clone() for name, p in trained.items()}
        with temporarily_reset_adapters(model):
            assert has_only_untrained_adapters(model)
            assert torch.equal(losses(quick_model_subject, model, batch), base)
        with pytest.raises(ValueError, match="within"), temporarily_reset_adapters(model):
            raise ValueError("within")
        assert not has_only_untrained_adapters(model)
        assert all(torch.equal(p, initial[name]) for name, p in trained.items())
        assert torch.equal(losses(quick_model_subject, model, batch), after)


def test_only_a_lora_whose_b_is_zero_does_nothing(quick_model_subject: Subject) -> None:
    model = adapted(quick_model_subject)
    b = [p for n, p in model.named_parameters() if ".lora_B." in n]
    with torch.no_grad():
        for parameter in b:
            parameter.zero_()
        assert has_only_untrained_adapters(model)
        b[-1].view(-1)[-1] = 1e-20
    assert not has_only_untrained_adapters(model)
    b[-1].detach().zero_()
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    frozen.requires_grad_(True)  # a group of base weights
    assert not has_only_untrained_adapters(model)
