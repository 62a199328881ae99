"""Output preservation over every family: nothing at the start, and then what the adapter moves on other captions."""

import torch
from family_cases.subject import Subject, adapted, encoded_batch

from dit_lora.data.loading.batch import PRESERVE_PREFIX, PRESERVE_WEIGHT
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.replayable_batch import compute_training_losses


def test_it_is_nothing_at_the_start_and_then_moves_the_adapter_alone(quick_model_subject: Subject) -> None:
    checkpoint, streams = quick_model_subject.checkpoint, RandomStreams(0, [4, 5, 6])
    encoded = encoded_batch(quick_model_subject)
    names = checkpoint.encoders.text_spec(torch.float32)
    # Each sample has another's caption, of its own size.
    preserved_text = {f"{PRESERVE_PREFIX}{name}": encoded[name].roll(1, 0) for name in names}
    batch = {**encoded, **preserved_text, PRESERVE_WEIGHT: torch.tensor([1.0, 0.0, 2.0])}

    start = adapted(quick_model_subject, trained=False)
    plain = checkpoint.denoiser.losses(start, encoded, streams).losses
    assert torch.equal(compute_training_losses(checkpoint, start, batch, streams).losses, plain)

    moved = adapted(quick_model_subject)
    plain = checkpoint.denoiser.losses(moved, encoded, streams).losses
    second = compute_training_losses(checkpoint, moved, batch, streams).losses - plain
    assert second[1] == 0
    assert (second[[0, 2]] > 0).all()
    second.sum().backward()
    for name, parameter in moved.named_parameters():
        assert (parameter.grad is not None) is parameter.requires_grad, name
