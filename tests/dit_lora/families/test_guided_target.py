"""`train.target: guided` over every family: guidance is taken out of what the model predicts, whatever that is."""

from dataclasses import replace
from typing import Any

import torch
from family_cases.subject import Subject, adapted, encoded_batch

from dit_lora.adapters.under import disable_trained_adapter
from dit_lora.data.loading.batch import EMPTY_PREFIX, GUIDED_SCALE
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.replayable_batch import compute_training_losses


def test_losses_are_quadratic_in_the_share_of_the_models_own_output(quick_model_subject: Subject) -> None:
    """With guidance s the prediction is u + (output - u) / s, so a squared error is a parabola in 1 / s."""
    checkpoint: Any = quick_model_subject.checkpoint
    if hasattr(checkpoint.denoiser, "should_train_variance"):  # refused with this target
        checkpoint = replace(checkpoint, denoiser=replace(checkpoint.denoiser, should_train_variance=False))
    encoded, streams = encoded_batch(quick_model_subject), RandomStreams(0, [4, 5, 6])
    # Instead of the empty caption each sample has another's, of its own size.
    other_text = {name: encoded[name].roll(1, 0) for name in checkpoint.encoders.text_spec(torch.float32)}
    batch = {**encoded, **{f"{EMPTY_PREFIX}{name}": tensor for name, tensor in other_text.items()}}
    model = adapted(quick_model_subject)

    def losses(scale: float) -> torch.Tensor:
        scales = torch.tensor([1.0, scale, scale])
        return compute_training_losses(checkpoint, model, {**batch, GUIDED_SCALE: scales}, streams).losses

    plain = checkpoint.denoiser.losses(model, encoded, streams).losses
    with disable_trained_adapter(model), torch.no_grad():
        base = checkpoint.denoiser.losses(model, {**encoded, **other_text}, streams).losses
    torch.testing.assert_close(losses(1.0), plain, rtol=1e-4, atol=1e-6)
    at_two = losses(2.0)
    # L(s) = base + b / s + c / s^2, with b + c = plain - base and b / 2 + c / 4 = L(2) - base
    b = 4 * (at_two - base) - (plain - base)
    c = plain - base - b
    at_five = losses(5.0)
    torch.testing.assert_close(at_five[1:], (base + b / 5 + c / 25)[1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at_five[0], plain[0], rtol=1e-4, atol=1e-6)  # a dropped caption
    assert (at_five[1:] - plain[1:]).abs().min() > 1e-6
    at_five.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) is parameter.requires_grad, name
